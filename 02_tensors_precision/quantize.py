"""Quantize a trained language model after training (PTQ): fewer bits per weight, and what it costs.

A weight w is stored as the integer round(w / scale), with scale = largest |w| / largest integer. So
no weight is off by more than scale / 2. A matrix, a row or a group of 32 weights can share a scale.
Smaller groups limit the effect of an outlier, and need more scales, of 2 bytes each. Quantized
weights save memory. W8A8 quantizes weights and activations to 8 bits, so that integers can be
multiplied. Calibration records the range of the activations on representative text beforehand, and
their scales follow from it. Layers that suffer most can keep more bits.

    laptop    python 02_tensors_precision/quantize.py
    figures   python 02_tensors_precision/quantize.py --train-steps 1000
    real      python 02_tensors_precision/quantize.py --model models/smollm2-135m
    one GPU   python 02_tensors_precision/quantize.py --device cuda
    cluster   it uses one process only

What to look at: the increase in loss over fp32 beside the bytes saved, and calibration on text
beside calibration on spaces. A difference below twice its standard error is noise. On a CPU the
model is trained for 20 small steps and has little to lose. On a GPU it is trained on 9.8 million
tokens, and has more to lose. Expected there: int3 costs several times its standard error. All
losses are computed with dequantized values. For tokens/s, see 09_inference/quantized.py.
Previous: precision.py. Next: qat.py, which trains with the rounding in place.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _trained_model
import torch
import torch.nn.functional as F
from _trained_model import Batches, Forward, linears, loss_difference, losses
from torch import Tensor, nn

from common import cli, lesson, measure
from lm import model, shapes

CALIBRATION_SEQUENCES = 16

# --- 1. weights as integers


def round_with_one_scale(weight: Tensor, bits: int) -> Tensor:
    """Quantize a matrix with one scale for all weights, and return the dequantized values."""
    scale = weight.abs().max() / (2 ** (bits - 1) - 1)
    scale = scale.bfloat16().float()  # scales are stored in bf16
    return (weight / scale).round() * scale


class Quantized(NamedTuple):
    """A matrix as integers and scales."""

    codes: Tensor  # int8 [out, in], or for 4 bits and fewer uint8 [out, in / 2], two to a byte
    scale: Tensor  # bf16 [out, groups], or [1, 1] for one per matrix
    width: int  # values of a row that share a scale; the last group may be shorter

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes


def quantize(weight: Tensor, bits: int, group: str | int) -> Quantized:
    """Quantize a matrix [out, in] symmetrically, to nearest.

    `group` is "tensor", "channel" (a row), or how many values of a row share a scale.
    """
    limit = 2 ** (bits - 1) - 1  # 127, 7 or 3. The lowest integer has no positive counterpart
    rows, columns = weight.shape
    width = group if isinstance(group, int) else columns

    # Pad each row with zeros to a multiple of width. Zeros do not change the largest |w|.
    values = F.pad(weight, (0, -columns % width)).view(rows, -1, width)  # [out, groups, width]
    shared_dims = (0, 1, 2) if group == "tensor" else 2
    largest = values.abs().amax(shared_dims, keepdim=True)  # [out, groups, 1] or [1, 1, 1]

    # Rounding to bf16 changes a scale by at most 1/256. The largest code then lies within 0.5 of
    # 127, and still rounds to 127.
    scale = (largest / limit).bfloat16()
    scale = torch.where(scale > 0, scale, 1)  # a group of zeros: 0 / 1 and not 0 / 0

    codes = (values / scale.float()).round().clamp(-limit, limit)
    codes = codes.to(torch.int8).view(rows, -1)[:, :columns]  # [out, in]
    if bits <= 4:
        codes = pack(codes)
    return Quantized(codes.contiguous(), scale[..., 0], width)


def dequantize(quantized: Quantized) -> Tensor:
    """Return the values that the integers stand for, fp32 [out, in]."""
    codes = quantized.codes
    if codes.dtype == torch.uint8:
        codes = unpack(codes)
    return codes * scale_of_each(quantized, codes.shape[1])


def scale_of_each(quantized: Quantized, columns: int) -> Tensor:
    """Return the scale of each value, [out, in] or [1, in]."""
    return quantized.scale.float().repeat_interleave(quantized.width, 1)[:, :columns]


def pack(codes: Tensor) -> Tensor:
    """Store int8 [out, in] of -8 to 7 as uint8 [out, in / 2].

    Even columns go into the low four bits of a byte, odd columns into the high four bits.
    """
    low = codes[:, ::2] & 15
    high = codes[:, 1::2] << 4
    return (high | low).view(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """Return the int8 [out, in] that pack has stored."""
    signed = packed.view(torch.int8)
    low = signed << 4 >> 4  # a right shift repeats the sign bit
    high = signed >> 4
    return torch.stack((low, high), -1).flatten(1)


def quantized_linear(quantized: Quantized, x: Tensor) -> Tensor:
    """Dequantize at each call and multiply in fp32: this saves memory and not time."""
    return F.linear(x, dequantize(quantized))


# --- 2. activations as integers


@torch.no_grad()
def observe(net: nn.Module, inputs: Tensor, clipped_share: float) -> dict[str, tuple[float, float]]:
    """Calibrate: return the lowest and highest input of each layer while the model reads `inputs`.

    The lowest and the highest `clipped_share` of the values are each left out. With 1e-3, the range
    is that from the percentile 0.1 to 99.9.
    """
    ranges = {}

    def note(name: str, _layer: nn.Module, args: tuple[Tensor]) -> None:
        x = args[0].flatten()
        left_out = int(clipped_share * x.numel())
        low = x.kthvalue(1 + left_out)[0].item()
        high = x.kthvalue(x.numel() - left_out)[0].item()
        ranges[name] = (low, high)

    hooks = []
    for name, layer in linears(net).items():
        hooks.append(layer.register_forward_pre_hook(partial(note, name)))
    net(inputs)
    for hook in hooks:
        hook.remove()
    return ranges


def activation_codes(x: Tensor, low: float, high: float) -> tuple[Tensor, float, int]:
    """Quantize activations asymmetrically: low to high becomes -128 to 127.

    Return the codes, the scale and the zero point, which is the code of 0.0. It is an integer, so
    that 0.0 has no error.
    """
    low = min(low, 0.0)  # the range must contain 0.0
    high = max(high, 0.0)
    scale = (high - low) / 255 or 1.0  # 1.0 if all values are 0
    zero = round(-128 - low / scale)
    codes = ((x / scale).round() + zero).clamp(-128, 127)
    return codes, scale, zero


def w8a8(quantized: Quantized, low: float, high: float, x: Tensor) -> Tensor:
    """Compute a layer with int8 activations and weights, dequantized and multiplied in fp32."""
    codes, scale, zero = activation_codes(x, low, high)
    return F.linear((codes - zero) * scale, dequantize(quantized))


def w8a8_in_integers(quantized: Quantized, low: float, high: float, x: Tensor) -> Tensor:
    """Compute the same as int8 units do.

    With activation codes a, their zero point and weight codes b:

        sum over k of (a[k] - zero) b[k]  =  sum of a[k] b[k]  -  zero * sum of b[k]

    Both sums are int32. The result is multiplied by the scale of the activations and that of the
    weights, which must have one scale per row: scales within a row could not leave the sum.
    """
    codes, scale, zero = activation_codes(x, low, high)
    a = codes.to(torch.int8)
    b = quantized.codes.T
    products = int32_matmul(a, b)
    sums = quantized.codes.sum(1, dtype=torch.int32)
    return (products - zero * sums) * (scale * quantized.scale[:, 0].float())


def int32_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply int8 matrices and sum in int32."""
    if a.is_cuda:
        return torch._int_mm(a, b)
    return (a.cpu().int() @ b.cpu().int()).to(a.device)


# --- 3. schemes: which bits and scales the layers get


class Scheme(NamedTuple):
    """A row of the table: how the weights of all layers are stored and multiplied."""

    name: str
    stored: dict[str, Quantized | Tensor]  # by the name of a layer
    forwards: dict[str, Forward]


def quantize_all(weights: dict[str, Tensor], bits: int, group: str | int) -> dict[str, Quantized]:
    """Quantize every matrix, and check that nothing is off by more than scale / 2."""
    quantized = {name: quantize(weight, bits, group) for name, weight in weights.items()}
    for name, matrix in quantized.items():
        weight = weights[name]
        # 1e-5 for the rounding of fp32 itself
        allowed = scale_of_each(matrix, weight.shape[1]) * (0.5 + 1e-5)
        error = (dequantize(matrix) - weight).abs()
        assert (error <= allowed).all(), f"{name}: off by more than scale / 2"
        if group == "tensor":
            rounded = round_with_one_scale(weight, bits)
            assert torch.equal(dequantize(matrix), rounded), f"{name}: packing changes the weights"
    return quantized


def weights_only(name: str, quantized: dict[str, Quantized]) -> Scheme:
    forwards = {layer: partial(quantized_linear, matrix) for layer, matrix in quantized.items()}
    return Scheme(name, quantized, forwards)


def weight_only_schemes(weights: dict[str, Tensor]) -> Iterator[Scheme]:
    yield Scheme("fp32", weights, {})
    for bits in (8, 4):
        for group in ("tensor", "channel", 128, 32):
            yield weights_only(f"int{bits} per {group}", quantize_all(weights, bits, group))
    # int3 codes are packed like int4 codes. Only their error is of interest.
    yield weights_only("int3 per channel", quantize_all(weights, 3, "channel"))


def w8a8_schemes(
    net: nn.Module, weights: dict[str, Tensor], text: Tensor, space: int
) -> Iterator[Scheme]:
    """Yield schemes with int8 activations, whose ranges were observed on text and on spaces."""
    int8 = quantize_all(weights, 8, "channel")
    calibrations = {
        "min-max of text": (text, 0),
        "percentile 99.9 of text": (text, 1e-3),
        "min-max of spaces": (torch.full_like(text, space), 0),
    }
    for name, (inputs, clipped_share) in calibrations.items():
        ranges = observe(net, inputs, clipped_share)
        forwards = {}
        for layer, matrix in int8.items():
            low, high = ranges[layer]
            check_integers(layer, matrix, low, high, weights[layer])
            forwards[layer] = partial(w8a8, matrix, low, high)
        yield Scheme(f"W8A8, {name}", int8, forwards)


def check_integers(layer: str, matrix: Quantized, low: float, high: float, weight: Tensor) -> None:
    """Assert that int8 arithmetic gives what the dequantized values give."""
    x = torch.randn(32, weight.shape[1], device=weight.device) * max(abs(low), abs(high))
    in_integers = w8a8_in_integers(matrix, low, high, x)
    error = measure.relative_error(in_integers, w8a8(matrix, low, high, x))
    assert error < 1e-4, f"{layer}: integers and dequantized values differ by {error:.1e}"


def sensitivity(
    net: nn.Module, weights: dict[str, Tensor], batches: Batches
) -> dict[str, tuple[float, float]]:
    """Return what each matrix alone adds to the loss in int3, and its standard error.

    The most sensitive matrix comes first. At 4 bits the differences would be noise.
    """
    baseline = losses(net, {}, batches)
    added = {}
    for name, matrix in quantize_all(weights, 3, "channel").items():
        found = losses(net, {name: partial(quantized_linear, matrix)}, batches)
        added[name] = loss_difference(found, baseline)
    return dict(sorted(added.items(), key=lambda item: -item[1][0]))


def mixed_schemes(weights: dict[str, Tensor], most_sensitive_first: list[str]) -> Iterator[Scheme]:
    """Yield schemes with a seventh of the matrices in int8: the most or the least sensitive."""
    keep = len(weights) // 7
    in_int8 = {"most": most_sensitive_first[:keep], "least": most_sensitive_first[-keep:]}
    int8 = quantize_all(weights, 8, "channel")
    for bits in (4, 3):
        low_bits = quantize_all(weights, bits, "channel")
        for which, layers in in_int8.items():
            mixed = {}
            for layer in weights:
                mixed[layer] = int8[layer] if layer in layers else low_bits[layer]
            yield weights_only(f"int{bits} per channel, {keep} {which} sensitive int8", mixed)


# --- 4. one row per scheme


def run(net: nn.Module, scheme: Scheme, batches: Batches, baseline: Tensor) -> dict:
    """Return the bytes of a scheme, the error of its weights, and its loss above the baseline."""
    weights = [layer.weight.detach() for layer in linears(net).values()]
    values = []
    for matrix in scheme.stored.values():
        values.append(dequantize(matrix) if isinstance(matrix, Quantized) else matrix)
    found = losses(net, scheme.forwards, batches)
    delta, standard_error = loss_difference(found, baseline)
    return {
        "scheme": scheme.name,
        "weight_bytes": sum(matrix.nbytes for matrix in scheme.stored.values()),
        "weight_relative_error": measure.relative_error(values, weights),
        "val_loss": found.mean().item(),
        "delta": round(delta, 5),
        "standard_error": standard_error,
    }


COLUMNS = {
    "scheme": "weights",
    "weight_bytes": "weights take",
    "weight_relative_error": "error of weights",
    "delta": "loss above fp32",
    "standard_error": "standard error",
}


def check(rows: list[dict]) -> list[str]:
    errors = {row["scheme"]: row["weight_relative_error"] for row in rows}
    finer = [errors[f"int4 per {group}"] for group in (32, 128, "channel", "tensor")]
    assert finer == sorted(finer), f"finer scales do not leave smaller errors: {finer}"
    more_bits = [errors[f"int{bits} per channel"] for bits in (8, 4, 3)]
    assert more_bits == sorted(more_bits), f"more bits do not leave smaller errors: {more_bits}"
    return [
        "no weight is off by more than scale / 2, and packed int4 unpacks to what was rounded",
        "finer scales and more bits leave smaller errors in the weights",
        "W8A8 in integers gives what the dequantized values give, layer by layer",
        *[llama2_line(name) for name in PUBLISHED_PARAMETERS],
    ]


PUBLISHED_PARAMETERS = {"7B": 6_738_415_616, "13B": 13_015_864_320, "70B": 68_976_648_192}


def llama2(
    hidden_size: int, intermediate_size: int, layers: int, heads: int, key_value_heads: int
) -> shapes.Config:
    """Return the shape of a Llama 2 (Touvron et al. 2023, arXiv:2307.09288)."""
    return shapes.Config(
        vocab_size=32_000,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=128,
        max_position_embeddings=4096,
    )


LLAMA2 = {
    "7B": llama2(4096, 11_008, 32, heads=32, key_value_heads=32),
    "13B": llama2(5120, 13_824, 40, heads=40, key_value_heads=40),
    "70B": llama2(8192, 28_672, 80, heads=64, key_value_heads=8),
}


def llama2_line(name: str) -> str:
    """Return how many gigabytes the weights of a Llama 2 take: from few scales to many.

    The fewest bytes: all matrices are quantized, with few scales. The most bytes: only the matrices
    of the blocks are quantized, with many scales. Norms are bf16 in both.
    """
    config = LLAMA2[name]
    parameters = shapes.parameter_count(config)
    assert parameters == PUBLISHED_PARAMETERS[name], f"Llama 2 {name}: {parameters:,} parameters"
    with torch.device("meta"):  # tensors with a shape and no storage: any size fits
        net = model.Transformer(config)
    in_blocks = Counter(layer.weight.shape for layer in linears(net).values())
    everywhere = in_blocks + Counter(
        [net.model.embed_tokens.weight.shape, net.lm_head.weight.shape]
    )

    bf16 = 2 * parameters
    sizes = f"{bf16 / 1e9:.1f} GB in bf16"
    for bits, few_scales, many_scales in ((8, "channel", "channel"), (4, 128, 32)):
        fewest = bf16 - saved_bytes(everywhere, bits, few_scales)
        most = bf16 - saved_bytes(in_blocks, bits, many_scales)
        sizes += f", {fewest / 1e9:.1f} to {most / 1e9:.1f} GB in int{bits}"
    return f"Llama 2 {name} has its published {parameters:,} parameters; weights alone: {sizes}"


def saved_bytes(matrices: Counter, bits: int, group: str | int) -> int:
    """Return how many bytes fewer the matrices, counted by their shapes, take than in bf16."""
    saved = 0
    for shape, count in matrices.items():
        quantized = quantize(torch.empty(shape, device="meta"), bits, group)
        saved += count * (2 * shape.numel() - quantized.nbytes)
    return saved


def main() -> int:
    parser = cli.Parser(__doc__)
    _trained_model.add_flags(parser)
    args = parser.parse_args()
    device = lesson.start(args.device)
    sizes = _trained_model.sizes_for(args.model, device)
    args.train_steps = args.train_steps or sizes.train_steps
    net, corpus = _trained_model.starting_model(args, sizes, 0, device)
    calibration_set, evaluation_set = _trained_model.held_out_sets(corpus, sizes, device)
    weights = {name: layer.weight.detach() for name, layer in linears(net).items()}

    # The scan runs the model once per matrix. The model of a folder has more and larger matrices,
    # so it reads only 4 sequences per batch.
    scanned = len(calibration_set[0][0]) if args.model == "nano" else 4
    scan_set = [(inputs[:scanned], targets[:scanned]) for inputs, targets in calibration_set[:2]]
    scan = sensitivity(net, weights, scan_set)

    baseline = losses(net, {}, evaluation_set)
    calibration_text = calibration_set[0][0][:CALIBRATION_SEQUENCES]
    schemes = itertools.chain(
        weight_only_schemes(weights),
        w8a8_schemes(net, weights, calibration_text, _trained_model.space_token(args.model)),
        mixed_schemes(weights, list(scan)),
    )
    rows = [run(net, scheme, evaluation_set, baseline) for scheme in schemes]

    most_sensitive_first = list(scan)
    for name in (*most_sensitive_first[:3], most_sensitive_first[-1]):
        added, error = scan[name]
        print(f"alone in int3, {name} adds {added:.4f} to the loss, standard error {error:.4f}")
    lesson.end(
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
