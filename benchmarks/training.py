"""Compare training scripts of this repository: what does one choice change in tokens per second?

Each case is a question, and each side of a case is a command in its own process. The sides take
turns, so that a machine that slows down slows all of them. Each side is compared with another side
of the same round. tokens/s is the script's own figure: the median between log lines, without the
first, which includes allocation and compilation.

    laptop    python benchmarks/training.py --case sharding
    one GPU   python benchmarks/training.py --case compile --model llama-124m
    one node  python benchmarks/training.py --case sharding --model llama-1b --global-batch-size 64

    case        what is compared
    compile     04_amp/train.py: eager, compiled
    batch       04_amp/train.py: batches of 1, 4 and 16 sequences
    processes   05_ddp/train.py: one process with all cores or one GPU, and all ranks, with the same
                global batch
    sharding    on all ranks: DDP, FSDP, FSDP that keeps weights until backward, DeepSpeed ZeRO-3
    fsdp        what FSDP costs on one rank, both compiled
    trainer     04_amp/train.py and transformers' Trainer; trainer-compiled: both compiled

What to look at: the ratio and its spread. Results go to benchmarks/results/, new after each run.
Next: inference.py.
"""

import math
import os
from functools import partial
from pathlib import Path

import torch
from _measure import CORES, Comparison, Side, parser, run_comparison, start_comparison

from common import cli, exits

PLAIN = "04_amp/train.py"
DDP = "05_ddp/train.py"
FSDP = "06_fsdp_zero/train_fsdp.py"
ZERO = "06_fsdp_zero/train_zero.py"
TRAINER = "benchmarks/peer_trainer.py"
ALL = -1  # ranks: as many as --ranks
# side, script, flags of its own, ranks (0: without torchrun), the side that it is compared with
CASES = {
    "compile": [Side("eager", PLAIN), Side("compiled", PLAIN, "--compile", 0, "eager")],
    "batch": [
        Side("batch of 1", PLAIN, "--global-batch-size 1"),
        Side("batch of 4", PLAIN, "--global-batch-size 4", 0, "batch of 1"),
        Side("batch of 16", PLAIN, "--global-batch-size 16", 0, "batch of 1"),
    ],
    "processes": [Side("one process", DDP), Side("all ranks", DDP, "", ALL, "one process")],
    "sharding": [
        Side("DDP", DDP, "", ALL),
        Side("FSDP", FSDP, "", ALL, "DDP"),
        Side("FSDP, kept until backward", FSDP, "--reshard-after-forward off", ALL, "DDP"),
        Side("ZeRO-3", ZERO, "--stage 3", ALL, "DDP"),
    ],
    "fsdp": [
        Side("plain, compiled", PLAIN, "--compile"),
        Side("FSDP, compiled", FSDP, "--compile", 0, "plain, compiled"),
    ],
    "trainer": [Side("ours", PLAIN, "", 0, "Trainer"), Side("Trainer", TRAINER)],
    "trainer-compiled": [
        Side("ours, compiled", PLAIN, "--compile", 0, "Trainer, compiled"),
        Side("Trainer, compiled", TRAINER, "--compile"),
    ],
}
DEFAULTS = {
    "cpu": {"model": "nano", "seq_len": 256, "global_batch_size": 8, "dtype": "fp32"},
    "cuda": {"model": "llama-124m", "seq_len": 1024, "global_batch_size": 64, "dtype": "bf16"},
}
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}  # relative, of the first loss
TRAINER_LOSS_TOLERANCE = 0.1  # of the last: its batches come in another order
LOG_EVERY = 10


def sides_of(case: str, args) -> list[Side]:
    """Return the commands of a case.

    On a CPU the ranks of a side share the cores, unless OMP_NUM_THREADS is set.
    """
    flags = f"--model {args.model} --data {args.data} --dtype {args.dtype} --device {args.device}"
    flags += f" --seq-len {args.seq_len} --global-batch-size {args.global_batch_size}"
    flags += f" --steps {args.steps} --log-every {LOG_EVERY} "
    sides = []
    for side in CASES[case]:
        ranks = args.ranks if side.ranks == ALL else side.ranks
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, CORES // max(1, ranks)))
        env = {"OMP_NUM_THREADS": threads} if args.device == "cpu" else {}
        side_flags = flags + side.flags
        if side.script not in (TRAINER, ZERO):
            side_flags += " --keep 0"  # no checkpoint: that of llama-1b has 15 GB
        sides.append(side._replace(flags=side_flags, ranks=ranks, env=env))
    return sides


def check(case: str, dtype: str, comparison: Comparison) -> None:
    """Assert that the sides train the same model on the same batch."""
    firsts = [runs[0] for runs in comparison.runs.values()]
    key = "first_loss"
    tolerance = LOSS_TOLERANCE[dtype]
    if case.startswith("trainer"):
        key = "last_loss"
        tolerance = TRAINER_LOSS_TOLERANCE
    for run in firsts:
        assert run["parameters"] == firsts[0]["parameters"], (
            f"{case}: {run['parameters']} parameters"
        )
        same = math.isclose(run[key], firsts[0][key], rel_tol=tolerance)
        assert case == "batch" or same, (
            f"{case}: {key} {run[key]}, of the first side {firsts[0][key]}"
        )


def main() -> int:
    flags = parser(__doc__)
    add = flags.add_argument
    add("--case", choices=tuple(CASES), default="compile")
    add("--model", help="as in 04_amp/train.py (default: nano, on a GPU llama-124m)")
    add("--data", default="stdlib", help="as in 04_amp/train.py")
    add("--seq-len", type=cli.positive_int, help="default: 256, on a GPU 1024")
    add(
        "--global-batch-size",
        type=cli.positive_int,
        help="sequences per step (default: 8, on a GPU 64)",
    )
    add("--steps", type=cli.positive_int, default=30, help=f"of each run, at least {2 * LOG_EVERY}")
    add("--dtype", choices=tuple(LOSS_TOLERANCE), help="default: fp32, on a GPU bf16")
    add("--ranks", type=cli.positive_int, help="default: 2, on GPUs as many as there are")
    args = start_comparison(flags, DEFAULTS)
    if args.steps < 2 * LOG_EVERY:
        raise exits.UserError(
            f"--steps {args.steps} leaves too little to time: at least {2 * LOG_EVERY}"
        )
    if args.ranks is None:
        args.ranks = min(2, CORES) if args.device == "cpu" else torch.cuda.device_count()
    if args.ranks < 2 and any(side.ranks == ALL for side in CASES[args.case]):
        raise exits.UserError(
            f"--ranks {args.ranks}: --case {args.case} needs several: use --ranks 2 --device cpu"
        )
    if Path(args.data).exists():
        args.data = str(Path(args.data).resolve())
    comparison = Comparison(
        f"training-{args.case}", sides_of(args.case, args), "tokens_per_second", "mfu"
    )
    title = f"Training, {args.case}: {Path(args.model).name}, "
    title += f"{args.global_batch_size} x {args.seq_len} tokens per step"
    return run_comparison(comparison, args, title, partial(check, args.case, args.dtype))


if __name__ == "__main__":
    exits.run(main)
