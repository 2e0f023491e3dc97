"""What sharding costs one GPU: train_fsdp.py and train_3d.py with one process beside 04_amp/train.py, all compiled.

A world of one has nobody to gather from, so all should be equally fast. Then an eager run with FSDP and a plain one:
the peak of memory beside what `compare.py --dry-run` predicts for FSDP. All runs are processes of their own, and rounds
alternate. A run with llama-1b takes about a minute and a half, half of it compilation and a checkpoint of 15 GB.

    one GPU   python benchmarks/sharding_gpu.py
    longer    python benchmarks/sharding_gpu.py --rounds 3
    laptop    python benchmarks/sharding_gpu.py --device cpu --model nano --seq-len 64 --batch-size 8

Look for: MFU, the ratios to plain training, and the two peaks, each beside its target. Results go to
benchmarks/results/, anew after every round.
"""

import json
import os
import sys
import tempfile
from datetime import date
from pathlib import Path

from _shared import (
    LOG_EVERY,
    REPO,
    TORCHRUN,
    WARMUP_STEPS,
    Failed,
    cpu,
    facts,
    number,
    spread_cells,
    start,
    train,
    versions,
    write_results,
)

from old import cli, exits, runtime, shapes
from old.hardware import device_name
from old.report import spread, table

SIDES = {
    "04_amp/train.py": [],
    "06_fsdp_zero/train_fsdp.py": [*TORCHRUN, "--nproc_per_node=1"],
    "08_model_parallel/train_3d.py": [*TORCHRUN, "--nproc_per_node=1"],
}
PLAIN, FSDP, MESH = SIDES
MFU_TARGET = 0.50  # the best published for this size is 47.8 % (OLMo-core 1B, 8 H100)
RATIO_TARGET = 0.98
PEAK_TOLERANCE = 0.03


def run_side(script: str, args, batch_size: int, more: list[str]) -> dict:
    flags = ["--model", args.model, "--device", args.device, "--dtype", "bf16", "--seq-len", str(args.seq_len)]
    flags += ["--global-batch-size", str(batch_size), "--micro-batch-size", str(args.micro_batch_size), *more]
    run = train(script, flags, dict(os.environ), args.timeout, SIDES[script])
    flops = shapes.flops_per_token(shapes.read_config(args.model), args.seq_len)
    peak = run["peak_flops_per_device"]
    speed = run["tokens_per_second"]  # None for a run that is too short to be timed
    run["mfu"] = speed * flops / peak if speed and peak else None  # of the steps after the warm-up
    return run


def predicted_peak(args) -> int:
    """The peak of FSDP on one rank, in bytes, by compare.py's dry run of one micro-batch."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        summary = Path(folder, "summary.json")
        command = ["06_fsdp_zero/compare.py", "--dry-run", "--world-size", "1", "--model", args.model]
        command += ["--dtype", "bf16", "--seq-len", str(args.seq_len)]
        command += ["--micro-batch-size", str(args.micro_batch_size), "--json", str(summary)]
        start([sys.executable, *command], dict(os.environ), args.timeout)
        rows = json.loads(summary.read_text())["rows"]
    return next(row["peak_memory_bytes"] for row in rows if row["method"] == "FSDP")


def write_up(about: dict, runs: dict[str, list[dict]], peaks: dict[str, int]) -> tuple[str, list[str]]:
    """The tables and the verdicts, of what has been measured by now."""
    rows = [["compiled", "n", "median", "min", "max"]]
    for side in SIDES:
        speeds = [run["tokens_per_second"] for run in runs[side]]
        rows.append([f"{side}, tokens/s", *spread_cells(spread(speeds))])
    mfu = spread([run["mfu"] for run in runs[PLAIN] if run["mfu"]])
    rows.append([f"{PLAIN}, MFU", *spread_cells(mfu, ".1%")])
    verdicts = [verdict(mfu["median"], MFU_TARGET, f"MFU of {PLAIN}: {number(mfu['median'], '.1%')}; we aimed at 50 %")]
    for side in (FSDP, MESH):
        pairs = zip(runs[PLAIN], runs[side], strict=False)
        ratio = spread([ours["tokens_per_second"] / plain["tokens_per_second"] for plain, ours in pairs])
        rows.append([f"{side} / plain", *spread_cells(ratio, ".3f")])
        told = f"{side} / plain: {number(ratio['median'], '.3f')}; we aimed at {RATIO_TARGET:g}"
        verdicts.append(verdict(ratio["median"], RATIO_TARGET, told))
    text = table(rows)
    if {"predicted for FSDP", FSDP} <= peaks.keys():
        rows = [["eager, one micro-batch", "peak, GiB"]]
        rows += [[name, f"{size / 2**30:.2f}"] for name, size in peaks.items()]
        text += f"\n\n{table(rows)}"
        error = abs(peaks["predicted for FSDP"] / peaks[FSDP] - 1)
        told = f"the dry run's peak is {error:.1%} off the measured one; we aimed at {PEAK_TOLERANCE:.0%}"
        verdicts.append(verdict(-error, -PEAK_TOLERANCE, told))
    return f"{text}\n\n" + "\n".join(verdicts), verdicts


def verdict(value: float | None, least: float, claim: str) -> str:
    met = "open" if value is None else "met" if value >= least else "missed"
    return f"- **{met}**: {claim}"


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--model", default="llama-1b", help="as in 04_amp/train.py")
    add("--seq-len", type=cli.positive_int, default=4096)
    add("--batch-size", type=cli.positive_int, default=8, help="sequences per optimizer step")
    add("--micro-batch-size", type=cli.positive_int, default=2, help="sequences per forward")
    add("--steps", type=cli.positive_int, default=30, help=f"per run, the first {WARMUP_STEPS} not timed")
    add("--rounds", type=cli.positive_int, default=1)
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--timeout", type=cli.positive_int, default=420, help="seconds that one run may take")
    args = parser.parse_args()
    if args.steps < WARMUP_STEPS + LOG_EVERY:
        raise runtime.UserError(f"--steps {args.steps} leaves nothing to time: at least {WARMUP_STEPS + LOG_EVERY}")
    device = runtime.pick_device(args.device)
    name = device_name(device) if device.type == "cuda" else cpu()["cpu"]
    about = {"device": name, **cpu(), **versions(), "date": date.today().isoformat()}
    about["command"] = f"python benchmarks/sharding_gpu.py {' '.join(sys.argv[1:])}".strip()
    about["shape"] = (
        f"{args.model}, bf16, {args.batch_size} sequences of {args.seq_len} tokens per step in micro-batches of "
        f"{args.micro_batch_size}, {args.steps} steps"
    )
    print(facts(about), flush=True)

    runs: dict[str, list[dict]] = {side: [] for side in SIDES}
    peaks: dict[str, int] = {}

    def save() -> tuple[str, Path]:
        text, verdicts = write_up(about, runs, peaks)
        result = {**about, "runs": runs, "peaks": peaks, "verdicts": verdicts}
        title = "# FSDP and train_3d.py on one GPU beside plain training"
        return text, write_results(name, "-sharding-one-gpu", result, f"{title}\n\n{facts(about)}\n\n{text}\n")

    try:
        for round_ in range(args.rounds):
            for side in SIDES:
                run = run_side(side, args, args.batch_size, ["--compile", "--steps", str(args.steps)])
                told = f"{run['tokens_per_second']:,.0f} tokens/s, MFU {number(run['mfu'], '.1%')}"
                print(f"round {round_ + 1} {side:<29} {told}", flush=True)
                runs[side].append(run)
            save()
        if device.type == "cuda":  # a CPU's peak is that of the process
            peaks["predicted for FSDP"] = predicted_peak(args)
            for side in (FSDP, PLAIN):
                # the second step is the first one with optimizer state
                peaks[side] = run_side(side, args, args.micro_batch_size, ["--steps", "2"])["peak_memory_bytes"]
                save()
    except Failed as error:
        raise runtime.UserError(f"a run failed: {error}") from None
    text, file = save()
    print(f"\n{text}\n\nwritten: {file.relative_to(REPO)} and .json")
    return 0


if __name__ == "__main__":
    exits.run(main)
