"""Quantized inference: 70B on one GPU, with weights of 8 or 4 bits that are dequantized as they are read.

A decode step multiplies one row of activations by every weight: it takes as long as the weights take to be read. At one
or half a byte per weight the 141 GB of a 70B model become 72 or 46, and a step takes a half or a quarter of the time at
best. Only weights are quantized: in int8 a row shares a scale, in int4 a group of 32 to 256 weights a scale and a zero.
Activations and cache stay in bf16. A matmul is torch's weight-only kernel where there is one, else dequantize and
F.linear. Each matrix is read and quantized before the next: the whole model is never there in bf16.

    laptop    python 09_inference/quantized.py
    answers   python 09_inference/quantized.py --model models/smollm2-135m --chat --weights int8 --compile \\
                  --prompt "What is the capital of France?"                    (make model makes that folder)
    one GPU   python 09_inference/quantized.py --model llama-70b --weights int4 --compile
    cluster   one GPU is all it uses: infer_70b.py divides a model over several

Look for: the bytes held and the error of the logits, which move in opposite directions; the share of the memory
bandwidth. With --dtype fp32, int8 and int4 run without torch's kernels. Before: kv_cache.py. Next: speculative.py.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
import _quantized
from _shared import (
    DTYPES,
    StaticCache,
    Text,
    check_tokens,
    compiled,
    generate,
    parser,
    sample,
    speed,
    steps_of,
)

from common import exits, measure, report
from lm import shapes


class Int8Linear(nn.Module):
    """weight = codes * scale, with codes from -127 to 127 and a scale per row. None is off by more than scale / 2."""

    def __init__(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("codes", codes)  # int8 [out, in]
        self.register_buffer("scale", scale)  # bf16 [out]
        # on a CPU the kernel reads beyond rows that are no multiple of 16; on a GPU it is slower than what follows
        self.has_kernel = (
            codes.device.type == "cpu" and dtype == torch.bfloat16 and codes.shape[1] % 16 == 0
        )

    @staticmethod
    def quantize(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
        scale = (weight.abs().amax(1) / 127).bfloat16()
        scale = torch.where(scale > 0, scale, 1)  # a row of zeros: 0 / 1, not 0 / 0
        codes = (weight / scale.float()[:, None]).round().clamp(-127, 127)
        return codes.to(torch.int8), scale

    @staticmethod
    def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
        return codes * scale.float()[:, None]

    @staticmethod
    def allowed_error(codes: Tensor, scale: Tensor) -> Tensor:
        return scale.float()[:, None] / 2

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.to(x.dtype)
        if self.has_kernel:
            return torch.ops.aten._weight_int8pack_mm(
                x.flatten(0, -2), self.codes, scale
            ).unflatten(0, x.shape[:-1])
        # The scale of a row is the same for all its weights, so it can wait until after the sum. Without a compiler
        # the codes are written to memory once more in x's type; with one they are converted as they are read.
        return F.linear(x, self.codes.to(x.dtype)) * scale


class Int4Linear(nn.Module):
    """weight = (code - 8) * scale + zero, with codes from 0 to 15, two to a byte. A scale for a row is too coarse for
    sixteen values. So each group of a row has its own scale, and a zero that puts the values between its ends."""

    def __init__(self, codes: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.group_size = 2 * codes.shape[1] // scale.shape[1]
        self.kernel, codes = _quantized.int4_kernel(codes, dtype)
        self.register_buffer("codes", codes)  # uint8 [out, in / 2], or as the kernel reads them
        self.register_buffer(
            "scale_and_zero", torch.stack((scale, zero), -1).transpose(0, 1).contiguous()
        )

    @staticmethod
    def quantize(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
        whole_groups = F.pad(weight, (0, -weight.shape[1] % group_size))
        groups = whole_groups.unflatten(1, (-1, group_size))
        low, high = groups.aminmax(dim=2)
        scale = ((high - low) / 15).bfloat16()
        scale = torch.where(scale > 0, scale, 1)  # all weights of a group are equal
        zero = (low + 8 * scale.float()).bfloat16()
        codes = ((groups - zero.float()[..., None]) / scale.float()[..., None]).round() + 8
        return _quantized.pack_int4(codes.clamp(0, 15).to(torch.uint8).flatten(1)), scale, zero

    @staticmethod
    def dequantize(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        groups = _quantized.unpack_int4(codes).unflatten(1, (scale.shape[1], -1)).float() - 8
        return (groups * scale.float()[..., None] + zero.float()[..., None]).flatten(1)

    @staticmethod
    def allowed_error(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Half a step, and as much as rounding scale and zero to bf16 moves the ends of the group."""
        of_group = scale.float() / 2 + (15 * scale.float() + zero.float().abs()) * 2**-8
        return of_group.repeat_interleave(2 * codes.shape[1] // scale.shape[1], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, len(self.scale_and_zero) * self.group_size - x.shape[-1]))
        if self.kernel is not None:
            y = self.kernel(x.flatten(0, -2), self.codes, self.group_size, self.scale_and_zero)
            return y.unflatten(0, x.shape[:-1])
        scale, zero = self.scale_and_zero.transpose(0, 1).unbind(-1)
        return F.linear(x, self.dequantize(self.codes, scale, zero).to(x.dtype))


# None: nn.Linear in that type
LAYERS = {"fp32": None, "bf16": None, "int8": Int8Linear, "int4": Int4Linear}


def run(
    weights: str, text: Text, args: argparse.Namespace, device: torch.device
) -> tuple[dict, Tensor]:
    """A row of the table, and the logits of the prompts: load with these weights, generate, measure."""
    dtype = _quantized.activation_dtype(args, weights, device)
    shape = {"batch": len(text.prompts), "length": text.length, "dtype": DTYPES[dtype]}
    cache_bytes = sum(
        tensor.nbytes for tensor in StaticCache(text.config, **shape, device="meta").tensors
    )
    planned = _quantized.check_room(args, text.config, weights, cache_bytes, device)
    net, facts = _quantized.load(args, text.config, LAYERS[weights], dtype, device)
    cache = StaticCache(text.config, **shape, device=device)
    prefill, decode = steps_of(net, cache)
    if args.compile:
        (decode,) = compiled(net, cache, decode)

    def answer(new_tokens: int):
        generator = torch.Generator(device).manual_seed(args.seed)
        how = {"max_new_tokens": new_tokens, "device": device, "stop": text.stop}
        return generate(
            prefill,
            decode,
            text.prompts,
            choose=lambda logits: sample(logits, args, generator),
            **how,
        )

    answer(args.max_new_tokens if args.compile else min(4, args.max_new_tokens))
    result = answer(args.max_new_tokens)
    row = {
        "weights": weights,
        "dtype": dtype,
        "planned_weight_bytes": planned,
        "cache_bytes": cache_bytes,
        **facts,
        "token_ids": result.token_ids,
        "texts": [text.decode(ids) for ids in result.token_ids],
        **speed(result, device, facts["bytes_per_step"]),
    }
    with torch.inference_mode():
        return row, torch.cat(
            [net(torch.tensor([ids], device=device))[0].float().cpu() for ids in text.prompts]
        )


def check(rows: list[dict]) -> list[str]:
    checked = []
    for row in rows:
        weights, held, planned = row["weights"], row["weight_bytes"], row["planned_weight_bytes"]
        # else the planner counts embedding and norms in 16 bits
        if row["dtype"] == "bf16" or weights == "fp32":
            assert held == planned, f"{weights}: {held:,} bytes are held, planned were {planned:,}"
        if LAYERS[weights] is not None:
            error = f"{row['largest_matmul_error']:.0e}"
            checked.append(
                f"{weights}: no weight is off by more than rounding allows, no matmul by more than {error}"
            )
    for row in rows[1:]:
        error, allowed = row["logits_relative_error"], row["allowed_logits_relative_error"]
        checked.append(
            f"{row['weights']}: logits are off by {error:.2%}, rounding allows {allowed:.2%}"
        )
        assert error <= allowed, checked[-1]
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
        "--compile", action="store_true", help="compile the decode step; on a GPU one CUDA graph"
    )
    args = flags.parse_args()
    config = shapes.read_config(args.model)
    text = Text(args, config)
    device = report.start_lesson(args.device, args.seed)

    rows, checked = [], []
    for weights in [*LAYERS] if args.weights == "all" else [args.weights]:
        row, logits = run(weights, text, args, device)
        torch._dynamo.reset()  # a compiled step holds the model that it was compiled for
        for prompt, answer in zip(text.texts, row["texts"], strict=True):
            print(f"{weights}: {prompt!r} goes on: {answer!r}")
        if weights == "fp32":
            in_fp32 = argparse.Namespace(**vars(args) | {"dtype": "fp32"})
            checked += check_tokens(row["token_ids"], text, in_fp32, device)
            baseline_logits, baseline_token_ids = logits, row["token_ids"]
        if args.weights == "all":
            row["logits_relative_error"] = measure.relative_error(logits, baseline_logits)
            pairs = zip(row["token_ids"], baseline_token_ids, strict=True)
            row["equal_tokens"] = sum(a == b for pair in pairs for a, b in zip(*pair, strict=False))
        rows.append(row)
    columns = {
        "weights": "weights",
        "weight_bytes": "held",
        "loading_peak_bytes": "while loading",
        "time_to_first_token_seconds": "first token",
        "decode_tokens_per_second": "decode",
        "bandwidth_share": "of memory bandwidth",
    }
    if len(rows) > 1:
        columns["logits_relative_error"] = "error of logits"
        columns["equal_tokens"] = f"tokens as in fp32, of {sum(map(len, rows[0]['token_ids']))}"
    checked += check(rows)
    own = rows[0] if len(rows) == 1 else {"dtype": None}  # each row has its own
    own["parameters"] = shapes.parameter_count(config)
    report.end_lesson(rows, columns=columns, checked=checked, args=args, device=device, **own)
    return 0


if __name__ == "__main__":
    exits.run(main)
