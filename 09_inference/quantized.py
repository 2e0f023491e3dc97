"""Quantized inference: 70B on one GPU, with weights of 8 or 4 bits, dequantized as they are read.

A decode step multiplies one row of activations by every weight. It takes as long as the weights
take to be read. At one or half a byte per weight the 141 GB of a 70B model become 72 or 46, and a
step takes a half or a quarter of the time at best. Only weights are quantized: in int8 a row shares
a scale, in int4 a group of 32 to 256 weights shares a scale and a zero. Activations and cache stay
in bf16.

A matmul is torch's weight-only kernel where there is one, else dequantize and F.linear. On a GPU
--kernel triton uses lm/matvec.py instead. Each matrix is read, quantized in chunks and
checked before the next, so the whole model is never in memory in bf16.

    laptop    python 09_inference/quantized.py
    answers   python 09_inference/quantized.py --model models/smollm2-135m --chat --weights int8 \\
                  --compile --prompt "What is the capital of France?"   (the folder: make model)
    one GPU   python 09_inference/quantized.py --model llama-70b --weights int4 --compile
    cluster   one GPU is all it uses: infer_70b.py divides a model over several

Look for: the bytes held and the error of the logits, which move in opposite directions; the share
of the memory bandwidth. With --dtype fp32, int8 and int4 run without torch's kernels. Previous:
infer_70b.py. Next: speculative.py.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _quantized
import torch
import torch.nn.functional as F
from _prompts import Text, answer, check_tokens, parser, say_if_random
from torch import Tensor, nn

from common import lesson, measure, report
from common.exits import UserError
from common.runtime import DTYPES
from lm import matvec, model, shapes
from lm.generate import StaticCache, compiled, speed, steps_of
from lm.weights import build, read_config

# A few fp32 operations, each off by at most 6e-8, relative to the largest weight of a group.
FP32_ROUNDING = 1e-6
# Of the logits. Where bf16 weights cost more than this, the checks below say nothing about fewer
# bits.
ALLOWED_BF16_ERROR = 0.2
# Quantized layers against their dequantized weights: as many times what bf16 costs the logits. With
# equal activations this would be about 1; kernels round a little more than F.linear.
ALLOWED_ARITHMETIC_FACTOR = 3


# --- 1. matrices in 8 and 4 bits


class Int8Linear(nn.Module):
    """Hold weight = codes * scale, with codes from -127 to 127 and a scale per row.

    No weight is off by more than scale / 2.
    """

    def __init__(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("codes", codes)  # int8 [out, in]
        self.register_buffer("scale", scale)  # bf16 [out]
        # on a CPU the kernel reads beyond rows that are no multiple of 16; on a GPU it is slower
        # than what follows
        on_cpu = codes.device.type == "cpu"
        self.has_kernel = on_cpu and dtype == torch.bfloat16 and codes.shape[1] % 16 == 0

    @staticmethod
    def quantize(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
        scale = (weight.abs().amax(1) / 127).bfloat16()
        scale = torch.where(scale > 0, scale, 1)  # a row of zeros: 0 / 1, not 0 / 0
        codes = weight / scale.float()[:, None]  # [out, in], fp32
        codes.round_().clamp_(-127, 127)  # in place: see TEMPORARY_BYTES
        return codes.to(torch.int8), scale

    @staticmethod
    def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
        return codes * scale.float()[:, None]

    @staticmethod
    def allowed_error(codes: Tensor, scale: Tensor) -> Tensor:
        """Return the largest error that rounding a weight of each row may make, [out, 1].

        Half a step, and what the fp32 arithmetic rounds.
        """
        step = scale.float()[:, None]
        return step / 2 + 127 * step * FP32_ROUNDING

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.to(x.dtype)
        if self.has_kernel:
            y = torch.ops.aten._weight_int8pack_mm(x.flatten(0, -2), self.codes, scale)
            return y.unflatten(0, x.shape[:-1])
        # The scale of a row is the same for all its weights, so it can wait until after the sum.
        # Without a compiler the codes are written to memory once more in x's type; with one they
        # are converted as they are read.
        return F.linear(x, self.codes.to(x.dtype)) * scale


class Int4Linear(nn.Module):
    """Hold weight = (code - 8) * scale + zero, with codes from 0 to 15, two to a byte.

    A scale for a row is too coarse for sixteen values. So each group of a row has its own scale,
    and a zero that puts the values between its ends.
    """

    def __init__(self, codes: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.group_size = 2 * codes.shape[1] // scale.shape[1]
        self.kernel, codes = _quantized.int4_kernel(codes, dtype)
        self.register_buffer("codes", codes)  # uint8 [out, in / 2], or as the kernel reads them
        scale_and_zero = torch.stack((scale, zero), -1)  # [out, groups, 2]
        self.register_buffer("scale_and_zero", scale_and_zero.transpose(0, 1).contiguous())

    @staticmethod
    def quantize(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
        if weight.shape[1] % group_size != 0:
            weight = F.pad(weight, (0, -weight.shape[1] % group_size))
        groups = weight.unflatten(1, (-1, group_size))  # [out, groups, group_size]
        low, high = groups.aminmax(dim=2)
        scale = ((high - low) / 15).bfloat16()
        scale = torch.where(scale > 0, scale, 1)  # all weights of a group are equal
        zero = (low + 8 * scale.float()).bfloat16()
        codes = groups - zero.float()[..., None]
        codes.div_(scale.float()[..., None])  # in place: see TEMPORARY_BYTES
        codes.round_().add_(8).clamp_(0, 15)
        codes = codes.to(torch.uint8).flatten(1)  # [out, in]
        return _quantized.pack_int4(codes), scale, zero

    @staticmethod
    def dequantize(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        weight = _quantized.unpack_int4(codes).float()  # [out, in]
        groups = weight.unflatten(1, (scale.shape[1], -1))  # a view: the next line writes to weight
        groups.sub_(8).mul_(scale.float()[..., None]).add_(zero.float()[..., None])
        return weight

    @staticmethod
    def allowed_error(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Return the largest error that rounding a weight of each group may make, [out, groups].

        Half a step, what rounding scale and zero to bf16 moves the ends of the group, and what the
        fp32 arithmetic rounds.
        """
        step = scale.float()
        largest = 15 * step + zero.float().abs()
        return step / 2 + largest * (2**-8 + FP32_ROUNDING)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, len(self.scale_and_zero) * self.group_size - x.shape[-1]))
        if self.kernel is not None:
            y = self.kernel(x.flatten(0, -2), self.codes, self.group_size, self.scale_and_zero)
            return y.unflatten(0, x.shape[:-1])
        scale, zero = self.scale_and_zero.transpose(0, 1).unbind(-1)
        return F.linear(x, self.dequantize(self.codes, scale, zero).to(x.dtype))


# None: nn.Linear in that type
LAYERS = {"fp32": None, "bf16": None, "int8": Int8Linear, "int4": Int4Linear}


# --- 2. loading, matrix by matrix


def load(
    args,
    config: shapes.Config,
    weights: str,
    layer: type[nn.Module] | None,
    dtype: str,
    device: torch.device,
    free_bytes: float,
) -> tuple[model.Transformer, dict]:
    """Return the model, and a dict of what a row of the table says of it.

    Its matrices are in `layer`, or in `dtype` if that is None. `free_bytes` is what weights and
    cache leave free. Asserts that loading takes no more beside the result than one matrix and one
    chunk of it, and never the whole model unquantized.
    """
    read = _quantized.reader(args, config, device)
    net = build(args.model, config, seed=args.seed, device="meta").eval()
    chunk, beside = _quantized.plan_loading(args, config, weights, dtype, device, free_bytes)
    errors = []
    with torch.no_grad(), measure.LiveBytes(device=device) as live:
        before = live.now
        modules = list(net.named_modules())
        bar = report.progress_bar(modules, f"loading {weights}", unit="module", delay=2)
        for name, module in bar:
            if getattr(module, "weight", None) is None:
                continue
            if isinstance(module, nn.Linear) and layer is not None:
                quantized, error = quantize_matrix(read, name, layer, args, chunk, dtype, device)
                net.set_submodule(name, quantized)
                errors.append(error)
            else:  # embedding and norms are never quantized
                weight = read(f"{name}.weight")
                module.weight = nn.Parameter(weight.to(device, DTYPES[dtype]), requires_grad=False)
                del weight  # or it would still be there while the next is read
            if getattr(module, "bias", None) is not None:  # Qwen2's
                bias = read(f"{name}.bias").to(device, DTYPES[dtype])
                if layer is None:
                    module.bias = nn.Parameter(bias, requires_grad=False)
                else:
                    matvec.add_bias(quantized, bias)
        if layer is None:
            net.tie_weights()
        elif args.kernel == "triton":
            matvec.fuse(net)
    net.model._fill_rope_tables()
    facts = _quantized.facts_of_loading(net, live.peak - before, beside)
    facts["largest_matmul_error"] = max([of_all for of_all, of_one in errors], default=0.0)
    facts["largest_output_error"] = max([of_one for of_all, of_one in errors], default=0.0)
    return net, facts


def quantize_matrix(
    read: Callable[[str], Tensor],
    name: str,
    layer: type[nn.Module],
    args,
    chunk: int,
    dtype: str,
    device: torch.device,
) -> tuple[nn.Module, tuple[float, float]]:
    """Read a matrix and quantize it, `chunk` weights at a time. Return the layer and its errors.

    Asserts that no weight is off by more than rounding allows, and that the layer multiplies as the
    dequantized matrix does: a wrong scale, zero or order of codes in a single row shows, however
    large the matrix is. See _quantized.check_matmul for the errors.
    """
    weight = read(f"{name}.weight")  # [out, in], bf16 or fp32
    rows, columns = weight.shape
    x = torch.randn(1, 5, columns, device=device).to(DTYPES[dtype])
    rows_at_once = max(1, chunk // columns)
    quantized = None  # codes, scales and zeros of all rows
    all_expected = []
    all_norms = []
    for first in range(0, rows, rows_at_once):
        some_rows = slice(first, first + rows_at_once)
        # moved in its own type, which may have fewer bytes than fp32
        exact = weight[some_rows].to(device).float()
        if not exact.norm().isfinite():
            raise UserError(
                f"--model {args.model}: {name}.weight has a number that is NaN or infinite: "
                "download the files again"
            )
        parts, expected, norms = _quantized.quantize_rows(exact, x, layer, args.group_size)
        all_expected.append(expected)
        all_norms.append(norms)
        if quantized is None:
            quantized = [part.new_empty(rows, *part.shape[1:]) for part in parts]
        for of_all_rows, part in zip(quantized, parts, strict=True):
            of_all_rows[some_rows] = part
        del exact, parts, part, of_all_rows  # or they would be there beside the next chunk
    del weight  # before the layer makes copies
    if args.kernel == "triton":
        multiply = matvec.triton_layer(*quantized)
    else:
        multiply = layer(*quantized, DTYPES[dtype])
    del quantized  # before the matmuls need memory
    expected = torch.cat(all_expected, dim=-1)  # [1, 5, out]
    norms = torch.cat(all_norms)  # [out]
    # With one or two rows of activations, some kernels are other ones.
    tokens = (5, 2, 1)
    found = [multiply(x[:, :n]).float() for n in tokens]
    return multiply, _quantized.check_matmul(
        layer, found, [expected[:, :n] for n in tokens], norms, dtype
    )


# --- 3. answers and errors


def run(
    weights: str, text: Text, args: argparse.Namespace, device: torch.device
) -> tuple[dict, Tensor]:
    """Load with these weights, generate and measure.

    Return a row of the table, and the logits of the prompts.
    """
    dtype = _quantized.activation_dtype(args, weights, device)
    shape = {"batch": len(text.prompts), "length": text.length, "dtype": DTYPES[dtype]}
    cache_bytes = sum(
        tensor.nbytes for tensor in StaticCache(text.config, **shape, device="meta").tensors
    )
    planned, free_bytes = _quantized.check_room(args, text.config, weights, cache_bytes, device)
    net, facts = load(args, text.config, weights, LAYERS[weights], dtype, device, free_bytes)
    cache = StaticCache(text.config, **shape, device=device)
    prefill, decode = steps_of(net, cache)
    if args.compile:
        (decode,) = compiled(net, cache, decode)

    steps = (prefill, decode)
    warm_up_tokens = args.max_new_tokens if args.compile else min(4, args.max_new_tokens)
    answer(steps, text, args, device, max_new_tokens=warm_up_tokens)
    result = answer(steps, text, args, device)
    row = {
        "weights": weights,
        "dtype": dtype,
        "planned_weight_bytes": planned,
        "cache_bytes": cache_bytes,
        **facts,
        "token_ids": result.token_ids,
        "texts": [text.decode(ids) for ids in result.token_ids],
        **speed(
            result,
            device,
            weight_bytes=facts["bytes_per_step"],
            bytes_per_slot=cache_bytes / (len(text.prompts) * text.length),
        ),
    }
    return row, logits_of(net, text, device)


@torch.inference_mode()
def logits_of(net: nn.Module, text: Text, device: torch.device) -> Tensor:
    """Return the logits of all prompt tokens, [tokens, vocab], on the CPU in fp32."""
    all_logits = []
    for ids in text.prompts:
        logits = net(torch.tensor([ids], device=device))[0]  # [tokens, vocab]
        all_logits.append(logits.float().cpu())
    return torch.cat(all_logits)


def error_of_arithmetic(
    weights: str, logits: Tensor, text: Text, args, device: torch.device
) -> float:
    """Return how far the logits are from those of the dequantized weights in nn.Linear and fp32.

    The weights' own rounding is in both, so only arithmetic is left. What that rounding costs
    depends on the model.
    """
    _, free_bytes = _quantized.check_room(args, text.config, "fp32", 0, device)
    net, _ = load(args, text.config, "fp32", None, "fp32", device, free_bytes)
    chunk = _quantized.weights_at_once(free_bytes, device)
    _quantized.dequantize_layers(net, LAYERS[weights], args.group_size, chunk)
    return measure.relative_error(logits, logits_of(net, text, device))


def check(rows: list[dict]) -> list[str]:
    """Check what has not been checked while loading, and return lines that say what was checked."""
    checked = []
    for row in rows:
        weights = row["weights"]
        held = row["weight_bytes"]
        planned = row["planned_weight_bytes"]
        # else the planner counts embedding and norms in 16 bits
        if row["dtype"] == "bf16" or weights == "fp32":
            assert held == planned, f"{weights}: {held:,} bytes are held, planned were {planned:,}"
        if LAYERS[weights] is not None:
            error = f"{row['largest_matmul_error']:.0e}"
            output_error = f"{row['largest_output_error']:.0e}"
            checked.append(
                f"{weights}: no weight is off by more than rounding allows, "
                f"no matmul by more than {error}, no output by more than {output_error}"
            )
            spare = report.for_people("bytes", row["allowed_loading_peak_bytes"] - held)
            checked.append(
                f"{weights}: loading took less than {spare} beside the weights, as planned"
            )
    if len(rows) > 1:
        checked += check_logits(rows)
    return checked


def check_logits(rows: list[dict]) -> list[str]:
    """Hold the logits of quantized layers against those of the dequantized weights in fp32.

    In fp32 they are equal but for the order of sums. In bf16 the rounding of activations is left.
    What that costs this model, bf16 weights have shown: their logits are the measure.
    """
    checked = []
    by_weights = {row["weights"]: row for row in rows}
    bf16_error = by_weights["bf16"]["logits_relative_error"]
    assert bf16_error <= ALLOWED_BF16_ERROR, f"bf16: logits are off by {bf16_error:.2%}"
    for weights in ("int8", "int4"):
        row = by_weights[weights]
        error = row["arithmetic_logits_relative_error"]
        allowed = 1e-3 if row["dtype"] == "fp32" else ALLOWED_ARITHMETIC_FACTOR * bf16_error
        row["allowed_arithmetic_logits_relative_error"] = allowed
        line = f"{weights}: logits are those of the dequantized weights in fp32 within {error:.2g}"
        line += f", allowed {allowed:.2g}"
        assert error <= allowed, line
        checked.append(line)
    return checked


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument(
        "--weights",
        choices=("all", *LAYERS),
        default="all",
        help="default: all, one after the other",
    )
    flags.add_argument(
        "--group-size", type=int, choices=(32, 64, 128, 256), default=32, help="in int4"
    )
    flags.add_argument(
        "--kernel",
        choices=("torch", "triton"),
        default="torch",
        help="of int8 and int4 on a GPU: torch's, or the one of lm/matvec.py (default: torch)",
    )
    flags.add_argument(
        "--compile", action="store_true", help="compile the decode step; on a GPU one CUDA graph"
    )
    args = flags.parse_args()
    config = read_config(args.model)
    text = Text(args, config)
    device = lesson.start(args.device, args.seed)
    _quantized.check_kernel(args, device, len(text.texts), matvec.MATVEC_ROWS)
    say_if_random(args.model)

    kinds = [*LAYERS] if args.weights == "all" else [args.weights]
    rows = []
    checked = []
    for weights in kinds:
        row, logits = run(weights, text, args, device)
        torch._dynamo.reset()  # a compiled step holds the model that it was compiled for
        for prompt, new_text in zip(text.texts, row["texts"], strict=True):
            print(f"{weights}: {prompt!r} goes on: {new_text!r}")
        if weights == "fp32":
            in_fp32 = argparse.Namespace(**vars(args) | {"dtype": "fp32"})
            checked += check_tokens(row["token_ids"], text, in_fp32, device)
            baseline_logits = logits
            baseline_token_ids = row["token_ids"]
        if args.weights == "all":
            row["logits_relative_error"] = measure.relative_error(logits, baseline_logits)
            if LAYERS[weights] is not None:
                error = error_of_arithmetic(weights, logits, text, args, device)
                row["arithmetic_logits_relative_error"] = error
            row["equal_tokens"] = 0
            for ids, baseline_ids in zip(row["token_ids"], baseline_token_ids, strict=True):
                row["equal_tokens"] += sum(a == b for a, b in zip(ids, baseline_ids, strict=False))
        rows.append(row)
    columns = {
        "weights": "weights",
        "weight_bytes": "held",
        "loading_peak_bytes": "while loading",
        "time_to_first_token_seconds": "first token",
        "decode_tokens_per_second": "decode",
        "bandwidth_share": "of memory bandwidth",
        "copy_rate_share": "of copy rate",
    }
    if len(rows) > 1:
        columns["logits_relative_error"] = "error of logits"
        columns["equal_tokens"] = f"tokens as in fp32, of {sum(map(len, rows[0]['token_ids']))}"
    checked += check(rows)
    own = rows[0] if len(rows) == 1 else {"dtype": None}  # each row has its own
    own["parameters"] = shapes.parameter_count(config)
    lesson.end(rows, columns=columns, checked=checked, args=args, device=device, **own)
    return 0


if __name__ == "__main__":
    exits.run(main)
