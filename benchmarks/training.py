"""What one choice changes in tokens per second: the training scripts of this repository beside each other.

Each case is a question, each of its sides a command in a process of its own. Sides take turns, so that a machine that
slows down slows all, and each is compared with another side of the same round. tokens/s is the script's own figure: the
median between log lines, without the first, which pays for allocation and compilation.

    laptop    python benchmarks/training.py --case sharding
    one GPU   python benchmarks/training.py --case compile --model llama-124m
    one node  python benchmarks/training.py --case layouts --model llama-1b --global-batch-size 64

    case        what is compared
    compile     04_amp/train.py: eager, compiled
    batch       04_amp/train.py: batches of 1, 4 and 16 sequences
    processes   05_ddp/train.py: one process with all cores or one GPU, then all ranks; the same global batch
    sharding    on all ranks: DDP, FSDP, FSDP that keeps weights until backward, DeepSpeed ZeRO-3
    layouts     on all ranks: DDP, then train_3d.py with data, tensor, pipeline or context parallelism alone
    one-rank    what sharding costs where there is nothing to shard: 04_amp/train.py, FSDP and train_3d.py on one rank
    trainer     04_amp/train.py and transformers' Trainer, eager and compiled: like with like

A pipeline requires a model whose embedding is not its head: in layouts --model gets a head of its own. A pipeline waits
for (p-1)/(m+p-1) of a step, by p stages and m micro-batches, and its ratio is what was measured, bubble included.

Look for: the ratio and its spread. Results go to benchmarks/results/, anew after each run. Next: inference.py.
"""

import dataclasses
import json
import math
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

from _measure import Comparison, Side, about, choose_device, end_children_at_sigterm, facts, run_comparison

from common import cli, exits, shapes

PLAIN, DDP, FSDP = "04_amp/train.py", "05_ddp/train.py", "06_fsdp_zero/train_fsdp.py"
ZERO, MESH, TRAINER = "06_fsdp_zero/train_zero.py", "08_model_parallel/train_3d.py", "benchmarks/_trainer.py"


class Way(NamedTuple):
    """A side before the flags of the command line; {ranks} and {micro} stand for numbers. ranks: 0, 1 or "all"."""

    name: str
    script: str
    flags: str = ""
    ranks: int | str = 0
    against: str | None = None  # None: a baseline


MICRO = "--micro-batch-size {micro}"  # a pipeline needs several micro-batches, so its rivals have as many
CASES = {
    "compile": [Way("eager", PLAIN), Way("compiled", PLAIN, "--compile", against="eager")],
    "batch": [
        Way("batch of 1", PLAIN, "--global-batch-size 1"),
        Way("batch of 4", PLAIN, "--global-batch-size 4", against="batch of 1"),
        Way("batch of 16", PLAIN, "--global-batch-size 16", against="batch of 1"),
    ],
    "processes": [Way("one process", DDP), Way("all ranks", DDP, "", "all", "one process")],
    "sharding": [
        Way("DDP", DDP, "", "all"),
        Way("FSDP", FSDP, "", "all", "DDP"),
        Way("FSDP, kept until backward", FSDP, "--reshard-after-forward off", "all", "DDP"),
        Way("ZeRO-3", ZERO, "--stage 3", "all", "DDP"),
    ],
    "layouts": [
        Way("DDP", DDP, MICRO, "all"),
        Way("data", MESH, MICRO, "all", "DDP"),
        Way("tensor", MESH, MICRO + " --tp {ranks}", "all", "DDP"),
        Way("pipeline", MESH, MICRO + " --pp {ranks}", "all", "DDP"),
        Way("context", MESH, MICRO + " --cp {ranks}", "all", "DDP"),
    ],
    "one-rank": [
        Way("plain", PLAIN),
        Way("FSDP", FSDP, "", 1, "plain"),
        Way("train_3d.py", MESH, "", 1, "plain"),
    ],
    "trainer": [
        Way("Trainer, compiled", TRAINER, "--compile"),
        Way("ours, compiled", PLAIN, "--compile", against="Trainer, compiled"),
        Way("Trainer", TRAINER),
        Way("ours", PLAIN, against="Trainer"),
    ],
}
DEFAULTS = {
    "cpu": {"model": "nano", "seq_len": 256, "global_batch_size": 8, "dtype": "fp32", "rounds": 5},
    "cuda": {"model": "llama-124m", "seq_len": 1024, "global_batch_size": 32, "dtype": "bf16", "rounds": 3},
}
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}  # relative, of the first loss
TRAINER_LOSS_TOLERANCE = 0.1  # of the last: its batches come in another order
LOG_EVERY = 10


def with_own_head(name: str, folder: Path) -> str:
    """A config.json of this shape with an output layer of its own; the name itself if it has that already."""
    config = shapes.read_config(name)
    if not config.tie_word_embeddings:
        return name
    file = folder / f"{Path(name).name}-untied.json"
    file.write_text(json.dumps(shapes.config_json(dataclasses.replace(config, tie_word_embeddings=False))))
    return str(file)


def sides_of(case: str, args, model: str) -> list[Side]:
    """The commands of a case. On a CPU the ranks of a side share the cores, unless OMP_NUM_THREADS is set."""
    shared = f"--model {model} --data {args.data} --dtype {args.dtype} --device {args.device} --seq-len {args.seq_len} "
    shared += f"--global-batch-size {args.global_batch_size} --steps {args.steps} --log-every {LOG_EVERY}"
    micro = max(1, args.global_batch_size // 8)
    cores = len(os.sched_getaffinity(0))
    found = []
    for way in CASES[case]:
        ranks = args.ranks if way.ranks == "all" else way.ranks
        own = way.flags.format(ranks=args.ranks, micro=micro)
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // max(1, ranks)))
        env = {"OMP_NUM_THREADS": threads} if args.device == "cpu" else {}
        found.append(Side(way.name, way.script, [*shared.split(), *own.split()], ranks, way.against, env))
    return found


def check(case: str, comparison: Comparison, dtype: str) -> None:
    """AssertionError if the sides do not train the same model on the same batch."""
    firsts = {side: runs[0] for side, runs in comparison.runs.items()}
    baseline = next(iter(firsts.values()))
    for side, run in firsts.items():
        assert run["parameters"] == baseline["parameters"], f"{case}, {side}: {run['parameters']} parameters"
        key, tolerance = "first_loss", LOSS_TOLERANCE[dtype]
        if case == "trainer":
            key, tolerance = "last_loss", TRAINER_LOSS_TOLERANCE
        same = math.isclose(run[key], baseline[key], rel_tol=tolerance)
        assert case == "batch" or same, f"{case}, {side}: {key} {run[key]}, of the baseline {baseline[key]}"


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--case", choices=tuple(CASES), default="compile")
    add("--model", help="as in 04_amp/train.py (default: nano, on a GPU llama-124m)")
    add("--data", default="stdlib", help="as in 04_amp/train.py")
    add("--seq-len", type=cli.positive_int, help="default: 256, on a GPU 1024")
    add("--global-batch-size", type=cli.positive_int, help="sequences per step (default: 8, on a GPU 32)")
    add("--steps", type=cli.positive_int, default=30, help=f"of each run, at least {2 * LOG_EVERY}")
    add("--dtype", choices=tuple(LOSS_TOLERANCE), help="default: fp32, on a GPU bf16")
    add("--ranks", type=cli.positive_int, help="default: 2, on GPUs as many as there are")
    add("--rounds", type=cli.positive_int, help="default: 5, on a GPU 3")
    add("--minutes", type=cli.positive, default=120.0, help="all of it ends within this time")
    cli.add_device_and_json(parser)
    args = parser.parse_args()
    deadline = time.monotonic() + args.minutes * 60
    end_children_at_sigterm()
    args.device = choose_device(args.device)
    for name, value in DEFAULTS[args.device].items():
        setattr(args, name, getattr(args, name) or value)
    if args.steps < 2 * LOG_EVERY:
        raise exits.UserError(f"--steps {args.steps} leaves too little to time: at least {2 * LOG_EVERY}")
    args.ranks = args.ranks or available_ranks(args.device)
    if args.ranks < 2 and any(way.ranks == "all" for way in CASES[args.case]):
        raise exits.UserError(f"--ranks {args.ranks}: --case {args.case} needs several: use --ranks 2 --device cpu")
    paths = {name: Path(getattr(args, name)) for name in ("model", "data")}
    for name, path in paths.items():
        setattr(args, name, str(path.resolve()) if path.exists() else getattr(args, name))
    shapes.read_config(args.model)

    facts_ = about("benchmarks/training.py", args.device, "transformers", "accelerate", "deepspeed")
    print(facts(facts_), flush=True)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        model = with_own_head(args.model, Path(folder)) if args.case == "layouts" else args.model
        comparison = Comparison(args.case, sides_of(args.case, args, model), "tokens_per_second", "mfu")
        title = (
            f"Training, {args.case}: {Path(args.model).name}, {args.global_batch_size} x {args.seq_len} tokens a step"
        )
        how = {"title": title, "kind": f"training-{args.case}", "check": partial(check, args.case, dtype=args.dtype)}
        return run_comparison(comparison, args, deadline, facts_=facts_, **how)


def available_ranks(device: str) -> int:
    if device == "cpu":
        return min(2, len(os.sched_getaffinity(0)))
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    exits.run(main)
