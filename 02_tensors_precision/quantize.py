"""Quantize a trained language model after training (PTQ): fewer bits per weight, and what that costs.

A weight w is kept as the integer round(w / scale), with scale = largest |w| / largest integer: nothing is
off by more than scale / 2. The fewer weights share a scale (the matrix, a row, a group of 32), the less
one outlier hurts them, and each scale costs two bytes. Weights alone save memory; to multiply integers,
activations need scales too, measured beforehand on text like that to come (calibration). Layers that suffer
most, found by quantizing one at a time, can keep more bits. It is not distillation: no second model learns.

    laptop    python 02_tensors_precision/quantize.py
    figures   python 02_tensors_precision/quantize.py --train-steps 1000
    one GPU   python 02_tensors_precision/quantize.py --train-steps 1000 --device cuda
    cluster   one process is all it uses

Look for: delta, the held-out loss above that of fp32, against bytes; what calibration on the wrong text costs;
tokens/s (in turns: median, lowest, highest) where floats are multiplied after dequantizing (no gain) and in torch's
own kernels. The bare run's model knows so little that it has little to lose; with --train-steps 1000 it has.
Before: precision.py. Next: qat.py trains on with the rounding in place.
"""

import itertools
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[i]) for i in (0, 1)]  # neighbours; common/
import _quantize_kernels as torch_kernels
import _quantize_workbench as workbench
from _quantize_workbench import Forward, difference, linears, llama2_bytes, measure, observe, sensitivity

from common import exits, runtime

KEEP = 6  # of 42 layers, in mixed precision
DEQUANTIZED = "fp32, dequantized"
OBSERVERS = {"min-max": 0.0, "percentile 99.9": 1e-3}  # what share of the values is clipped at either end


class Quantized(NamedTuple):
    codes: Tensor  # int8 [out, in], or for 4 bits and fewer uint8 [out, in / 2]: two to a byte
    scale: Tensor  # bf16 [out, groups], or [1, 1] for one per tensor
    width: int  # values of a row that share a scale; the last group may be shorter

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes


def quantize(weight: Tensor, bits: int, group: str | int, clip: float | Tensor = 1.0) -> Quantized:
    """Symmetric, round to nearest; `group` is "tensor", "channel" (a row) or how many values share a scale.
    What is above the share `clip` of the largest value becomes the largest integer."""
    limit = 2 ** (bits - 1) - 1  # 127 or 7: -128 and -8 have no positive counterpart and stay unused
    rows, columns = weight.shape
    width = group if isinstance(group, int) else columns
    values = F.pad(weight, (0, -columns % width)).view(rows, -1, width)  # zeros change no maximum
    largest = values.abs().amax((0, 1, 2) if group == "tensor" else 2, keepdim=True)
    scale = (largest * clip / limit).bfloat16()  # rounding it moves 127 by less than 1/2: no error above scale / 2
    scale = torch.where(scale > 0, scale, 1)  # all zeros: 0 / 1, not 0 / 0
    codes = (values / scale.float()).round().clamp(-limit, limit).to(torch.int8).view(rows, -1)[:, :columns]
    return Quantized(pack(codes) if bits <= 4 else codes.contiguous(), scale[..., 0], width)


def dequantize(w: Quantized) -> Tensor:
    codes = unpack(w.codes) if w.codes.dtype == torch.uint8 else w.codes
    return codes * step(w, codes.shape[1])


def step(w: Quantized, columns: int) -> Tensor:
    """The scale of each value, [out, in] or [1, in]."""
    return w.scale.float().repeat_interleave(w.width, 1)[:, :columns]


def pack(codes: Tensor) -> Tensor:
    """int8 [out, in] of -8 to 7 -> uint8 [out, in / 2]: even columns in the low four bits, odd in the high."""
    if codes.shape[1] % 2:
        raise ValueError(f"{codes.shape[1]} int4 values to a row: an odd number does not fill bytes")
    return (codes[:, 1::2] << 4 | codes[:, ::2] & 15).view(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    signed = packed.view(torch.int8)
    return torch.stack((signed << 4 >> 4, signed >> 4), -1).flatten(1)  # >> repeats the sign bit


def emulate(w: Quantized) -> Forward:
    return lambda x: F.linear(x, dequantize(w))


def activation_codes(x: Tensor, low: float, high: float) -> tuple[Tensor, float, int]:
    """Asymmetric: low..high falls on -128..127, and 0 on a whole number, the zero point, so that 0 is exact."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / 255 or 1.0
    zero = round(-128 - low / scale)
    return ((x / scale).round() + zero).clamp(-128, 127), scale, zero


def w8a8(w: Quantized, low: float, high: float, kernel: bool = True) -> Forward:
    """Integers summed in int32, sum (a - zero) b = sum a b - zero · sum b, scales after; or the same in floats."""
    sums, row_scales = w.codes.sum(1, dtype=torch.int32), w.scale[:, 0].float()

    def forward(x: Tensor) -> Tensor:
        codes, scale, zero = activation_codes(x, low, high)
        if not kernel:
            return F.linear((codes - zero) * scale, dequantize(w))
        return (torch._int_mm(codes.to(torch.int8), w.codes.T) - zero * sums) * (scale * row_scales)

    return torch_kernels.on_matrices(forward)


def torch_kernel(w: Quantized) -> Forward:
    if w.codes.dtype == torch.uint8:
        return torch_kernels.int4_kernel(unpack(w.codes), w.scale, w.width)
    return torch_kernels.int8_kernel(w.codes, w.scale)


def schemes(net, tuning: workbench.Batches, scan: dict[str, tuple[float, float]]):
    """(scheme, what is multiplied, bytes of weights and scales, forwards), one by one."""
    layers = linears(net)
    weights = {name: layer.weight.detach() for name, layer in layers.items()}
    yield "fp32", "fp32", sum(w.nbytes for w in weights.values()), {}
    half = {name: torch_kernels.bf16(w) for name, w in weights.items()}
    yield "bf16", "bf16", sum(w.nbytes for w in weights.values()) // 2, half

    packed = {}
    for bits, group in [*itertools.product((8, 4), ("tensor", "channel", 128, 32)), (3, "channel")]:
        some = packed[bits, group] = {name: quantize(w, bits, group) for name, w in weights.items()}
        for name, w in some.items():  # the promise of rounding; 1e-5: fp32's own rounding
            assert ((dequantize(w) - weights[name]).abs() <= step(w, weights[name].shape[1]) * (0.5 + 1e-5)).all()
        exact, nbytes = {name: emulate(w) for name, w in some.items()}, sum(w.nbytes for w in some.values())
        yield f"int{bits} per {group}", DEQUANTIZED, nbytes, exact
        if (bits, group) in ((8, "channel"), (4, 32)):
            fast = torch_kernels.checked(layers, {name: partial(torch_kernel, w) for name, w in some.items()}, exact)
            # on a GPU the one for int8 is a reference: fp32, and no sign of what int8 can do there
            kind = "fp32" if bits == 8 and layers["layers.0.mlp.up_proj"].weight.is_cuda else "bf16"
            if fast:
                yield f"int{bits} per {group}", f"torch's kernel, {kind}", nbytes, fast

    int8 = packed[8, "channel"]
    inputs, nbytes = tuning[0][0], sum(w.nbytes for w in int8.values())
    texts = {"text": inputs, "random bytes": torch.randint_like(inputs, 256), "spaces": torch.full_like(inputs, 32)}
    for (text, seen), (observer, clip) in itertools.product(texts.items(), OBSERVERS.items()):
        ranges = observe(net, seen, clip)
        exact = {name: w8a8(w, *ranges[name], kernel=False) for name, w in int8.items()}
        fast = torch_kernels.checked(layers, {name: partial(w8a8, w, *ranges[name]) for name, w in int8.items()}, exact)
        yield f"W8A8, {observer} of {text}", "torch's kernel, int8" if fast else DEQUANTIZED, nbytes, fast or exact

    for bits, which in itertools.product((4, 3), ("most", "least")):
        kept = [*scan][:KEEP] if which == "most" else [*scan][-KEEP:]
        mixed = {name: packed[8 if name in kept else bits, "channel"][name] for name in weights}
        nbytes, exact = sum(w.nbytes for w in mixed.values()), {name: emulate(w) for name, w in mixed.items()}
        yield f"int{bits} per channel, {KEEP} {which} sensitive int8", DEQUANTIZED, nbytes, exact


def ways(weight: Tensor) -> dict[str, tuple[torch_kernels.Kernel, Forward]]:
    """A layer in every way that speed may come from, and the arithmetic that each must agree with."""
    plain, int8, int4 = partial(F.linear, weight=weight), quantize(weight, 8, "channel"), quantize(weight, 4, 32)
    return {
        "fp32": (lambda: plain, plain),
        "bf16": (lambda: torch_kernels.bf16(weight), plain),
        "int8 weights, torch's kernel": (lambda: torch_kernel(int8), emulate(int8)),
        "int4 weights, torch's kernel": (lambda: torch_kernel(int4), emulate(int4)),
        "int4 weights, dequantized each time": (lambda: emulate(int4), emulate(int4)),
        "W8A8, torch's kernel": (lambda: w8a8(int8, -5.0, 5.0), w8a8(int8, -5.0, 5.0, kernel=False)),
    }


def main() -> int:
    args = workbench.flags(__doc__).parse_args()
    device, start = runtime.single_device(args.device), time.perf_counter()
    net, corpus = workbench.trained_model(args, device)
    tuning, shown = workbench.held_out(corpus, device)
    coarse = {name: emulate(quantize(layer.weight.detach(), 3, "channel")) for name, layer in linears(net).items()}
    scan = sensitivity(net, coarse, tuning[:2])  # at 3 bits: at 4 one layer's share drowns in chance
    found = [*schemes(net, tuning, scan)]
    # batch by batch all take turns, so that a disturbance hits all alike; the first turn warms up
    turns = [[measure(net, forwards, [batch]) for *_, forwards in found] for batch in shown]
    base, rows = torch.cat([turn[0][0] for turn in turns]), []
    for i, (scheme, multiplied, nbytes, _) in enumerate(found):
        losses, speeds = torch.cat([turn[i][0] for turn in turns]), [turn[i][1] for turn in turns[1:]]
        row = {"scheme": scheme, "multiplied": multiplied, "weight_bytes": nbytes, "val_loss": losses.mean().item()}
        row["delta"], row["standard_error"] = difference(losses, base)
        row |= {"tokens_per_second": statistics.median(speeds), "lowest": min(speeds), "highest": max(speeds)}
        rows.append(row)
    times = torch_kernels.time_layer(ways, 4096 if device.type == "cpu" else 16_384, device)
    kinds = {f"int{b}_per_{g}": partial(quantize, bits=b, group=g) for b, g in ((8, "channel"), (4, 128), (4, 32))}
    kept = sum(p.nbytes for p in net.parameters()) - rows[0]["weight_bytes"]
    print(f"\nturns: {len(speeds)}, large layer {torch_kernels.ROUNDS}; most sensitive: {', '.join([*scan][:KEEP])}")
    print("checked: no weight is off by more than scale / 2; the kernels that ran agree with the arithmetic here")
    print(f"not quantized: embedding (also the output layer) and norms, {kept:,} bytes. int3 is stored in 4 bits")
    workbench.finish(args, net, start, rows=rows, sensitivity=scan, large_layer=times, llama2=llama2_bytes(kinds))
    return 0


if __name__ == "__main__":
    exits.run(main)
