"""70B on one card: weights of 8 or 4 bits, read once per token by products that dequantize on the way.

A decode step multiplies one row of activations by every weight, so it takes as long as the weights take to be read.
At one byte or half a byte per weight it can be two or four times as fast as in bf16, and 141 GB become 72 or 46. Only
the weights are rounded: a row shares a scale (int8, fp8), a group of 32 to 256 weights a scale and a zero (int4).
Activations stay bf16, except that fp8 rounds them too where several rows are multiplied at once, as in prefill. The
model is never there unrounded: it is read, rounded and packed matrix by matrix.

    laptop    python 07_memory_tricks/quantized_inference.py
    answers   python 07_memory_tricks/quantized_inference.py --model models/smollm2-135m --chat --weights int8 \\
                  --prompt "What is the capital of France?" --compile   (make model makes it)
    one GPU   python 07_memory_tricks/quantized_inference.py --model llama-70b --weights int4 --compile
    save      python 07_memory_tricks/quantized_inference.py --model models/smollm2-135m --weights int4 --save runs/int4
              python 07_memory_tricks/quantized_inference.py --model runs/int4
    cluster   one card is all it uses: 06_fsdp_zero/infer_70b.py divides a model over many

--compile fuses small operations, dequantizing among them, and on a GPU replays a decode step as one CUDA graph.
--draft MODEL lets a small model guess tokens that the large one verifies, several in one step. --kv-cache int8 halves
the cache.

Look for: weight bytes, tokens/s and the share of the read bandwidth by scheme, and how far its logits are from fp32's.
Before: lora.py rounds a model that is trained. Next: cuda_graphs.py.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # old/, with nothing installed
from _quantized_inference_checks import check_logits, print_checks
from _quantized_inference_flags import activation_dtype, check_draft, parse_args, schemes
from _quantized_inference_load import Loaded
from _quantized_inference_products import (
    fp8_product,
    int4_product,
    is_one_row_on_cpu,
    one_row,
    pack_int4,
    unpack_int4,
)
from _quantized_inference_report import evaluate, print_rows, prompt_logits, read_text
from _quantized_inference_speculative import Models, speculate
from _quantized_inference_steps import make_model

from old import exits, hardware, inference, report, runtime, shapes
from old.generate import Generated, Sampler, generate

WARM_UP_STEPS = 4  # a CUDA graph is captured at the second or third


class Plain(nn.Module):
    """Weights as they are: what the others are held against."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, x: Tensor) -> Tensor:
        return one_row(x, self.weight) if is_one_row_on_cpu(x) else F.linear(x, self.weight)


class Int8(nn.Module):
    """w is about code * scale, with a code of -127 to 127 and a scale per row: off by scale / 2 at most."""

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)

    @staticmethod
    def quantize(weight: Tensor, group: int) -> dict[str, Tensor]:
        scale = (weight.abs().amax(1) / 127).bfloat16()
        scale = torch.where(scale > 0, scale, 1)  # all zeros: 0 / 1, not 0 / 0
        return {"codes": (weight / scale[:, None].float()).round().clamp(-127, 127).to(torch.int8), "scale": scale}

    @staticmethod
    def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
        return codes * scale[:, None].float()

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.to(x.dtype)
        if is_one_row_on_cpu(x) and torch.compiler.is_compiling():
            return one_row(x, self.codes) * scale
        # torch's kernel reads beyond rows that are no multiple of 16
        if x.device.type == "cpu" and x.dtype == torch.bfloat16 and x.shape[-1] % 16 == 0:
            return torch.ops.aten._weight_int8pack_mm(x.flatten(0, -2), self.codes, scale).unflatten(0, x.shape[:-1])
        return F.linear(x, self.codes.to(x.dtype)) * scale  # compiled, one row on a GPU: converted as it is read


class Int4(nn.Module):
    """w is about (code - 8) * scale + zero, with a code of 0 to 15, and a scale and a zero per group of a row."""

    def __init__(self, codes: Tensor, scale: Tensor, zero: Tensor) -> None:
        super().__init__()
        tensors, self.product = int4_product(codes, scale, zero)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    @staticmethod
    def quantize(weight: Tensor, group: int) -> dict[str, Tensor]:
        groups = F.pad(weight, (0, -weight.shape[1] % group)).unflatten(1, (-1, group))
        low, high = groups.aminmax(dim=2)
        scale = ((high - low) / 15).bfloat16()
        scale = torch.where(scale > 0, scale, 1)  # all weights of a group equal
        zero = (low + 8 * scale.float()).bfloat16()
        codes = ((groups - zero[..., None].float()) / scale[..., None].float()).round() + 8
        return {"codes": pack_int4(codes.clamp(0, 15).to(torch.uint8).flatten(1)), "scale": scale, "zero": zero}

    @staticmethod
    def dequantize(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        groups = unpack_int4(codes).unflatten(1, (scale.shape[1], -1)).float() - 8
        return (groups * scale[..., None].float() + zero[..., None].float()).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x.flatten(0, -2), self.packed, self.scale_and_zero.to(x.dtype))
        return y.unflatten(0, x.shape[:-1])


class Fp8(Int8):
    """As Int8, with codes that are small floats: a relative error of 1/16 at most, whatever the size of the weight."""

    @staticmethod
    def quantize(weight: Tensor, group: int) -> dict[str, Tensor]:
        scale = (weight.abs().amax(1) / torch.finfo(torch.float8_e4m3fn).max).bfloat16()
        scale = torch.where(scale > 0, scale, 1)
        codes = (weight / scale[:, None].float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"codes": codes, "scale": scale}

    @staticmethod
    def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
        return codes.float() * scale[:, None].float()

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == x.shape[-1]:  # one row would leave the fp8 units idle: converted as it is read
            return F.linear(x, self.codes.to(x.dtype)) * self.scale.to(x.dtype)
        return fp8_product(x.flatten(0, -2), self.codes, self.scale).unflatten(0, x.shape[:-1])


LAYERS = {"fp32": Plain, "bf16": Plain, "int8": Int8, "int4": Int4, "fp8": Fp8}


def run(
    weights: str,
    prompts: list[list[int]],
    text: inference.Text,
    evaluated: list[int] | None,
    args: argparse.Namespace,
    device: torch.device,
) -> tuple[dict, Loaded, partial]:
    """Load with these weights, generate, measure: the figures of a scheme, its model, and what gives its speed."""
    started = time.perf_counter()
    sizes = {"batch": len(prompts), "length": max(map(len, prompts)) + args.max_new_tokens + args.draft_tokens}
    target = make_model(args.model, weights, LAYERS[weights], args, device, save=args.save, **sizes)
    draft = make_model(args.draft, weights, LAYERS[weights], args, device, **sizes) if args.draft else None
    loading_seconds = time.perf_counter() - started

    def go(max_new_tokens: int) -> tuple[Generated, list[int]]:
        generator = torch.Generator(device).manual_seed(args.seed)
        shared = {
            "sampler": Sampler(args.temperature, args.top_k, args.top_p, generator),
            "max_new_tokens": max_new_tokens,
            "device": device,
            "stop": text.stop,
        }
        if draft is None:
            return generate(target.prefill, target.decode, prompts, **shared, read_late=device.type == "cuda"), []
        steps = Models(target.prefill, target.verify, draft.prefill, draft.decode)
        return speculate(steps, prompts[0], **shared, draft_tokens=args.draft_tokens)

    tokens_of_a_step = 1 if draft is None else args.draft_tokens + 1
    go(min(args.max_new_tokens, WARM_UP_STEPS * tokens_of_a_step))  # compiles; its tokens lie behind every new position
    result, kept = go(args.max_new_tokens)
    loaded = target.loaded
    read = loaded.bytes_per_step
    if draft is not None:  # a step reads it once for each guess, and once more for its cache
        read += (args.draft_tokens + 1) * draft.loaded.bytes_per_step
    row = {
        "weights": weights,
        "dtype": activation_dtype(args, weights, device),
        "group_size": args.group_size if weights == "int4" else None,
        "weight_bytes": loaded.weight_bytes + (draft.loaded.weight_bytes if draft else 0),
        "cache_bytes": target.cache.nbytes(),
        "loading_seconds": loading_seconds,
        "guesses_kept_per_step": sum(kept) / len(kept) if kept else None,
        "loss": None if evaluated is None else evaluate(loaded.net, evaluated, device),
        "logits_relative_error": None,
    }
    print_checks(weights, loaded)
    if kept:
        print(f"speculative: {row['guesses_kept_per_step']:.1f} of {args.draft_tokens} guesses kept per step")
    return row, loaded, partial(inference.speed, result, text, device=device, bytes_per_step=read)


def main() -> int:
    started = time.perf_counter()
    args = parse_args(__doc__)
    device = runtime.single_device(args.device)
    runtime.exact_fp32(device)
    chosen = schemes(args, device)
    config = shapes.read_config(args.model)
    text = inference.Text(args.model, args.tokenizer, config)
    new_tokens = {"max_new_tokens": args.max_new_tokens, "draft_tokens": args.draft_tokens}
    written = inference.read_prompts(prompt=args.prompt, file=args.prompts)
    prompts = [text.encode(prompt, chat=args.chat, **new_tokens) for prompt in written]
    if args.draft:
        check_draft(args, config, prompts)
    evaluated = read_text(args.evaluate, text) if args.evaluate else None
    print(f"{args.model}, {', '.join(chosen)}, {hardware.device_name(device)}, {len(prompts)} prompt(s)", flush=True)

    found = []
    reference = None
    for weights in chosen:
        row, loaded, speed = run(weights, prompts, text, evaluated, args, device)
        logits = prompt_logits(loaded.net, prompts, device) if len(chosen) > 1 else None
        if weights == "fp32":
            reference = logits
        elif reference is not None:
            row["logits_relative_error"] = check_logits(logits, reference, loaded, row["dtype"])
        found.append((row, speed))
        del loaded  # before the next is made
    peak = report.peak_memory_bytes(device)  # before what measures the bandwidth takes memory
    rows = [{**row, **speed()} for row, speed in found]
    print_rows(rows)
    for prompt, answer in zip(written, rows[-1]["texts"], strict=True):
        print(f"\n{prompt!r} goes on, with {chosen[-1]}: {answer!r}")
    summary = {
        "device": hardware.device_name(device),
        "world_size": 1,
        "model": args.model,
        "parameters": shapes.parameter_count(config),
        "compiled": args.compile,
        "kv_cache": args.kv_cache,
        **rows[-1],
        "schemes": rows,
        "tokens": rows[-1]["prompt_tokens"] + rows[-1]["new_tokens"],
        "peak_memory_bytes": peak,
        "seconds": time.perf_counter() - started,
    }
    report.write_json(summary, args.json)
    return 0


if __name__ == "__main__":
    exits.run(main)
