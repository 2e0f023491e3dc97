"""Decode beside transformers' `generate`: tokens per second of the same model on the same machine, batch 1.

Each side is a command in a process of its own, and sides take turns. Compiled is compared with compiled, eager with
eager: what torch.compile gains both gain. A step reads every weight once, so no step is faster than the weights' bytes
over the memory's bandwidth; `bandwidth share` is how near it comes (a CPU's bandwidth is measured by the same process,
a GPU's is the data sheet's). The clock runs over decode alone; prefill and time to the first token are in the .json.
In fp32 the lessons themselves check that their tokens are those of `generate`.

    laptop    python benchmarks/inference.py
    one GPU   python benchmarks/inference.py --model llama-8b --device cuda --minutes 9
    a 70B     python benchmarks/inference.py --model llama-70b --sides int8,int4 --device cuda --minutes 9

Sides: generate, ours, generate-compiled, ours-compiled, int8, int4 (both compiled, beside ours-compiled). Look for: the
ratio and its spread, and the share of the bandwidth; above 100 % the timing is wrong (exit code 1). Results go to
benchmarks/results/, anew after each run. Next: gpu_report.py.
"""

import time
from pathlib import Path

from _measure import Comparison, Side, about, choose_device, end_children_at_sigterm, facts, run_comparison

from common import cli, exits, shapes

GENERATE, OURS, QUANTIZED = "benchmarks/_generate.py", "09_inference/infer_70b.py", "09_inference/quantized.py"
# script, own flags, and the side that it is compared with: never compiled with eager
SIDES = {
    "generate": (GENERATE, "", None),
    "ours": (OURS, "", "generate"),
    "generate-compiled": (GENERATE, "--compile", None),
    "ours-compiled": (OURS, "--compile", "generate-compiled"),
    "int8": (QUANTIZED, "--weights int8 --compile", "ours-compiled"),
    "int4": (QUANTIZED, "--weights int4 --compile", "ours-compiled"),
}


def sides_of(args) -> list[Side]:
    shared = f"--model {args.model} --dtype {args.dtype} --device {args.device} --max-new-tokens {args.max_new_tokens}"
    found = []
    for name in args.sides:
        script, own, against = SIDES[name]
        found.append(Side(name, script, [*shared.split(), *own.split()], against=against))
    return found


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--model", default="nano", help="a size with random weights, or a Hugging Face folder")
    add("--sides", default="generate,ours,generate-compiled,ours-compiled", help="names, with commas between")
    add("--max-new-tokens", type=cli.positive_int, default=64)
    add("--dtype", choices=("fp32", "bf16"), help="of weights that are not quantized (default: nano fp32, others bf16)")
    add("--rounds", type=cli.positive_int, default=5)
    add("--minutes", type=cli.positive, default=120.0, help="all of it ends within this time")
    cli.add_device_and_json(parser)
    args = parser.parse_args()
    deadline = time.monotonic() + args.minutes * 60
    end_children_at_sigterm()
    args.sides = args.sides.split(",")
    if unknown := [name for name in args.sides if name not in SIDES]:
        raise exits.UserError(f"--sides {unknown[0]!r}: use {', '.join(SIDES)}")
    if args.max_new_tokens < 16:
        raise exits.UserError(f"--max-new-tokens {args.max_new_tokens} leaves too little to time: use at least 16")
    args.device = choose_device(args.device)
    args.dtype = args.dtype or ("fp32" if args.model == "nano" else "bf16")
    shapes.read_config(args.model)
    if Path(args.model).exists():
        args.model = str(Path(args.model).resolve())

    facts_ = about("benchmarks/inference.py", args.device, "transformers")
    print(facts(facts_), flush=True)
    name = Path(args.model).name
    comparison = Comparison(f"decode-{name}", sides_of(args), "decode_tokens_per_second", "bandwidth_share")
    title = f"Decode, batch 1: {name}, {args.dtype}, {args.max_new_tokens} new tokens"
    return run_comparison(comparison, args, deadline, title=title, kind=f"decode-{name}", facts_=facts_)


if __name__ == "__main__":
    exits.run(main)
