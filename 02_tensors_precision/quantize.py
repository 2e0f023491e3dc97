"""Quantize a trained language model after training (PTQ): fewer bits per weight, and what that costs.

A weight w is kept as the integer round(w / scale), with scale = largest |w| / largest integer: nothing is off by more
than scale / 2. The fewer weights share a scale (the matrix, a row, a group of 32), the less one outlier hurts them, and
each scale costs two bytes. Weights alone save memory. To multiply integers, activations need scales too, measured
beforehand on text like that to come (calibration). Layers that suffer most, found by quantizing one at a time, can keep
more bits. It is not distillation: no second model learns.

    laptop    python 02_tensors_precision/quantize.py
    figures   python 02_tensors_precision/quantize.py --train-steps 1000
    real      python 02_tensors_precision/quantize.py --model models/smollm2-135m
    one GPU   python 02_tensors_precision/quantize.py --train-steps 1000 --device cuda
    cluster   one process is all it uses

Look for: the held-out loss above that of fp32, against bytes (noise if under twice its standard error); what
calibration on the wrong text costs; the time of one large layer where floats are multiplied after dequantizing (no
gain) and in torch's own kernels. The bare run's model has little to lose; a real one has more, and activations that
are thousands of times as large as the mean. Before: precision.py. Next: qat.py trains on with the rounding in place.
"""

import itertools
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common/, with nothing installed
import _quantize
import _shared
from _shared import Batches, Forward, Quantized, dequantize, dequantizing, linears, losses, quantize

from common import exits, lesson, measure


def round_with_one_scale(weight: Tensor, bits: int) -> Tensor:
    """PTQ in two lines: quantize with one scale for the whole matrix, and return the dequantized values."""
    scale = (weight.abs().max() / (2 ** (bits - 1) - 1)).bfloat16().float()  # scales are stored in bf16
    return (weight / scale).round() * scale


def quantize_all(weights: dict[str, Tensor], bits: int, group: str | int) -> dict[str, Quantized]:
    """Every matrix, as integers, int4 two to a byte (_shared.quantize), each off by at most scale / 2. With one
    scale for all, one outlier makes the rounding coarse for all: so a row or a group can have its own."""
    quantized = {}
    for name, weight in weights.items():
        w = quantize(weight, bits, group)
        allowed = _shared.scale_of_each(w, weight.shape[1]) * (0.5 + 1e-5)  # 1e-5: fp32's own rounding
        assert ((dequantize(w) - weight).abs() <= allowed).all(), f"{name}: off by more than scale / 2"
        if group == "tensor":
            assert torch.equal(dequantize(w), round_with_one_scale(weight, bits)), f"{name}: packed is not as rounded"
        quantized[name] = w
    return quantized


@torch.no_grad()
def observe(net: nn.Module, inputs: Tensor, clipped_share: float) -> dict[str, tuple[float, float]]:
    """Calibration: the range of each layer's input, the most extreme `clipped_share` at either end left out."""
    activation_ranges = {}

    def note(name: str, _module, args: tuple[Tensor]) -> None:
        x = args[0].flatten()
        beyond = int(clipped_share * x.numel())
        activation_ranges[name] = x.kthvalue(1 + beyond)[0].item(), x.kthvalue(x.numel() - beyond)[0].item()

    hooks = [layer.register_forward_pre_hook(partial(note, name)) for name, layer in linears(net).items()]
    net(inputs)
    for hook in hooks:
        hook.remove()
    return activation_ranges


def activation_codes(x: Tensor, low: float, high: float) -> tuple[Tensor, float, int]:
    """Asymmetric: low..high falls on -128..127, and 0 on a whole number, the zero point, so that 0 is exact."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / 255 or 1.0
    zero = round(-128 - low / scale)
    return ((x / scale).round() + zero).clamp(-128, 127), scale, zero


def w8a8(w: Quantized, low: float, high: float, kernel: bool = True) -> Forward:
    """Codes a of activations, b of weights, `zero` the code of 0.0: sum (a - zero) b = sum a b - zero · sum b in int32,
    then times both scales. Without `kernel`, both are dequantized and multiplied in fp32."""
    if kernel and not _quantize.has_int8_units(w.codes.device):
        raise RuntimeError(f"{w.codes.device.type} has no units that multiply int8")
    row_sums, row_scales = w.codes.sum(1, dtype=torch.int32), w.scale[:, 0].float()

    def forward(x: Tensor) -> Tensor:
        codes, scale, zero = activation_codes(x, low, high)
        if not kernel:
            return F.linear((codes - zero) * scale, dequantize(w))
        return (torch._int_mm(codes.to(torch.int8), w.codes.T) - zero * row_sums) * (scale * row_scales)

    return _quantize.on_matrices(forward)


def sensitivity(net: nn.Module, weights: dict[str, Tensor], batches: Batches) -> dict[str, tuple[float, float]]:
    """What each matrix alone adds to the loss in int3 (at 4 bits: noise), and its standard error; worst first."""
    baseline = losses(net, {}, batches)
    added = {}
    for name, w in quantize_all(weights, 3, "channel").items():
        added[name] = _shared.difference(losses(net, {name: dequantizing(w)}, batches), baseline)
    return dict(sorted(added.items(), key=lambda item: -item[1][0]))


DEQUANTIZED = "fp32, dequantized"
OBSERVERS = {"min-max": 0.0, "percentile 99.9": 1e-3}  # what share of the values is clipped at either end


class Scheme(NamedTuple):
    """A row of the table: a way to keep and to multiply the weights of all layers."""

    name: str
    multiplied: str
    stored: dict[str, Quantized | Tensor]  # by layer
    forwards: dict[str, Forward]


def dequantized(name: str, quantized: dict[str, Quantized]) -> Scheme:
    return Scheme(name, DEQUANTIZED, quantized, {layer: dequantizing(w) for layer, w in quantized.items()})


def weight_only_schemes(weights: dict[str, Tensor], on_cuda: bool) -> Iterator[Scheme]:
    """Floats; integers dequantized and multiplied in fp32; and for two of them torch's kernel, where there is one."""
    narrow = {layer: weight.bfloat16() for layer, weight in weights.items()}
    yield Scheme("fp32", "fp32", weights, {})
    yield Scheme("bf16", "bf16", narrow, {layer: _quantize.bf16(weight) for layer, weight in narrow.items()})
    kinds = [(bits, group) for bits in (8, 4) for group in ("tensor", "channel", 128, 32)]
    for bits, group in [*kinds, (3, "channel")]:  # int3 is stored in 4 bits
        name = f"int{bits} per {group}"
        scheme = dequantized(name, quantize_all(weights, bits, group))
        yield scheme
        if (bits, group) in ((8, "channel"), (4, 32)):
            kind = "fp32" if bits == 8 and on_cuda else "bf16"  # CUDA's for int8 computes in fp32, and slowly
            kernels = {layer: partial(_quantize.torch_kernel, w) for layer, w in scheme.stored.items()}
            if fast := _quantize.all_agree(name, kernels, scheme.forwards, weights):
                yield Scheme(name, f"torch's kernel, {kind}", scheme.stored, fast)


def w8a8_schemes(net: nn.Module, weights: dict[str, Tensor], inputs: Tensor, space: int) -> Iterator[Scheme]:
    """Integers times integers: activations are quantized too, with ranges observed on different calibration texts."""
    int8 = quantize_all(weights, 8, "channel")
    calibration_texts = {
        "text": inputs,
        "random tokens": torch.randint_like(inputs, net.config.vocab_size),
        "spaces": torch.full_like(inputs, space),
    }
    for text_name, calibration_text in calibration_texts.items():
        for observer_name, clipped_share in OBSERVERS.items():
            ranges = observe(net, calibration_text, clipped_share)
            exact = {layer: w8a8(w, *ranges[layer], kernel=False) for layer, w in int8.items()}
            kernels = {layer: partial(w8a8, w, *ranges[layer]) for layer, w in int8.items()}
            sizes = {layer: max(-low, high) for layer, (low, high) in ranges.items()}
            name = f"W8A8, {observer_name} of {text_name}"
            fast = _quantize.all_agree(name, kernels, exact, weights, sizes)
            yield Scheme(name, "torch's kernel, int8" if fast else DEQUANTIZED, int8, fast or exact)


def mixed_schemes(weights: dict[str, Tensor], most_sensitive_first: list[str]) -> Iterator[Scheme]:
    """A seventh of the matrices stay in int8: the most sensitive by the scan, and for comparison the least."""
    keep = len(weights) // 7
    int8 = quantize_all(weights, 8, "channel")
    for bits in (4, 3):
        low = quantize_all(weights, bits, "channel")
        for which, in_int8 in (("most", most_sensitive_first[:keep]), ("least", most_sensitive_first[-keep:])):
            mixed = {layer: int8[layer] if layer in in_int8 else low[layer] for layer in weights}
            yield dequantized(f"int{bits} per channel, {keep} {which} sensitive int8", mixed)


def run(net: nn.Module, scheme: Scheme, batches: Batches, baseline: Tensor) -> dict:
    """The scheme's bytes, the error of its weights, and what it adds to the baseline's loss."""
    weights = [layer.weight.detach() for layer in linears(net).values()]
    dequantized = [dequantize(one) if isinstance(one, Quantized) else one.float() for one in scheme.stored.values()]
    found = losses(net, scheme.forwards, batches)
    delta, standard_error = _shared.difference(found, baseline)
    return {
        "scheme": scheme.name,
        "multiplied": scheme.multiplied,
        "weight_bytes": sum(one.nbytes for one in scheme.stored.values()),
        "weight_relative_error": measure.relative_error(dequantized, weights),
        "val_loss": found.mean().item(),
        "delta": round(delta, 5),
        "standard_error": standard_error,
    }


def check(rows: list[dict]) -> list[str]:
    by_name = {row["scheme"]: row for row in rows}
    finer = [by_name[f"int4 per {group}"] for group in ("tensor", "channel", 128, 32)]
    fewer = [by_name[f"int{bits} per channel"] for bits in (8, 4, 3)]
    for which, compared in (("finer scales", finer[::-1]), ("more bits", fewer)):
        errors = [row["weight_relative_error"] for row in compared]
        assert errors == sorted(errors), f"{which} are not nearer to the weights: relative errors {errors}"
    return [
        "no weight is off by more than scale / 2, and packed int4 unpacks to what was rounded, to the bit",
        "finer scales and more bits leave smaller errors in the weights",
        "torch's kernels that ran agree with the arithmetic written out here",
    ]


COLUMNS = {
    "scheme": "weights",
    "multiplied": "multiplied in",
    "weight_bytes": "weights take",
    "weight_relative_error": "error of weights",
    "delta": "loss above fp32",
    "standard_error": "standard error",
    "at_1_time_ratio": "time at 1 token",
    "at_256_time_ratio": "at 256",
}


def main() -> int:
    args = _shared.parser(__doc__).parse_args()
    device = lesson.start(args.device)
    net, corpus = _shared.starting_model(args, args.seed, device)
    calibration_set, evaluation_set = _shared.held_out_sets(corpus, device)
    weights = {name: layer.weight.detach() for name, layer in linears(net).items()}
    few = 16 if args.model == "nano" else 4  # a folder's model has more and larger layers: the scan reads less
    scan = sensitivity(net, weights, [tuple(part[:few] for part in batch) for batch in calibration_set[:2]])
    baseline = losses(net, {}, evaluation_set)
    weight_only = weight_only_schemes(weights, device.type == "cuda")
    w8a8s = w8a8_schemes(net, weights, calibration_set[0][0], _shared.space(args.model))
    schemes = itertools.chain(weight_only, w8a8s, mixed_schemes(weights, [*scan]))
    rows = [run(net, scheme, evaluation_set, baseline) for scheme in schemes]
    side, layer = _quantize.time_large_layer(w8a8, device, rounds=3)
    rows = [row | layer.get((row["scheme"], row["multiplied"]), {}) for row in rows]
    for name in (*list(scan)[:3], list(scan)[-1]):  # the three that suffer most, and the one that suffers least
        print("alone in int3, {} adds {:.4f} to the loss, standard error {:.4f}".format(name, *scan[name]))
    print(f"time: of one layer of {side:,} x {side:,}, against fp32; fp32's loss: {rows[0]['val_loss']:.4f}")
    lesson.end(
        rows,
        columns=COLUMNS,
        checked=[*check(rows), *_quantize.llama2_lines()],
        args=args,
        device=device,
        dtype="fp32",
        parameters=sum(parameter.numel() for parameter in net.parameters()),
        val_loss=rows[0]["val_loss"],
        sensitivity=scan,
    )
    return 0


if __name__ == "__main__":
    exits.run(main)
