"""Quantize a trained language model after training (PTQ): fewer bits per weight, and what that costs.

A weight w is kept as the integer round(w / scale), with scale = largest |w| / largest integer: nothing is off by more
than scale / 2. The fewer weights share a scale (the matrix, a row, a group of 32), the less one outlier hurts them, and
each scale costs two bytes. Weights alone save memory. To multiply integers (W8A8), activations need scales too,
measured beforehand on text like that to come (calibration). Layers that suffer most, found by quantizing one at a time,
can keep more bits. It is not distillation: no second model learns.

    laptop    python 02_tensors_precision/quantize.py
    figures   python 02_tensors_precision/quantize.py --train-steps 1000
    real      python 02_tensors_precision/quantize.py --model models/smollm2-135m
    one GPU   python 02_tensors_precision/quantize.py --train-steps 1000 --device cuda
    cluster   one process is all it uses

Look for: the held-out loss above that of fp32, against bytes (noise if under twice its standard error); what
calibration on the wrong text costs. The bare run's model has little to lose; a real one has more, and activations that
are thousands of times as large as the mean. Losses are those of the dequantized values; what fewer bytes are worth in
tokens/s is in 09_inference/quantized.py. Before: precision.py. Next: qat.py trains on with the rounding in place.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
import _shared
from _shared import Batches, Forward, Quantized, dequantize, dequantizing, linears, losses, quantize

from common import exits, measure, report
from lm import model, shapes


def round_with_one_scale(weight: Tensor, bits: int) -> Tensor:
    """PTQ in two lines: quantize with one scale for the whole matrix, and return the dequantized values."""
    # scales are stored in bf16
    scale = (weight.abs().max() / (2 ** (bits - 1) - 1)).bfloat16().float()
    return (weight / scale).round() * scale


def quantize_all(weights: dict[str, Tensor], bits: int, group: str | int) -> dict[str, Quantized]:
    """Every matrix, as integers, int4 two to a byte (_shared.quantize), each off by at most scale / 2. With one
    scale for all, one outlier makes the rounding coarse for all: so a row or a group can have its own."""
    quantized = {name: quantize(weight, bits, group) for name, weight in weights.items()}
    for name, w in quantized.items():
        weight = weights[name]
        # 1e-5: fp32's own rounding
        allowed = _shared.scale_of_each(w, weight.shape[1]) * (0.5 + 1e-5)
        assert ((dequantize(w) - weight).abs() <= allowed).all(), (
            f"{name}: off by more than scale / 2"
        )
        if group == "tensor":
            assert torch.equal(dequantize(w), round_with_one_scale(weight, bits)), (
                f"{name}: packed is not as rounded"
            )
    return quantized


@torch.no_grad()
def observe(net: nn.Module, inputs: Tensor, clipped_share: float) -> dict[str, tuple[float, float]]:
    """Calibration: the range of each layer's input, the most extreme `clipped_share` at either end left out."""
    activation_ranges = {}

    def note(name: str, _module, args: tuple[Tensor]) -> None:
        x = args[0].flatten()
        beyond = int(clipped_share * x.numel())
        activation_ranges[name] = (
            x.kthvalue(1 + beyond)[0].item(),
            x.kthvalue(x.numel() - beyond)[0].item(),
        )

    hooks = [
        layer.register_forward_pre_hook(partial(note, name)) for name, layer in linears(net).items()
    ]
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


def w8a8(w: Quantized, low: float, high: float, x: Tensor) -> Tensor:
    """What int8 times int8 is worth: activations and weights dequantized, multiplied in fp32."""
    codes, scale, zero = activation_codes(x, low, high)
    return F.linear((codes - zero) * scale, dequantize(w))


def w8a8_in_integers(w: Quantized, low: float, high: float, x: Tensor) -> Tensor:
    """The same as int8 units compute it. Codes a of activations, b of weights, `zero` the code of 0.0: sum (a - zero) b
    = sum a b - zero · sum b in int32, then times both scales."""
    codes, scale, zero = activation_codes(x, low, high)
    a, b = codes.to(torch.int8), w.codes.T
    products = torch._int_mm(a, b) if a.is_cuda else (a.cpu().int() @ b.cpu().int()).to(a.device)
    return (products - zero * w.codes.sum(1, dtype=torch.int32)) * (scale * w.scale[:, 0].float())


def sensitivity(
    net: nn.Module, weights: dict[str, Tensor], batches: Batches
) -> dict[str, tuple[float, float]]:
    """What each matrix alone adds to the loss in int3 (at 4 bits: noise), and its standard error; worst first."""
    baseline = losses(net, {}, batches)
    added = {}
    for name, w in quantize_all(weights, 3, "channel").items():
        added[name] = _shared.difference(losses(net, {name: dequantizing(w)}, batches), baseline)
    return dict(sorted(added.items(), key=lambda item: -item[1][0]))


class Scheme(NamedTuple):
    """A row of the table: a way to keep and to multiply the weights of all layers."""

    name: str
    stored: dict[str, Quantized | Tensor]  # by layer
    forwards: dict[str, Forward]


def weights_alone(name: str, quantized: dict[str, Quantized]) -> Scheme:
    return Scheme(name, quantized, {layer: dequantizing(w) for layer, w in quantized.items()})


def weight_only_schemes(weights: dict[str, Tensor]) -> Iterator[Scheme]:
    yield Scheme("fp32", weights, {})
    kinds = [(bits, group) for bits in (8, 4) for group in ("tensor", "channel", 128, 32)]
    for bits, group in [*kinds, (3, "channel")]:  # int3 is stored in 4 bits
        yield weights_alone(f"int{bits} per {group}", quantize_all(weights, bits, group))


def w8a8_schemes(
    net: nn.Module, weights: dict[str, Tensor], text: Tensor, space: int
) -> Iterator[Scheme]:
    """Activations quantized too, with ranges observed on text, all of it or without its extremes, and on spaces."""
    int8 = quantize_all(weights, 8, "channel")
    calibrations = {
        "min-max of text": (text, 0),
        "percentile 99.9 of text": (text, 1e-3),
        "min-max of spaces": (torch.full_like(text, space), 0),
    }
    for name, (inputs, clipped_share) in calibrations.items():
        ranges = observe(net, inputs, clipped_share)
        for layer, w in int8.items():
            x = torch.randn(32, weights[layer].shape[1], device=text.device) * max(
                map(abs, ranges[layer])
            )
            error = measure.relative_error(
                w8a8_in_integers(w, *ranges[layer], x), w8a8(w, *ranges[layer], x)
            )
            assert error < 1e-4, f"{layer}: integers and dequantized values differ by {error:.1e}"
        yield Scheme(
            f"W8A8, {name}",
            int8,
            {layer: partial(w8a8, w, *ranges[layer]) for layer, w in int8.items()},
        )


def mixed_schemes(weights: dict[str, Tensor], most_sensitive_first: list[str]) -> Iterator[Scheme]:
    """A seventh of the matrices stay in int8: the most sensitive by the scan, and for comparison the least."""
    keep = len(weights) // 7
    int8 = quantize_all(weights, 8, "channel")
    for bits in (4, 3):
        low = quantize_all(weights, bits, "channel")
        for which, in_int8 in (
            ("most", most_sensitive_first[:keep]),
            ("least", most_sensitive_first[-keep:]),
        ):
            mixed = {layer: int8[layer] if layer in in_int8 else low[layer] for layer in weights}
            yield weights_alone(f"int{bits} per channel, {keep} {which} sensitive int8", mixed)


def run(net: nn.Module, scheme: Scheme, batches: Batches, baseline: Tensor) -> dict:
    """The scheme's bytes, the error of its weights, and what it adds to the baseline's loss."""
    weights = [layer.weight.detach() for layer in linears(net).values()]
    values = [
        dequantize(one) if isinstance(one, Quantized) else one for one in scheme.stored.values()
    ]
    found = losses(net, scheme.forwards, batches)
    delta, standard_error = _shared.difference(found, baseline)
    return {
        "scheme": scheme.name,
        "weight_bytes": sum(one.nbytes for one in scheme.stored.values()),
        "weight_relative_error": measure.relative_error(values, weights),
        "val_loss": found.mean().item(),
        "delta": round(delta, 5),
        "standard_error": standard_error,
    }


# vocabulary, hidden, ffn, layers, heads, key-value heads, head_dim, length; lm_head is not tied
LLAMA2 = {
    "7B": (6_738_415_616, shapes.Config(32_000, 4096, 11_008, 32, 32, 32, 128, 4096)),
    "13B": (13_015_864_320, shapes.Config(32_000, 5120, 13_824, 40, 40, 40, 128, 4096)),
    "70B": (68_976_648_192, shapes.Config(32_000, 8192, 28_672, 80, 64, 8, 128, 4096)),
}


def llama2_line(name: str) -> str:
    """Gigabytes of the weights alone, computed on the meta device: from all matrices quantized with few scales to those
    of the blocks alone with many, embedding and lm_head then in bf16. Norms are bf16."""
    parameters, config = LLAMA2[name]
    assert shapes.parameter_count(config) == parameters, (
        f"Llama 2 {name}: published are {parameters:,} parameters"
    )
    with torch.device("meta"):  # tensors with a shape and no storage: any size fits
        in_blocks = Counter(
            layer.weight.shape for layer in linears(model.Transformer(config)).values()
        )
    everywhere = in_blocks + Counter({(config.vocab_size, config.hidden_size): 2})
    sizes = f"{2 * parameters / 1e9:.1f} GB in bf16"
    for bits, few, many in ((8, "channel", "channel"), (4, 128, 32)):
        most_and_least = []
        for matrices, group in ((everywhere, few), (in_blocks, many)):
            weights = {shape: torch.empty(shape, device="meta") for shape in matrices}
            saved = {
                shape: 2 * w.numel() - quantize(w, bits, group).nbytes
                for shape, w in weights.items()
            }
            most_and_least.append(
                2 * parameters - sum(saved[shape] * n for shape, n in matrices.items())
            )
        sizes += ", {:.1f} to {:.1f} GB in int{}".format(
            *(size / 1e9 for size in most_and_least), bits
        )
    return f"Llama 2 {name} has its published {parameters:,} parameters; weights alone: {sizes}"


def check(rows: list[dict]) -> list[str]:
    by_name = {row["scheme"]: row for row in rows}
    finer = [by_name[f"int4 per {group}"] for group in ("tensor", "channel", 128, 32)]
    fewer = [by_name[f"int{bits} per channel"] for bits in (8, 4, 3)]
    for which, compared in (("finer scales", finer[::-1]), ("more bits", fewer)):
        errors = [row["weight_relative_error"] for row in compared]
        assert errors == sorted(errors), (
            f"{which} are not nearer to the weights: relative errors {errors}"
        )
    return [
        "no weight is off by more than scale / 2, and packed int4 unpacks to what was rounded, to the bit",
        "finer scales and more bits leave smaller errors in the weights",
        "W8A8 in integers gives what the dequantized values give, layer by layer",
        *map(llama2_line, LLAMA2),
    ]


COLUMNS = {
    "scheme": "weights",
    "weight_bytes": "weights take",
    "weight_relative_error": "error of weights",
    "delta": "loss above fp32",
    "standard_error": "standard error",
}


def main() -> int:
    args = _shared.parser(__doc__).parse_args()
    device = report.start_lesson(args.device)
    net, corpus = _shared.starting_model(args, 0, device)
    calibration_set, evaluation_set = _shared.held_out_sets(corpus, device)
    weights = {name: layer.weight.detach() for name, layer in linears(net).items()}
    # a folder's model has more and larger layers: the scan reads less
    few = 16 if args.model == "nano" else 4
    scan = sensitivity(
        net, weights, [tuple(part[:few] for part in batch) for batch in calibration_set[:2]]
    )
    baseline = losses(net, {}, evaluation_set)
    w8a8s = w8a8_schemes(net, weights, calibration_set[0][0], _shared.space(args.model))
    schemes = itertools.chain(weight_only_schemes(weights), w8a8s, mixed_schemes(weights, [*scan]))
    rows = [run(net, scheme, evaluation_set, baseline) for scheme in schemes]
    # the three that suffer most, and the one that suffers least
    for name in (*list(scan)[:3], list(scan)[-1]):
        print(
            "alone in int3, {} adds {:.4f} to the loss, standard error {:.4f}".format(
                name, *scan[name]
            )
        )
    report.end_lesson(
        rows,
        columns=COLUMNS,
        checked=check(rows),
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
