"""What one GPU reaches here: its rates, how much of them training and decode get, and what the lessons measure.

    make gpu                                                       the GPU tests, then this
    python benchmarks/gpu_report.py --minutes 10                   more rounds

One command after the other, each in a process of its own, the most telling first: the rates of 01_devices/benchmark.py,
llama-124m beside transformers' Trainer (training.py), decode of llama-8b beside `generate` (inference.py), then the
lessons that measure something. A comparison gets a part of the time and runs as many rounds as fit. Left out, and
named: what has no time left, and the peers where transformers or accelerate is missing.

The results in benchmarks/results/ are written anew after every command: what a kill leaves is what was measured. A rate
above what the hardware can do is a fault of the timing, and exit code 1, as is a command that fails. Look for: MFU
beside the 45 % that we aim at, the verdicts, the share of the bandwidth.
"""

import os
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from _measure import (
    LEAST_SECONDS,
    Failed,
    OutOfTime,
    Side,
    about,
    choose_device,
    end_children_at_sigterm,
    facts,
    write_results,
)

from common import cli, exits


class Part(NamedTuple):
    command: str
    share_of_time: float | None = None  # of --minutes, for a benchmark that takes turns: it ends by itself
    needs: tuple[str, ...] = ()  # packages


LLAMA = "--model llama-124m --seq-len 1024"
TRAINER = ("transformers", "accelerate")
LLAMA_8B = "--model llama-8b --max-new-tokens 200 --sides generate-compiled,ours-compiled,generate,ours"
# `make gpu` leaves four minutes to all of it: compiled beside compiled, which decides, comes first
PARTS = [
    Part("01_devices/benchmark.py --device cuda"),
    Part("benchmarks/training.py --case trainer --steps 50 --rounds 9 --device cuda", 0.6, TRAINER),
    Part(f"benchmarks/inference.py {LLAMA_8B} --device cuda", 0.4, ("transformers",)),
    Part("benchmarks/training.py --case compile --steps 50 --device cuda", 0.2),
    Part("benchmarks/training.py --case compile --dtype fp32 --steps 20 --rounds 1 --device cuda", 0.15),
    Part(f"04_amp/compare.py {LLAMA} --batch-size 16 --steps 18 --device cuda"),
    Part("07_memory_tricks/chunked_loss.py --tokens 16384 --hidden-size 2048 --chunk-tokens 512 --dtype bf16"),
    Part("07_memory_tricks/gradient_checkpointing.py --model llama-1b --seq-len 4096 --batch-size 1 --dtype bf16"),
    Part("04_amp/train.py --model llama-1b --micro-batch-size 4 --steps 10"),
    Part("07_memory_tricks/cuda_graphs.py --dtype bf16"),
    Part(f"07_memory_tricks/offload.py {LLAMA} --dtype bf16"),
    Part("02_tensors_precision/precision.py --device cuda"),
    Part("02_tensors_precision/quantize.py --device cuda"),
    Part("02_tensors_precision/qat.py --device cuda"),
    Part("02_tensors_precision/tensors.py --device cuda"),
    Part("01_devices/doctor.py"),
]
MAY_FIND_FAULTS = "01_devices/doctor.py"  # exit code 1 where this machine has a fault: a finding


def run(part: Part, seconds: float, env: dict[str, str]) -> dict:
    """Run a command for at most so long: what it printed, its --json, and why it failed or was not run."""
    row = {"command": f"python {part.command}", "output": None, "summary": None, "failed": None, "not_run": None}
    if missing := [name for name in part.needs if find_spec(name) is None]:
        return {**row, "not_run": f"{' and '.join(missing)} not installed"}
    if seconds < LEAST_SECONDS:
        return {**row, "not_run": "no time left"}
    script, _, flags = part.command.partition(" ")
    if part.share_of_time:  # it ends its own commands and itself, a little later
        flags += f" --minutes {seconds / 60:.2f}"
        seconds += LEAST_SECONDS
    try:
        row["summary"], row["output"] = Side("", script, flags, env=env).run(seconds)
    except Failed as error:
        reason, row["output"] = error.args
        row["not_run" if isinstance(error, OutOfTime) else "failed"] = reason
    return row


def save(facts_: dict, rows: list[dict]) -> Path:
    """Write the report as far as it has come, under the GPU's name once a command has given it."""
    names = [row["summary"]["device"] for row in rows if row["summary"]]
    facts_["device"] = next(filter(None, names), "gpu")
    parts = [f"# Measured on {facts_['device']}", facts(facts_)]
    for row in rows:
        outcome = row["failed"] or row["not_run"] or "done"
        parts.append(f"## `{row['command']}`\n\n{outcome}\n\n```\n{(row['output'] or '').rstrip()}\n```")
    return write_results(facts_["device"], "report", {"about": facts_, "commands": rows}, "\n\n".join(parts))


def main() -> int:
    parser = cli.Parser(__doc__)
    parser.add_argument("--minutes", type=cli.positive, default=5.0, help="all of it ends within this time")
    args = parser.parse_args()
    seconds = args.minutes * 60
    deadline = time.monotonic() + seconds
    end_children_at_sigterm()
    choose_device("cuda")  # this process stays off the GPU: its memory is the commands' own
    facts_ = about("benchmarks/gpu_report.py", "cuda")
    print(facts(facts_), flush=True)
    rows: list[dict] = []
    with tempfile.TemporaryDirectory(prefix="gpu-report-") as folder:
        env = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
        env["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"  # new: the first run compiles, later ones load that
        for part in PARTS:
            left = deadline - time.monotonic()
            if part.share_of_time:
                left = min(left - 2 * LEAST_SECONDS, part.share_of_time * seconds)
            rows.append(run(part, left, env))
            outcome = rows[-1]["failed"] or rows[-1]["not_run"] or "done"
            print(f"{rows[-1]['command']}: {outcome}", flush=True)
            written = save(facts_, rows)
    print(f"\n{written.read_text()}\n\nwritten: {written} and .json")
    broken = [row["command"] for row in rows if row["failed"] and MAY_FIND_FAULTS not in row["command"]]
    for command in broken:
        print(f"FAILED: {command}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    exits.run(main)
