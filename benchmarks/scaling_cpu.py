"""05_ddp/train.py without a GPU: what a second process costs, and how long until the first step.

Scaling: two ranks of one thread each (gloo) against one process with two threads, the same global batch.
Both have two cores; the difference is what the gradients' way between the ranks costs. Start-up: from the
command to the end of the first step, with and without torchrun, beside `import torch` alone and beside
the first step's own time; the rest is what the script and the launcher add.

    python benchmarks/scaling_cpu.py              rounds of both, interleaved
    python benchmarks/scaling_cpu.py --rounds 9   more of them

Look for: the ratio beside its target of 0.9, and what is left of the start-up when torch's import and
the step itself are taken away. Results go to benchmarks/results/.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from datetime import date
from pathlib import Path

from _shared import (
    LOG_EVERY,
    REPO,
    TORCHRUN,
    WARMUP_STEPS,
    Failed,
    cpu,
    end,
    facts,
    spread_cells,
    start,
    train,
    versions,
    write_results,
)

from old import cli, exits, runtime
from old.report import read_records, spread, table

SCRIPT = "05_ddp/train.py"
RATIO_TARGET = 0.9


def environment(threads: int) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(threads)}


def scaling(args) -> dict:
    """Tokens/s of two ranks and of one process, round by round; the first round is thrown away."""
    shape = ["--device", "cpu", "--dtype", "fp32", "--seq-len", str(args.seq_len)]
    flags = [*shape, "--global-batch-size", str(args.batch_size), "--steps", str(args.steps)]
    speeds: dict[str, list[float]] = {"one process, 2 threads": [], "2 ranks of 1 thread": []}
    for round_ in range(args.rounds + 1):
        one = train(SCRIPT, flags, environment(2), args.timeout)["tokens_per_second"]
        launcher = [*TORCHRUN, "--nproc_per_node=2"]
        two = train(SCRIPT, flags, environment(1), args.timeout, launcher)["tokens_per_second"]
        name = f"round {round_}" if round_ else "warm-up"
        print(f"scaling  {name:<8} one process {one:,.0f}, 2 ranks {two:,.0f} tokens/s", flush=True)
        if round_:
            for speed, measured in zip((one, two), speeds.values(), strict=True):
                measured.append(speed)
    one, two = speeds.values()
    return {
        "speeds": speeds,
        "ratio": spread([b / a for a, b in zip(one, two, strict=True)]),
        "commands": [
            f"OMP_NUM_THREADS=2 python {SCRIPT} {' '.join(flags)} --log-every {LOG_EVERY}",
            f"OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node=2 {SCRIPT} {' '.join(flags)} "
            f"--log-every {LOG_EVERY}",
        ],
    }


def first_step(launcher: list[str], threads: int, timeout: float) -> tuple[float, float]:
    """Seconds from the command to the line of the first step, and those of the step itself."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        flags = ["--device", "cpu", "--dtype", "fp32", "--steps", "1", "--log-every", "1", "--run-dir", folder]
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *launcher, SCRIPT, *flags],
            cwd=REPO,
            env=environment(threads),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        guard = threading.Timer(timeout, process.terminate)  # its end ends the reading below
        guard.start()
        seconds = None
        try:
            for line in process.stdout:
                if line.startswith("step") and " 1/1 " in line and seconds is None:
                    seconds = time.perf_counter() - began
            process.wait(timeout=60)
        finally:
            guard.cancel()
            if process.poll() is None:
                end(process)
        if process.returncode or seconds is None:
            raise Failed(f"{SCRIPT} ended with exit code {process.returncode} or without its first step", "")
        record = next(r for r in read_records(Path(folder, "metrics.jsonl")) if "loss" in r)
        return seconds, record["tokens"] / record["tokens_per_second"]


def startup(args) -> dict:
    """Seconds to the first step, round by round; the first round is thrown away (files come off the disk)."""
    threads = cpu()["cores"]
    measured: dict[str, list[float]] = {
        name: [] for name in ("import torch", "python", "torchrun", "first step itself")
    }
    for round_ in range(args.rounds + 1):
        began = time.perf_counter()
        start([sys.executable, "-c", "import torch"], environment(threads), args.timeout)
        imported = time.perf_counter() - began
        plain, step = first_step([], threads, args.timeout)
        launched, _ = first_step([*TORCHRUN, "--nproc_per_node=1"], threads, args.timeout)
        name = f"round {round_}" if round_ else "warm-up"
        print(
            f"start-up {name:<8} import torch {imported:.2f}, python {plain:.2f}, torchrun {launched:.2f}, "
            f"the first step itself {step:.2f} s",
            flush=True,
        )
        if round_:
            for values, seconds in zip(measured.values(), (imported, plain, launched, step), strict=True):
                values.append(seconds)
    torch_, plain, launched, step = measured.values()
    rest = {
        "python, less import torch and the step": [p - i - s for p, i, s in zip(plain, torch_, step, strict=True)],
        "torchrun, less python": [b - a for a, b in zip(plain, launched, strict=True)],
    }
    flags = "--device cpu --dtype fp32 --steps 1 --log-every 1"
    commands = ["python -c 'import torch'", f"python {SCRIPT} {flags}"]
    commands.append(f"torchrun --standalone --nproc_per_node=1 {SCRIPT} {flags}")
    return {"seconds": {**measured, **rest}, "commands": commands}


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--rounds", type=cli.positive_int, default=5, help="timed rounds of each part, after one thrown away")
    add("--steps", type=cli.positive_int, default=50, help=f"per scaling run, the first {WARMUP_STEPS} not timed")
    add("--seq-len", type=cli.positive_int, default=256)
    add("--batch-size", type=cli.positive_int, default=8, help="sequences per step, over all ranks")
    add("--part", choices=("both", "scaling", "startup"), default="both")
    add("--timeout", type=cli.positive_int, default=900, help="seconds that one run may take")
    args = parser.parse_args()
    if args.steps < WARMUP_STEPS + LOG_EVERY:
        raise runtime.UserError(f"--steps {args.steps} leaves nothing to time: at least {WARMUP_STEPS + LOG_EVERY}")
    if args.part != "startup" and cpu()["cores"] < 2:
        raise runtime.UserError("two ranks need two cores, this process may use one: --part startup needs only that")
    about = {"device": cpu()["cpu"], **cpu(), **versions("numpy"), "date": date.today().isoformat()}
    about["command"] = f"python benchmarks/scaling_cpu.py {' '.join(sys.argv[1:])}".strip()
    print(facts(about), flush=True)

    result, parts, commands = dict(about), [], []
    try:
        if args.part != "startup":
            result["scaling"] = scaled = scaling(args)
            commands += scaled["commands"]
            rows = [["tokens/s", "n", "median", "min", "max"]]
            for name, values in scaled["speeds"].items():
                rows.append([name, *spread_cells(spread(values))])
            ratio = scaled["ratio"]
            rows.append(["ratio", *spread_cells(ratio, ".3f")])
            scaled["verdict"] = verdict = "met" if ratio["median"] >= RATIO_TARGET else "missed"
            shape = f"nano, fp32, {args.batch_size} sequences of {args.seq_len} tokens per step, {args.steps} steps"
            parts.append(f"## Scaling\n\n{shape}, the first {WARMUP_STEPS} not timed.\n\n{table(rows)}")
            parts.append(
                f"- **{verdict}**: 2 ranks over one process: {ratio['median']:.3f}; we aimed at {RATIO_TARGET:g}"
            )
        if args.part != "scaling":
            result["startup"] = started = startup(args)
            commands += started["commands"]
            rows = [["seconds", "n", "median", "min", "max"]]
            for name, values in started["seconds"].items():
                rows.append([name, *spread_cells(spread(values), ".2f")])
            parts.append(f"## Start-up, to the end of the first step\n\n{table(rows)}")
    except Failed as error:
        raise runtime.UserError(f"a run failed: {error}") from None
    text = "\n\n".join(parts)
    shell = "\n".join(commands)
    report = f"# 05_ddp/train.py on a CPU\n\n{facts(about)}\n\n{text}\n\n```\n{shell}\n```\n"
    file = write_results(about["device"], "-scaling", result, report)
    print(f"\n{text}\n\nwritten: {file.relative_to(REPO)} and .json")
    return 0


if __name__ == "__main__":
    exits.run(main)
