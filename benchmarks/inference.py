"""Compare decode with transformers' `generate`: tokens per second of the same model, batch 1.

Each side is a command in its own process, and the sides take turns. Compiled is compared with
compiled, and eager with eager, because both sides gain from torch.compile. A step reads every
weight once, so no step can be faster than bytes of the weights / bandwidth of the memory.
`bandwidth share` is how near a side comes to that. A CPU's bandwidth is measured by the same
process, and a GPU's is from its data sheet. Only decode is timed; prefill and the time to the first
token are in the .json. In fp32 the lessons check that their tokens are those of `generate`.

    laptop    python benchmarks/inference.py
    one GPU   python benchmarks/inference.py --model llama-8b --device cuda --minutes 9
    a 70B     python benchmarks/inference.py --model llama-70b --sides int8,int4 --device cuda \\
                  --minutes 9

Sides: generate, ours, generate-compiled, ours-compiled; int8 and int4, both compiled, beside
ours-compiled; int8-triton and int4-triton, with --kernel triton, beside those.

What to look at: the ratio and its spread, and the share of the bandwidth. Above 100 % the timing is
wrong (exit code 1). Results go to benchmarks/results/, new after each run. Next: gpu.py.
"""

from pathlib import Path

from _measure import Comparison, Side, parser, run_comparison, start_comparison

from common import cli, exits

GENERATE = "benchmarks/peer_generate.py"
OURS = "09_inference/infer_70b.py"
QUANTIZED = "09_inference/quantized.py"
SIDES = {  # each is compared with its own kind: never compiled with eager
    "generate": Side("generate", GENERATE),
    "ours": Side("ours", OURS, against="generate"),
    "generate-compiled": Side("generate-compiled", GENERATE, "--compile"),
    "ours-compiled": Side("ours-compiled", OURS, "--compile", against="generate-compiled"),
    "int8": Side("int8", QUANTIZED, "--weights int8 --compile", against="ours-compiled"),
    "int4": Side("int4", QUANTIZED, "--weights int4 --compile", against="ours-compiled"),
    "int8-triton": Side(
        "int8-triton", QUANTIZED, "--weights int8 --kernel triton --compile", against="int8"
    ),
    "int4-triton": Side(
        "int4-triton", QUANTIZED, "--weights int4 --kernel triton --compile", against="int4"
    ),
}


def sides_of(args) -> list[Side]:
    """Return the sides that the flags name, with the flags that all have."""
    shared = f"--model {args.model} --dtype {args.dtype} --device {args.device} "
    shared += f"--max-new-tokens {args.max_new_tokens} "
    return [SIDES[name]._replace(flags=shared + SIDES[name].flags) for name in args.sides]


def main() -> int:
    flags = parser(__doc__)
    add = flags.add_argument
    add("--model", default="nano", help="a size with random weights, or a Hugging Face folder")
    add(
        "--sides",
        default="generate,ours,generate-compiled,ours-compiled",
        help="names, with commas between",
    )
    add("--max-new-tokens", type=cli.positive_int, default=64)
    add(
        "--dtype",
        choices=("fp32", "bf16"),
        help="of weights that are not quantized (default: nano fp32, others bf16)",
    )
    args = start_comparison(flags)
    args.sides = args.sides.split(",")
    if unknown := [name for name in args.sides if name not in SIDES]:
        raise exits.UserError(f"--sides {unknown[0]!r}: use {', '.join(SIDES)}")
    name = Path(args.model).name
    args.dtype = args.dtype or ("fp32" if name == "nano" else "bf16")
    comparison = Comparison(
        f"decode-{name}", sides_of(args), "decode_tokens_per_second", "bandwidth_share"
    )
    title = f"Decode, batch 1: {name}, {args.dtype}, {args.max_new_tokens} new tokens"
    return run_comparison(comparison, args, title)


if __name__ == "__main__":
    exits.run(main)
