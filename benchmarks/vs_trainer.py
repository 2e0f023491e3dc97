"""04_amp/train.py beside transformers' Trainer: tokens per second of the same training on the same machine.

Both train the same shape from random weights on the same tokens, batch and precision, with as many
threads, each in a process of its own; rounds alternate, so that a machine that slows down slows both.
The clock is wall time over whole steps, everything a step costs included (reading the batch, clipping,
logging every few steps), the first steps left out. The Trainer has the settings a user would give it, but
for TF32, which its torch_compile would switch on: it is off on both sides, so that fp32 means fp32.

    laptop    python benchmarks/vs_trainer.py
    compiled  python benchmarks/vs_trainer.py --compile
    one GPU   python benchmarks/vs_trainer.py --model llama-124m --seq-len 1024 --batch-size 32 --dtypes bf16 --compile

Look for: the ratio, taken round by round, its spread, and the target. Results go to benchmarks/results/.
"""

import argparse
import os
import sys
import tempfile
from datetime import date
from pathlib import Path

from _shared import (
    LOG_EVERY,
    REPO,
    WARMUP_STEPS,
    Failed,
    cpu,
    facts,
    number,
    spread_cells,
    train,
    versions,
    write_results,
)
from _trainer import train_with_trainer

from old import cli, data, exits, runtime
from old.hardware import device_name
from old.report import spread, table

EXCERPT_BYTES = 2_000_000
RATIO_TARGET = 1.05  # ours over theirs, in each precision, eager and compiled


def write_excerpt(file: Path) -> None:
    """The start of the default corpus: with all of it, a run would evaluate for longer than it trains."""
    tokens = data.load_corpus("stdlib", "bytes").train[:EXCERPT_BYTES]
    file.write_bytes(tokens.tobytes().replace(b"\0", b"\n\n"))


def compare(args: argparse.Namespace, dtype: str, env: dict[str, str], text: Path) -> dict:
    """Alternate rounds of both in one precision; the first round of each is thrown away."""
    shape = ["--model", args.model, "--seq-len", str(args.seq_len), "--steps", str(args.steps), "--dtype", dtype]
    shape += ["--device", args.device, "--data", str(text)]
    if args.compile:
        shape.append("--compile")
    ours = [*shape, "--global-batch-size", str(args.batch_size)]
    theirs = [*shape, "--batch-size", str(args.batch_size)]
    our_speeds, their_speeds, ratios = [], [], []
    for round_ in range(args.rounds + 1):
        our_run = train("04_amp/train.py", ours, env, args.timeout)
        their_run = train_with_trainer(theirs, env, args.timeout)
        our_speed, their_speed = our_run["tokens_per_second"], their_run["tokens_per_second"]
        assert our_run["parameters"] == their_run["parameters"], "not the same model"
        name = f"round {round_}" if round_ else "warm-up"
        print(f"{dtype} {name:<8} ours {our_speed:,.0f}, Trainer {their_speed:,.0f} tokens/s", flush=True)
        if round_:
            our_speeds.append(our_speed)
            their_speeds.append(their_speed)
            ratios.append(our_speed / their_speed)  # round by round: neighbours in time had the same machine
    ratio = spread(ratios)
    commands = {
        "ours": f"python 04_amp/train.py {' '.join(ours)} --log-every {LOG_EVERY}",
        "trainer": f"python benchmarks/_trainer.py RESULT.json {' '.join(theirs)}",
    }
    return {
        "dtype": dtype,
        "compile": args.compile,
        "ours": spread(our_speeds),
        "trainer": spread(their_speeds),
        "ratio": ratio,
        "verdict": "met" if ratio["median"] >= RATIO_TARGET else "missed",
        "last_loss": {"ours": our_run["last_loss"], "trainer": their_run["last_loss"]},
        "trainer_optim": their_run["optim"],
        "commands": {side: command.replace(str(text), text.name) for side, command in commands.items()},
        "rounds": {"ours": our_speeds, "trainer": their_speeds},
    }


def write_up(about: dict, comparisons: list[dict]) -> tuple[str, str]:
    """The table with its verdicts, and the whole report, as Markdown."""
    rows = [["dtype", "tokens/s", "n", "median", "min", "max"]]
    verdicts = []
    for comparison in comparisons:
        dtype, ratio = comparison["dtype"], comparison["ratio"]
        rows.append([dtype, "04_amp/train.py", *spread_cells(comparison["ours"])])
        rows.append([dtype, "Trainer", *spread_cells(comparison["trainer"])])
        rows.append([dtype, "ratio", *spread_cells(ratio, ".3f")])
        claim = f"04_amp/train.py reaches at least {RATIO_TARGET:g} of the Trainer's tokens/s in {dtype}"
        verdicts.append(f"- **{comparison['verdict']}**: {claim}: {number(ratio['median'], '.3f')}")
    text = table(rows) + "\n\n" + "\n".join(verdicts)
    commands = [command for comparison in comparisons for command in comparison["commands"].values()]
    how = (
        f"Both train on the first {EXCERPT_BYTES / 1e6:g} MB of the default corpus (excerpt.txt). n runs of each side, "
        "alternating, after one of each that was thrown away. Wall time over the steps after the first "
        f"{WARMUP_STEPS}. TF32 is off on both sides."
    )
    shell = "\n".join(commands)
    title = "# 04_amp/train.py beside transformers' Trainer"
    return text, f"{title}\n\n{facts(about)}\n\n{text}\n\n{how}\n\n```\n{shell}\n```\n"


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--model", default="nano", help="a size that 04_amp/train.py knows")
    add("--seq-len", type=cli.positive_int, default=256)
    add("--batch-size", type=cli.positive_int, default=8, help="sequences per step")
    add("--steps", type=cli.positive_int, default=50, help=f"per run, the first {WARMUP_STEPS} not timed")
    add("--rounds", type=cli.positive_int, default=5, help="timed runs of each side, after one thrown away")
    add("--dtypes", default="fp32,bf16", help="precisions to compare, with commas between")
    add("--threads", type=cli.positive_int, default=cpu()["cores"], help="CPU threads of each side")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--compile", action="store_true", help="torch.compile on both sides")
    add("--timeout", type=cli.positive_int, default=900, help="seconds that one run may take")
    args = parser.parse_args()
    if args.steps < WARMUP_STEPS + LOG_EVERY:
        raise runtime.UserError(f"--steps {args.steps} leaves nothing to time: at least {WARMUP_STEPS + LOG_EVERY}")
    dtypes = args.dtypes.split(",")
    if wrong := [dtype for dtype in dtypes if dtype not in ("fp32", "bf16")]:
        raise runtime.UserError(f"--dtypes {wrong[0]}: fp32, bf16 or both")
    installed = versions("transformers", "accelerate", "numpy")
    if missing := [name for name in ("transformers", "accelerate") if installed[name] is None]:
        raise runtime.UserError(f"the comparison needs {' and '.join(missing)}: pip install {' '.join(missing)}")

    device = runtime.pick_device(args.device)
    args.device = device.type
    env = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false"}
    if device.type == "cuda":  # the Trainer would spread itself over all GPUs it sees
        env["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    name = cpu()["cpu"] if device.type == "cpu" else device_name(device)
    about = {
        "device": name,
        **cpu(),
        "threads": args.threads,
        **installed,
        "date": date.today().isoformat(),
        "command": f"python benchmarks/vs_trainer.py {' '.join(sys.argv[1:])}".strip(),
        "shape": f"{args.model}, {args.batch_size} sequences of {args.seq_len} tokens, {args.steps} steps",
        "torch.compile": "on both sides" if args.compile else "on neither side",
    }
    print(facts(about), flush=True)

    kind = "-vs-trainer"
    if args.compile:
        kind += "-compiled"
    if len(dtypes) == 1:
        kind += f"-{dtypes[0]}"
    comparisons = []
    for dtype in dtypes:
        try:
            with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
                excerpt = Path(folder, "excerpt.txt")
                write_excerpt(excerpt)
                comparisons.append(compare(args, dtype, env, excerpt))
        except Failed as error:
            raise runtime.UserError(f"a run failed: {error}") from None
        text, report = write_up(about, comparisons)
        file = write_results(name, kind, {**about, "comparisons": comparisons}, report)
    print(f"\n{text}\n\nwritten: {file.relative_to(REPO)} and .json")
    return 0


if __name__ == "__main__":
    exits.run(main)
