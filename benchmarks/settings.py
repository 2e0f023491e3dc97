"""What one flag of 04_amp/train.py changes in tokens per second: compiled or eager, large or small batches.

Each part changes one flag and leaves the others alone. Its variants take turns, so that a machine that slows down
slows all of them, and each is compared with the first one of the same round. Every run is a process of its own; its
first steps, which compile and allocate, are not timed.

    laptop    python benchmarks/settings.py
    one GPU   python benchmarks/settings.py --model llama-124m --seq-len 1024 --batch-sizes 1 8 32

Look for: the ratio and its spread. A ratio whose lowest and highest lie on both sides of 1 shows nothing. Results go to
benchmarks/results/.
"""

import os
import sys
from datetime import date

from _shared import LOG_EVERY, WARMUP_STEPS, Failed, cpu, facts, spread_cells, train, versions, write_results

from old import cli, exits, runtime
from old.hardware import device_name
from old.report import spread, table

SCRIPT = "04_amp/train.py"


def variants(args) -> dict[str, dict[str, list[str]]]:
    """The flags that each variant adds, by part; the first variant of a part is its baseline."""
    batch = ["--global-batch-size", str(args.batch_size)]
    return {
        "compile": {
            "eager": batch,
            "compiled": [*batch, "--compile"],
        },
        "batch": {f"batch of {size}": ["--global-batch-size", str(size)] for size in args.batch_sizes},
    }


def measure(part: str, flags_of: dict[str, list[str]], shared: list[str], args) -> dict[str, list[float]]:
    """Tokens/s of each variant, round by round; the first round is thrown away."""
    speeds = {name: [] for name in flags_of}
    for round_ in range(args.rounds + 1):
        for name, flags in flags_of.items():
            speed = train(SCRIPT, [*shared, *flags], dict(os.environ), args.timeout)["tokens_per_second"]
            print(f"{part:<8} round {round_} {name:<14} {speed:,.0f} tokens/s", flush=True)
            if round_ > 0:
                speeds[name].append(speed)
    return speeds


def rows_of(speeds: dict[str, list[float]]) -> list[list[str]]:
    """One row for each variant: its tokens/s, and its ratio to the baseline of the same round."""
    baseline = next(iter(speeds.values()))
    rows = [["variant", "n", "tokens/s", "lowest", "highest", "ratio", "lowest", "highest"]]
    for name, values in speeds.items():
        ratios = [value / other for value, other in zip(values, baseline, strict=True)]
        rows.append([name, *spread_cells(spread(values)), *spread_cells(spread(ratios), ".3f")[1:]])
    return rows


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--part", choices=("both", "compile", "batch"), default="both")
    add("--rounds", type=cli.positive_int, default=5, help="timed rounds, after one thrown away")
    add("--steps", type=cli.positive_int, default=30, help=f"of each run, the first {WARMUP_STEPS} not timed")
    add("--model", default="nano")
    add("--dtype", choices=("auto", "fp32", "bf16"), default="auto")
    add("--seq-len", type=cli.positive_int, default=256)
    add("--batch-size", type=cli.positive_int, default=8, help="sequences per step, eager and compiled")
    add("--batch-sizes", type=cli.positive_int, nargs="+", default=[1, 4, 16], help="sequences per step, by turns")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--timeout", type=cli.positive_int, default=900, help="seconds that one run may take")
    args = parser.parse_args()
    if args.steps < WARMUP_STEPS + LOG_EVERY:
        raise runtime.UserError(f"--steps {args.steps} leaves nothing to time: at least {WARMUP_STEPS + LOG_EVERY}")

    device = runtime.pick_device(args.device)
    shared = ["--model", args.model, "--dtype", args.dtype, "--seq-len", str(args.seq_len)]
    shared += ["--steps", str(args.steps), "--device", device.type]
    about = {
        "device": cpu()["cpu"] if device.type == "cpu" else device_name(device),
        **cpu(),
        **versions("numpy"),
        "date": date.today().isoformat(),
        "command": f"python benchmarks/settings.py {' '.join(sys.argv[1:])}".strip(),
        "shape": f"{args.model}, {args.dtype}, sequences of {args.seq_len} tokens, {args.steps} steps",
    }
    print(facts(about), flush=True)

    result = dict(about)
    sections = []
    for part, flags_of in variants(args).items():
        if args.part not in ("both", part):
            continue
        try:
            speeds = measure(part, flags_of, shared, args)
        except Failed as error:
            raise runtime.UserError(f"a run failed: {error}") from None
        result[part] = speeds
        sections.append(f"## {part}\n\n{table(rows_of(speeds))}")
    text = "\n\n".join(sections)
    shell = f"python {SCRIPT} {' '.join(shared)} --log-every {LOG_EVERY}"
    report = f"# What one flag of {SCRIPT} changes\n\n{facts(about)}\n\n{text}\n\n```\n{shell}\n```\n"
    file = write_results(about["device"], "-settings", result, report)
    print(f"\n{text}\n\nwritten: {file.relative_to(file.parents[2])} and .json")
    return 0


if __name__ == "__main__":
    exits.run(main)
