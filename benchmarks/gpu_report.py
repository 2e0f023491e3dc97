"""What one GPU reaches here, in four parts of less than nine minutes, each useful alone. benchmarks/gpu.sh starts them.

    python benchmarks/gpu_report.py smoke           nano in bf16 on every CUDA path, all side by side: does it run?
    python benchmarks/gpu_report.py training        llama-124m beside transformers' Trainer; llama-1b, plain and FSDP
    python benchmarks/gpu_report.py decode          int4 kernels; llama-8b and `generate`; llama-70b
    python benchmarks/gpu_report.py decode-int8     llama-70b in int8; in bf16, too, where 131 GiB fit
    python benchmarks/gpu_report.py training --model nano    the same commands, small

Each command is a process of its own, the most telling first. A comparison gets a share of the time and runs as many
rounds as fit. What has no time left is named (exit code 75). Results are written anew after each command, to $OUT or
benchmarks/results/. Started again, a part goes on with the rest.

Look for: MFU beside the 45 % that we aim at, the verdicts, the share of the bandwidth. A rate above what the hardware
can do is a fault of the timing, and exit code 1, as is a command that fails.
"""

import json
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import _measure
import psutil
from _measure import LEAST_SECONDS, RESULTS, Failed, OutOfTime, Side, facts

from common import cli, exits


class Part(NamedTuple):
    command: str
    # of a comparison: its part of the time that is left for it and for those after it
    weight: float = 0.0
    memory_gib: float = 0.0  # of the GPU


NO_TIME = "no time left"  # how _measure.py begins, too
NANO = "--model nano --dtype bf16 --device cuda"
TRAINED = (
    "04_amp/train.py",
    "05_ddp/train.py",
    "06_fsdp_zero/train_fsdp.py",
    "08_model_parallel/train_3d.py",
)
SMOKE = [
    *(
        f"{script} {NANO} --steps 20{compiled}"
        for script in TRAINED
        for compiled in ("", " --compile")
    ),
    f"06_fsdp_zero/train_fsdp.py {NANO} --steps 20 --checkpointing selective --compile",
    f"06_fsdp_zero/train_fsdp.py {NANO} --steps 20 --cpu-offload",
    *(f"09_inference/infer_70b.py {NANO}{compiled}" for compiled in ("", " --compile")),
    *(
        f"09_inference/quantized.py --model nano --device cuda{compiled}"
        for compiled in ("", " --compile")
    ),
    "07_memory_tricks/cuda_graphs.py --dtype bf16 --device cuda",
    "09_inference/kv_cache.py --device cuda",
]
TRAINING = "benchmarks/training.py --device cuda --case"
LLAMA_124M = "--model llama-124m --seq-len 1024 --global-batch-size 32"
LLAMA_1B = "--model llama-1b --seq-len 2048 --global-batch-size 4"
DECODE = "benchmarks/inference.py --device cuda --max-new-tokens 200 --model"
PARTS = {
    "smoke": [Part(command) for command in SMOKE],
    "training": [
        Part("01_devices/benchmark.py --device cuda"),
        Part(f"{TRAINING} trainer-compiled {LLAMA_124M} --steps 50", 0.45),
        Part(f"{TRAINING} fsdp {LLAMA_1B} --steps 30", 0.55),
        Part(f"{TRAINING} trainer {LLAMA_124M} --steps 50", 0.01),  # what is left
        Part(f"04_amp/compare.py {LLAMA_124M.replace('global-', '')} --steps 18 --device cuda"),
        Part(
            "07_memory_tricks/gradient_checkpointing.py --model llama-1b --seq-len 2048 --batch-size 1 --dtype bf16"
        ),
    ],
    "decode": [
        Part("benchmarks/ab.py --case int4 --model llama-70b --device cuda"),
        Part(f"{DECODE} llama-8b --sides ours-compiled,ours,generate-compiled --rounds 3", 0.45),
        Part(f"{DECODE} llama-70b --sides int4,int4-triton --rounds 3", 0.55),
    ],
    "decode-int8": [
        Part(f"{DECODE} llama-70b --sides int8,int8-triton --rounds 3", 0.55),
        Part(f"{DECODE} llama-70b --sides ours-compiled --rounds 3", 0.45, 139),
    ],
}


def run(part: Part, seconds: float, env: dict[str, str], memory_gib: float | None) -> dict:
    """Run a command for at most so long: what it printed, its --json, and why it failed or was not run."""
    row = {
        "command": f"python {part.command}",
        "output": None,
        "summary": None,
        "failed": None,
        "not_run": None,
    }
    if memory_gib and memory_gib < part.memory_gib:
        return row | {"not_run": f"needs {part.memory_gib} GiB of GPU memory"}
    if seconds < LEAST_SECONDS:
        return row | {"not_run": NO_TIME}
    script, _, flags = part.command.partition(" ")
    if part.weight:  # it ends its own commands and itself, a little later
        flags += f" --minutes {seconds / 60:.2f}"
        seconds += LEAST_SECONDS
    try:
        row["summary"], row["output"] = Side("", script, flags, env=env).run(seconds)
    except Failed as error:
        reason, row["output"] = error.args
        row["not_run" if isinstance(error, OutOfTime) else "failed"] = reason
    return row


def had_no_time(row: dict) -> bool:
    """Whether a command, or a side of a comparison, has still to be run."""
    sides = (row["summary"] or {}).get("rows", ())
    return any((each.get("not_run") or "").startswith(NO_TIME) for each in (row, *sides))


def earlier_rows(name: str, commit: str | None) -> list[dict]:
    """The commands of this part that have been done at this commit, in the newest results."""
    for file in sorted(
        RESULTS.glob(f"*gpu-{name}-20*.json"), key=lambda file: file.stat().st_mtime, reverse=True
    ):
        content = json.loads(file.read_text())
        if content["about"]["commit"] == commit:
            return [row for row in content["commands"] if row["summary"] and not had_no_time(row)]
    return []


def save(name: str, facts_: dict, rows: list[dict]) -> Path:
    """Write the report as far as it has come."""
    parts = [f"# {name.capitalize()}, measured on {facts_['device']}", facts(facts_)]
    for row in rows:
        outcome = row["failed"] or row["not_run"] or "done"
        parts.append(
            f"## `{row['command']}`\n\n{outcome}\n\n```\n{(row['output'] or '').rstrip()}\n```"
        )
    return _measure.write_results(
        facts_["device"], f"gpu-{name}", {"about": facts_, "commands": rows}, "\n\n".join(parts)
    )


def main() -> int:
    parser = cli.Parser(__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument(
        "--minutes", type=cli.positive, default=8.5, help="all of it ends within this time"
    )
    parser.add_argument("--model", help="instead of each of the models above: nano for a trial")
    args = parser.parse_args()
    deadline = time.monotonic() + args.minutes * 60
    # this process stays off the GPU: its memory is the commands' own
    _measure.choose_device("cuda")
    facts_ = _measure.about("benchmarks/gpu_report.py", "cuda")
    print(facts(facts_), flush=True)
    env = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    rows = earlier_rows(args.part, facts_["commit"])
    parts = PARTS[args.part]
    if args.model:
        renamed = [re.sub(r"llama-\w+", args.model, part.command) for part in parts]
        # nano's limit
        fitting = [text.replace("--seq-len 2048", "--seq-len 1024") for text in renamed]
        parts = [part._replace(command=text) for part, text in zip(parts, fitting, strict=True)]
    parts = [
        part for part in parts if f"python {part.command}" not in [row["command"] for row in rows]
    ]
    stopped = threading.Event()

    def stop(*_) -> None:
        stopped.set()
        for child in psutil.Process().children():
            child.terminate()

    def run_one(part: Part) -> dict:
        left = 0.0 if stopped.is_set() else deadline - time.monotonic()
        if part.weight:
            left = (
                (left - 2 * LEAST_SECONDS)
                * part.weight
                / sum(each.weight for each in parts[parts.index(part) :])
            )
        row = run(part, left, env, facts_["gpu_memory_gib"])
        return (
            row | {"failed": None, "not_run": f"{NO_TIME}: SIGTERM"}
            if stopped.is_set() and row["failed"]
            else row
        )

    signal.signal(signal.SIGTERM, stop)
    with ThreadPoolExecutor(max(1, _measure.CORES // 2) if args.part == "smoke" else 1) as pool:
        for done in as_completed([pool.submit(run_one, part) for part in parts]):
            rows.append(row := done.result())
            print(f"{row['command']}: {row['failed'] or row['not_run'] or 'done'}", flush=True)
            save(args.part, facts_, rows)
    print(f"\nwritten: {save(args.part, facts_, rows)} and .json")
    if any(row["failed"] for row in rows):
        return 1
    return exits.REQUEUE_EXIT_CODE if any(map(had_no_time, rows)) else 0


if __name__ == "__main__":
    exits.run(main)
