"""What sharding costs two CPU ranks: 06_fsdp_zero/train_fsdp.py and train_zero.py beside 05_ddp/train.py and Trainer.

All train the same shape on the same text in fp32, with two ranks of one thread each (gloo), in processes of their own.
DDP, FSDP and DeepSpeed's ZeRO-3 run in the scripts of this repository. transformers' Trainer runs FSDP2 and ZeRO-3 too,
with its own weights and order of the batches; its ranks check that each holds its part of every parameter. Rounds
alternate, so that a machine that slows down slows all. Sharding sends half as many bytes again as DDP, and on a CPU the
same cores send and compute.

    python benchmarks/sharding_cpu.py              rounds of all, interleaved
    python benchmarks/sharding_cpu.py --rounds 9   more of them

Look for: the ratios, taken round by round, beside their targets. Results go to benchmarks/results/.
"""

import argparse
import os
import sys
from datetime import date

from _shared import (
    LOG_EVERY,
    REPO,
    TORCHRUN,
    WARMUP_STEPS,
    Failed,
    cpu,
    facts,
    spread_cells,
    train,
    versions,
    write_results,
)
from _trainer import train_with_trainer

from old import cli, exits
from old.report import spread, table

RANKS = 2
TRAINER = "benchmarks/_trainer.py"
SIDES = {
    "DDP": ("05_ddp/train.py", []),
    "FSDP": ("06_fsdp_zero/train_fsdp.py", []),
    "FSDP, kept until backward": ("06_fsdp_zero/train_fsdp.py", ["--reshard-after-forward", "off"]),
    "Trainer, FSDP": (TRAINER, ["--shard", "fsdp"]),
    "ZeRO-3": ("06_fsdp_zero/train_zero.py", ["--stage", "3"]),
    "Trainer, ZeRO-3": (TRAINER, ["--shard", "zero3"]),
}
RATIOS = [  # a side, the one beside it, and the ratio that we aim at
    ("FSDP", "DDP", 0.8),
    ("FSDP, kept until backward", "DDP", 0.8),
    ("ZeRO-3", "DDP", None),
    ("FSDP", "Trainer, FSDP", 1.0),
    ("ZeRO-3", "Trainer, ZeRO-3", 1.0),
]
SAME_LOSS = 0.1  # the Trainer's weights, batches and end of the schedule are not ours: how far its loss may be off


def flags_of(side: str, args: argparse.Namespace) -> list[str]:
    script, own = SIDES[side]
    batch = "--batch-size" if script == TRAINER else "--global-batch-size"
    shape = ["--model", args.model, "--device", "cpu", "--dtype", "fp32", "--seq-len", str(args.seq_len)]
    return [*shape, batch, str(args.batch_size), "--steps", str(args.steps), *own]


def run_one(side: str, args: argparse.Namespace) -> dict:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    flags = flags_of(side, args)
    if SIDES[side][0] == TRAINER:
        return train_with_trainer(flags, environment, args.timeout, RANKS)
    return train(SIDES[side][0], flags, environment, args.timeout, [*TORCHRUN, f"--nproc_per_node={RANKS}"])


def run_rounds(args: argparse.Namespace) -> dict[str, list[dict]]:
    """The runs of each side, round by round; the first round is thrown away."""
    runs = {side: [] for side in SIDES}
    for round_ in range(args.rounds + 1):
        for side in SIDES:
            run = run_one(side, args)
            name = f"round {round_}" if round_ else "warm-up"
            told = f"{run['tokens_per_second']:,.0f} tokens/s, last loss {run['last_loss']:.3f}"
            print(f"{name:<8} {side:<25} {told}", flush=True)
            if round_:
                runs[side].append(run)
    baseline = runs["DDP"][0]
    for side, (run, *_) in runs.items():
        assert run["parameters"] == baseline["parameters"], f"{side}: not the same model"
        off = run["last_loss"] / baseline["last_loss"] - 1
        assert abs(off) < SAME_LOSS, f"{side}: not the same training: {run['last_loss']}, {baseline['last_loss']}"
    return runs


def compare(speeds: dict[str, list[float]]) -> tuple[dict[str, dict], list[str]]:
    """The ratios, and a line in Markdown for each that we aim at."""
    ratios = {}
    claims = []
    for ours, other, target in RATIOS:
        name = f"{ours} / {other}"
        ratios[name] = spread([a / b for a, b in zip(speeds[ours], speeds[other], strict=True)])
        if target is not None:
            median = ratios[name]["median"]
            verdict = "met" if median >= target else "missed"
            claims.append(f"- **{verdict}**: {name}: {median:.3f}; we aimed at {target:g}")
    return ratios, claims


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--rounds", type=cli.positive_int, default=5, help="timed rounds, after one thrown away")
    add("--steps", type=cli.positive_int, default=30, help=f"per run, the first {WARMUP_STEPS} not timed")
    add("--model", default="nano", help="as in 05_ddp/train.py")
    add("--seq-len", type=cli.positive_int, default=256)
    add("--batch-size", type=cli.positive_int, default=8, help="sequences per step, over both ranks")
    add("--timeout", type=cli.positive_int, default=600, help="seconds that one run may take")
    args = parser.parse_args()
    if args.steps < WARMUP_STEPS + LOG_EVERY:
        raise exits.UserError(f"--steps {args.steps} leaves nothing to time: at least {WARMUP_STEPS + LOG_EVERY}")
    if cpu()["cores"] < RANKS:
        raise exits.UserError("two ranks need two cores, and this process may use one")
    installed = versions("deepspeed", "transformers", "accelerate")
    if missing := [name for name, version in installed.items() if version is None]:
        raise exits.UserError(f"the comparison needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    about = {"device": cpu()["cpu"], **cpu(), **installed, "date": date.today().isoformat()}
    about["command"] = f"python benchmarks/sharding_cpu.py {' '.join(sys.argv[1:])}".strip()
    print(facts(about), flush=True)

    try:
        runs = run_rounds(args)
    except Failed as error:
        raise exits.UserError(f"a run failed: {error}") from None
    speeds = {side: [run["tokens_per_second"] for run in of_side] for side, of_side in runs.items()}
    ratios, claims = compare(speeds)
    rows = [["", "n", "median", "min", "max"]]
    for side, values in speeds.items():
        rows.append([f"{side}, tokens/s", *spread_cells(spread(values))])
    for name, ratio in ratios.items():
        rows.append([name, *spread_cells(ratio, ".3f")])
    how = (
        f"{args.model}, fp32, {RANKS} ranks of one thread, {args.batch_size} sequences of {args.seq_len} tokens per "
        f"step, {args.steps} steps, the first {WARMUP_STEPS} not timed."
    )
    commands = []
    for side, (script, _) in SIDES.items():
        more = ["RESULT.json"] if script == TRAINER else ["--log-every", str(LOG_EVERY)]
        words = " ".join([script, *more, *flags_of(side, args)])
        commands.append(f"OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node={RANKS} {words}")
    shell = "\n".join(commands)
    text = f"{how}\n\n{table(rows)}\n\n" + "\n".join(claims)
    report = f"# Sharding on two CPU ranks\n\n{facts(about)}\n\n{text}\n\n```\n{shell}\n```\n"
    result = {
        **about,
        "speeds": speeds,
        "last_losses": {side: of_side[-1]["last_loss"] for side, of_side in runs.items()},
        "ratios": ratios,
        "claims": claims,
        "commands": commands,
    }
    file = write_results(about["device"], "-sharding", result, report)
    print(f"\n{text}\n\nwritten: {file.relative_to(REPO)} and .json")
    return 0


if __name__ == "__main__":
    exits.run(main)
