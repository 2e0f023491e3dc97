"""Quantize a trained language model after training (PTQ): fewer bits per weight, and what that costs.

A weight w is kept as the integer round(w / scale), with scale = largest |w| / largest integer: nothing is
off by more than scale / 2. The fewer weights share a scale (the matrix, a row, a group of 32), the less
one outlier hurts them, and each scale costs two bytes. Weights alone save memory; to multiply integers,
activations need scales too, measured beforehand on text like that to come (calibration). Layers that suffer
most, found by quantizing one at a time, can keep more bits. It is not distillation: no second model learns.

    laptop    python 02_tensors_precision/quantize.py
    figures   python 02_tensors_precision/quantize.py --train-steps 1000
    real      python 02_tensors_precision/quantize.py --model models/smollm2-135m
    one GPU   python 02_tensors_precision/quantize.py --train-steps 1000 --device cuda
    cluster   one process is all it uses

Look for: the held-out loss above that of fp32, against bytes; what calibration on the wrong text costs; tokens/s where
floats are multiplied after dequantizing (no gain) and in torch's own kernels. The bare run's model knows so little that
it has little to lose; a real one has more, and activations that are thousands of times as large as the mean.
Before: precision.py. Next: qat.py trains on with the rounding in place.
"""

import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[i]) for i in (0, 1)]  # neighbours; common/
from _quantize_kernels import Kernel, bf16, checked, int4_kernel, int8_kernel, on_matrices, time_layer
from _quantize_llama2 import llama2_bytes, print_llama2
from _quantize_model import finish, flags, held_out_sets, scan_set, starting_model
from _quantize_report import print_layer, print_schemes, print_sensitivity
from _quantize_workbench import Batches, Forward, Scheme, evaluate, linears, observe, sensitivity

from old import exits, hardware, runtime

KEEP = 7  # one layer of so many keeps more bits in mixed precision
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
    """Symmetric, to nearest; `group`: "tensor", "channel" (a row) or how many values share a scale. What is above the
    share `clip` of the largest value becomes the largest integer."""
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
    """The scale of each value, [out, in] or [1, in]: twice the most that rounding may do to it."""
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
    low = min(low, 0.0)
    high = max(high, 0.0)
    scale = (high - low) / 255 or 1.0
    zero = round(-128 - low / scale)
    return ((x / scale).round() + zero).clamp(-128, 127), scale, zero


def w8a8(w: Quantized, low: float, high: float, kernel: bool = True) -> Forward:
    """Integers summed in int32, sum (a - zero) b = sum a b - zero · sum b, scales after; or the same in floats.

    On a CPU without units for it torch's product is a plain loop, or one that cuts its sums off at 16 bits.
    """
    if kernel and "int8" not in hardware.native_types(w.codes.device)[0]:
        raise RuntimeError(f"{w.codes.device.type} has no units that multiply int8")
    row_sums = w.codes.sum(1, dtype=torch.int32)
    row_scales = w.scale[:, 0].float()

    def forward(x: Tensor) -> Tensor:
        codes, scale, zero = activation_codes(x, low, high)
        if not kernel:
            return F.linear((codes - zero) * scale, dequantize(w))
        return (torch._int_mm(codes.to(torch.int8), w.codes.T) - zero * row_sums) * (scale * row_scales)

    return on_matrices(forward)


def torch_kernel(w: Quantized) -> Forward:
    """torch's own kernel for weights of w's kind."""
    if w.codes.dtype == torch.uint8:
        return int4_kernel(unpack(w.codes), w.scale, w.width)
    return int8_kernel(w.codes, w.scale)


def total_bytes(quantized: dict[str, Quantized]) -> int:
    return sum(w.nbytes for w in quantized.values())


def emulate_all(quantized: dict[str, Quantized]) -> dict[str, Forward]:
    return {name: emulate(w) for name, w in quantized.items()}


def quantize_all(weights: dict[str, Tensor], bits: int, group: str | int) -> dict[str, Quantized]:
    """Every matrix, and the promise of rounding checked: no weight is off by more than scale / 2."""
    quantized = {}
    for name, weight in weights.items():
        w = quantize(weight, bits, group)
        allowed = step(w, weight.shape[1]) * (0.5 + 1e-5)  # 1e-5: fp32's own rounding
        assert ((dequantize(w) - weight).abs() <= allowed).all(), name
        quantized[name] = w
    return quantized


def weight_only_schemes(net, weights: dict[str, Tensor]) -> Iterator[Scheme]:
    """Integers dequantized and multiplied in fp32, and for two of them torch's kernel, where there is one."""
    kinds = [(bits, group) for bits in (8, 4) for group in ("tensor", "channel", 128, 32)]
    for bits, group in [*kinds, (3, "channel")]:
        name = f"int{bits} per {group}"
        quantized = quantize_all(weights, bits, group)
        exact = emulate_all(quantized)
        yield Scheme(name, DEQUANTIZED, total_bytes(quantized), exact)
        if (bits, group) not in ((8, "channel"), (4, 32)):
            continue
        fast = checked(linears(net), {layer: partial(torch_kernel, w) for layer, w in quantized.items()}, exact)
        if fast is not None:
            on_cuda = next(iter(weights.values())).is_cuda
            kind = "fp32" if bits == 8 and on_cuda else "bf16"  # CUDA's for int8 computes in fp32, and slowly
            yield Scheme(name, f"torch's kernel, {kind}", total_bytes(quantized), fast)


def w8a8_schemes(net, weights: dict[str, Tensor], inputs: Tensor, space: int) -> Iterator[Scheme]:
    """Integers times integers: activations are quantized too, with ranges observed on different calibration texts."""
    int8 = quantize_all(weights, 8, "channel")
    calibration_texts = {
        "text": inputs,
        "random tokens": torch.randint_like(inputs, net.config.vocab_size),
        "spaces": torch.full_like(inputs, space),
    }
    for text_name, calibration_text in calibration_texts.items():
        for observer_name, clipped_share in OBSERVERS.items():
            activation_ranges = observe(net, calibration_text, clipped_share)
            exact, kernels, sizes = {}, {}, {}
            for name, w in int8.items():
                sizes[name] = max(map(abs, activation_ranges[name]))
                exact[name] = w8a8(w, *activation_ranges[name], kernel=False)
                kernels[name] = partial(w8a8, w, *activation_ranges[name])
            fast = checked(linears(net), kernels, exact, sizes)
            multiplied = DEQUANTIZED if fast is None else "torch's kernel, int8"
            yield Scheme(f"W8A8, {observer_name} of {text_name}", multiplied, total_bytes(int8), fast or exact)


def mixed_schemes(weights: dict[str, Tensor], most_sensitive_first: list[str]) -> Iterator[Scheme]:
    """A few layers stay in int8: those that the scan found most sensitive, and for comparison the least sensitive."""
    keep = len(weights) // KEEP
    int8 = quantize_all(weights, 8, "channel")
    for bits in (4, 3):
        low = quantize_all(weights, bits, "channel")
        for which, kept in (("most", most_sensitive_first[:keep]), ("least", most_sensitive_first[-keep:])):
            mixed = {name: int8[name] if name in kept else low[name] for name in weights}
            name = f"int{bits} per channel, {keep} {which} sensitive int8"
            yield Scheme(name, DEQUANTIZED, total_bytes(mixed), emulate_all(mixed))


def schemes(net, calibration_set: Batches, most_sensitive_first: list[str], space: int) -> Iterator[Scheme]:
    weights = {name: layer.weight.detach() for name, layer in linears(net).items()}
    fp32_bytes = sum(w.nbytes for w in weights.values())
    yield Scheme("fp32", "fp32", fp32_bytes, {})
    yield Scheme("bf16", "bf16", fp32_bytes // 2, {name: bf16(w) for name, w in weights.items()})
    yield from weight_only_schemes(net, weights)
    yield from w8a8_schemes(net, weights, calibration_set[0][0], space)
    yield from mixed_schemes(weights, most_sensitive_first)


def ways(weight: Tensor) -> dict[str, tuple[Kernel, Forward]]:
    """A layer in every way that speed may come from, and the arithmetic that each must agree with."""
    plain = partial(F.linear, weight=weight)
    int8 = quantize(weight, 8, "channel")
    int4 = quantize(weight, 4, 32)
    return {
        "fp32": (lambda: plain, plain),
        "bf16": (lambda: bf16(weight), plain),
        "int8 weights, torch's kernel": (lambda: torch_kernel(int8), emulate(int8)),
        "int4 weights, torch's kernel": (lambda: torch_kernel(int4), emulate(int4)),
        "int4 weights, dequantized each time": (lambda: emulate(int4), emulate(int4)),
        "W8A8, torch's kernel": (lambda: w8a8(int8, -5.0, 5.0), w8a8(int8, -5.0, 5.0, kernel=False)),
    }


def main() -> int:
    args = flags(__doc__).parse_args()
    start = time.perf_counter()
    device = runtime.single_device(args.device)
    net, corpus, space = starting_model(args, args.seed, device)
    calibration_set, evaluation_set = held_out_sets(corpus, device)

    # the scan is made at 3 bits: at 4 the effect of a single layer is smaller than the noise
    weights = {name: layer.weight.detach() for name, layer in linears(net).items()}
    scan = sensitivity(net, emulate_all(quantize_all(weights, 3, "channel")), scan_set(args, calibration_set))
    rows = evaluate(net, [*schemes(net, calibration_set, [*scan], space)], evaluation_set)
    print_schemes(rows, net, turns=len(evaluation_set) - 1)
    print_sensitivity(scan, shown=6)
    slow = device.type == "cpu" and "bf16" not in hardware.native_types(device)[0]
    side = 1024 if slow else 4096 if device.type == "cpu" else 16_384
    layer = time_layer(ways, side, device)
    llama2 = llama2_bytes(quantize)
    print_layer(layer)
    print_llama2(llama2)
    print("checked: no weight is off by more than scale / 2; the kernels that ran agree with the arithmetic here")
    finish(args, net, start, {"rows": rows, "sensitivity": scan, "large_layer": layer, "llama2": llama2})
    return 0


if __name__ == "__main__":
    exits.run(main)
