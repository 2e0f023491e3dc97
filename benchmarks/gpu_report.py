"""What one GPU reaches here: its measured ceilings, and how much of them training gets.

    make gpu                                                       the GPU tests, then this
    python benchmarks/gpu_report.py --minutes 10                   more rounds
    python benchmarks/gpu_report.py --part chapters --minutes 6    only what the chapters measure

First the ceilings: a large bf16 matrix product and a copy in the GPU's memory, against the data sheet's
peaks. Then llama-124m, 04_amp/train.py and transformers' Trainer in turns, bf16 with torch.compile, bf16
and fp32 without, and 05_ddp/train.py, each in a process of its own: tokens/s over all wall time of the steps
after warm-up, and model FLOP/s utilization (MFU). Every kind runs once before any runs twice. Then, if there
is time, the scripts of chapters 01, 02, 04 and 07 that measure something, and decode of llama-8b (inference_gpu.py,
which measures a 70B in a call of its own), with what they print.

The results in benchmarks/results/ are written anew after every finished part: what a kill leaves is what
was measured. A speed above what the hardware can do is a bug of the timing, and is called so: the report
then ends with exit code 1, as it does if a run of ours fails. No GPU: exit code 2.

Look for: the verdicts at the end; "missed" is a result too.
"""

import json
import os
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
from _gpu_report_text import SEQ_LEN, TITLES, Report, summarize, write_up
from _shared import (
    LOG_EVERY,
    REPO,
    TORCHRUN,
    WARMUP_STEPS,
    Failed,
    OutOfTime,
    cpu,
    end_children_at_sigterm,
    facts,
    number,
    start,
    train,
    versions,
    write_results,
)
from _trainer import train_with_trainer

from old import cli, exits, runtime

STEPS = WARMUP_STEPS + 8 * LOG_EVERY
FP32_STEPS = WARMUP_STEPS + 2 * LOG_EVERY  # without tensor cores a step takes ten times as long
# what a run is thought to take before one has been seen: start-up, compilation, steps, evaluation
FIRST_GUESS_SECONDS = {
    "ours": 75,
    "trainer": 75,
    "eager": 30,
    "trainer_eager": 30,
    "ddp": 75,
    "fp32": 45,
    "trainer_fp32": 45,
}
LARGE = ["--device", "cuda", "--model", "llama-124m", "--seq-len", "1024", "--batch-size", "16", "--steps", "18"]
TOKENS_OF_A_1B = ["--tokens", "16384", "--hidden-size", "2048", "--chunk-tokens", "512", "--dtype", "bf16"]
ONE_SEQUENCE_OF_A_1B = ["--model", "llama-1b", "--seq-len", "4096", "--batch-size", "1", "--dtype", "bf16"]
DECODE = "benchmarks/inference_gpu.py"  # ends by itself, within the --minutes that it is given
DECODE_SECONDS = 240  # of which it gets less if there is less
START_SECONDS = 20  # of a script that imports torch, before it looks at its time
# What the chapters measure for themselves, the most telling first: each runs if there is time left for it.
CHAPTERS = [
    ["01_devices/benchmark.py", "--device", "cuda"],
    # nano would leave the GPU waiting for launches
    ["04_amp/compare.py", *LARGE],
    [DECODE, "--only", "llama-8b"],
    ["07_memory_tricks/chunked_loss.py", *TOKENS_OF_A_1B],
    ["07_memory_tricks/gradient_checkpointing.py", *ONE_SEQUENCE_OF_A_1B],
    # the flags that estimate.py --model llama-1b --gpus 1 --seq-len 2048 --micro-batch-size 4 --search prints
    ["04_amp/train.py", "--model", "llama-1b", "--micro-batch-size", "4", "--steps", "10"],
    ["07_memory_tricks/cuda_graphs.py", "--dtype", "bf16"],
    ["07_memory_tricks/offload.py", "--model", "llama-124m", "--seq-len", "1024", "--dtype", "bf16"],
    ["02_tensors_precision/precision.py", "--device", "cuda"],
    ["02_tensors_precision/quantize.py", "--device", "cuda"],
    ["02_tensors_precision/qat.py", "--device", "cuda"],
    ["02_tensors_precision/tensors.py", "--device", "cuda"],
    ["01_devices/show.py"],
    ["01_devices/doctor.py"],
]
MAY_FIND_FAULTS = "01_devices/doctor.py"  # ends with 1 where this machine has a fault: a finding, not a failure


def save(report: Report) -> tuple[Path, str, dict]:
    """Write the report as far as it has come; the file, its text and its figures."""
    figures = summarize(report)
    text = write_up(report, figures)
    result = {
        "about": report.about,
        **figures,
        "not_run": report.not_run,
        "chapters": report.chapters,
        "raw": {**report.ceilings, "runs": report.runs},
    }
    return write_results(report.about["gpu"], "", result, text), text, figures


def measure_ceilings(report: Report, env: dict[str, str], timeout: float) -> None:
    """In a process of its own; what fails is noted, and training is measured all the same."""
    with tempfile.TemporaryDirectory(prefix="gpu-report-") as folder:
        file = Path(folder, "ceilings.json")
        try:
            print(start([sys.executable, "benchmarks/_gpu_report_ceilings.py", str(file)], env, timeout), end="")
            measured = json.loads(file.read_text())
        except Failed as error:
            report.not_run.append(f"ceilings: FAILED: {error}")
            print(f"ceilings: FAILED: {error}\n{error.output[-3000:]}", flush=True)
            return
    report.about |= measured.pop("about")
    report.ceilings = measured


def flags_of(kind: str, batch_size: int) -> list[str]:
    """The flags of a kind of run; all train the same shape on the same batch."""
    dtype = "fp32" if kind.endswith("fp32") else "bf16"
    flags = ["--device", "cuda", "--model", "llama-124m", "--dtype", dtype, "--seq-len", str(SEQ_LEN)]
    flags += ["--steps", str(FP32_STEPS if dtype == "fp32" else STEPS)]
    if kind.startswith("trainer"):
        flags += ["--batch-size", str(batch_size)]
    else:
        flags += ["--global-batch-size", str(batch_size), "--micro-batch-size", str(batch_size)]
    if kind in ("ours", "trainer", "ddp"):
        flags.append("--compile")
    return flags


def command_of(kind: str, flags: list[str]) -> str:
    """The command as a reader would type it."""
    text = " ".join(flags)
    if kind.startswith("trainer"):
        return f"python benchmarks/_trainer.py RESULT.json {text}"
    script = "torchrun --standalone --nproc_per_node=1 05_ddp/train.py" if kind == "ddp" else "python 04_amp/train.py"
    return f"{script} {text} --log-every {LOG_EVERY}"


def run_one(kind: str, flags: list[str], env: dict[str, str], timeout: float) -> dict:
    if kind.startswith("trainer"):
        return train_with_trainer(flags, env, timeout)
    if kind == "ddp":
        return train("05_ddp/train.py", flags, env, timeout, [*TORCHRUN, "--nproc_per_node=1"])
    return train("04_amp/train.py", flags, env, timeout)


def run_if_time(report: Report, kind: str, env: dict[str, str], deadline: float, takes: dict[str, float]) -> bool:
    """One run of that kind; False if there is no time for it or it fails. `takes` learns how long it took."""
    first = not report.runs[kind]
    left = deadline - time.monotonic()
    if kind in report.failed:
        return False
    # the first run of a kind is tried with less time than it is thought to need: it may be faster than thought
    if left < takes[kind] * (0.5 if first else 1):
        if first:
            report.not_run.append(f"{TITLES[kind]}: no time left")
            print(report.not_run[-1], flush=True)
        return False
    began = time.monotonic()
    try:
        run = run_one(kind, flags_of(kind, report.batch_size), env, left)
    except OutOfTime as error:  # a wrong guess, no failure
        report.not_run.append(f"{TITLES[kind]}: no time left: {error}")
        print(f"{report.not_run[-1]}\n{error.output[-3000:]}", flush=True)
        save(report)
        return False
    except Failed as error:
        report.failed[kind] = str(error)
        print(f"{TITLES[kind]}: FAILED: {error}\n{error.output[-3000:]}", flush=True)
    else:
        report.runs[kind].append(run)
        seconds = time.monotonic() - began
        takes[kind] = seconds * (0.7 if first else 1)  # the second run loads what the first compiled
        report.about["gpu"] = run.get("device", report.about["gpu"])
        speed = number(run["tokens_per_second"])
        print(f"{TITLES[kind]:<56} {speed:>9} tokens/s  ({seconds:.0f} s in all)", flush=True)
    save(report)
    return kind not in report.failed


def measure_training(report: Report, env: dict[str, str], deadline: float, part: str) -> None:
    """Every kind of run once, then ours and the Trainer's again, then the chapters, then more rounds."""
    kinds = list(TITLES)
    if missing := [name for name in ("transformers", "accelerate") if report.about[name] is None]:
        report.not_run.append(f"transformers' Trainer: {' and '.join(missing)} not installed")
        print(f"skipped: {report.not_run[-1]}", flush=True)
        kinds = [kind for kind in kinds if not kind.startswith("trainer")]
    for kind in kinds:
        report.runs[kind] = []
        report.commands[kind] = command_of(kind, flags_of(kind, report.batch_size))
    takes = dict(FIRST_GUESS_SECONDS)
    for kind in kinds:
        run_if_time(report, kind, env, deadline, takes)
    # two runs of each before the chapters, for they show how far two runs differ
    sides = [kind for kind in ("ours", "trainer") if report.runs.get(kind)]
    for kind in sides:
        run_if_time(report, kind, env, deadline, takes)
    if part == "all":
        run_chapters(report, env, deadline)
    more = bool(sides)
    while more:
        more = all(run_if_time(report, kind, env, deadline, takes) for kind in sides)


def run_chapters(report: Report, env: dict[str, str], deadline: float) -> None:
    """Each chapter script in turn: its command, what it printed, its --json, or why it did not run."""
    for command in CHAPTERS:
        left = deadline - time.monotonic()
        if command[0] == DECODE:
            seconds = max(1, min(DECODE_SECONDS, left - START_SECONDS))
            command = [*command, "--minutes", f"{seconds / 60:.2f}"]
        text = f"python {' '.join(command)}"
        if left < 10:
            report.not_run.append(f"{text}: no time left")
            continue
        chapter = {"command": text, "output": None, "summary": None, "failed": None}
        with tempfile.TemporaryDirectory(prefix="chapter-") as folder:
            file = Path(folder, "summary.json")
            try:
                chapter["output"] = start([sys.executable, *command, "--json", str(file)], env, left)
            except OutOfTime as error:
                chapter["output"] = error.output
                report.not_run.append(f"{text}: no time left: {error}")
            except Failed as error:
                chapter["failed"], chapter["output"] = str(error), error.output
            if file.exists():
                chapter["summary"] = json.loads(file.read_text())
        print(f"{text}: {chapter['failed'] or 'done'}", flush=True)
        report.chapters.append(chapter)
        save(report)


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--minutes", type=cli.positive, default=5, help="all of it ends within this time")
    add("--part", choices=("all", "training", "chapters"), default="all")
    add("--batch-size", type=cli.positive_int, help="sequences per step (default: 8, 16 or 32 by the GPU's memory)")
    args = parser.parse_args()
    deadline = time.monotonic() + args.minutes * 60
    end_children_at_sigterm()
    if not torch.cuda.is_available():
        raise runtime.UserError(f"no GPU to measure: torch {torch.__version__} sees none, look at the driver")

    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    env["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # one, for all sides
    # this process stays off the GPU: a name comes from those that measure
    report = Report({"gpu": "GPU", **cpu(), **versions("transformers", "accelerate")})
    report.about["date"] = date.today().isoformat()
    report.about["command"] = f"python benchmarks/gpu_report.py {' '.join(sys.argv[1:])}".strip()
    measure_ceilings(report, env, min(90, deadline - time.monotonic()))
    print(facts(report.about), flush=True)
    save(report)

    gib = report.about.get("memory_bytes", 0) / 2**30
    report.batch_size = args.batch_size or (32 if gib > 70 else 16 if gib > 35 else 8)
    with tempfile.TemporaryDirectory(prefix="gpu-report-") as folder:
        # one cache, new: the first run of each side compiles, the later ones load what it compiled
        env["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
        if args.part == "chapters":
            run_chapters(report, env, deadline)
        else:
            measure_training(report, env, deadline, args.part)

    written, text, figures = save(report)
    print(f"\n{text}\n\nwritten: {written.relative_to(REPO)} and .json")
    bugs = [v["claim"] for v in figures["verdicts"] if v["verdict"] == "BUG"]
    broken = [kind for kind in report.failed if not kind.startswith("trainer")]
    broken += [c["command"] for c in report.chapters if c["failed"] and MAY_FIND_FAULTS not in c["command"]]
    return 1 if bugs or broken else 0


if __name__ == "__main__":
    exits.run(main)
