"""What one GPU reaches here, in four parts of less than nine minutes, each useful alone. benchmarks/gpu.sh starts them.

    python benchmarks/gpu_report.py smoke           nano in bf16 on every CUDA path, all side by side: does it run?
    python benchmarks/gpu_report.py training        llama-124m beside transformers' Trainer; llama-1b, plain and FSDP
    python benchmarks/gpu_report.py decode          llama-8b beside `generate`, llama-70b in int4
    python benchmarks/gpu_report.py decode-int8     llama-70b in int8; in bf16, too, where 131 GiB fit
    python benchmarks/gpu_report.py training --model nano    the same commands, small

Each command is a process of its own, the most telling first. A comparison gets a share of the time and runs as many
rounds as fit. What has no time left is named, and so are packages that are missing. Results are written anew after each
command, to $OUT or benchmarks/results/; started again, a part goes on with what is not there yet.

Look for: MFU beside the 45 % that we aim at, the verdicts, the share of the bandwidth. A rate above what the hardware
can do is a fault of the timing, and exit code 1, as is a command that fails.
"""

import json
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from _measure import (
    CORES,
    LEAST_SECONDS,
    RESULTS,
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
    bytes_needed: float = 0.0  # of GPU memory


NANO = "--model nano --dtype bf16 --device cuda"
TRAINED = ("04_amp/train.py", "05_ddp/train.py", "06_fsdp_zero/train_fsdp.py", "08_model_parallel/train_3d.py")
SMOKE = [
    *(f"{script} {NANO} --steps 20{compiled}" for script in TRAINED for compiled in ("", " --compile")),
    f"06_fsdp_zero/train_fsdp.py {NANO} --steps 20 --checkpointing selective --compile",
    f"06_fsdp_zero/train_fsdp.py {NANO} --steps 20 --cpu-offload",
    *(f"09_inference/infer_70b.py {NANO}{compiled}" for compiled in ("", " --compile")),
    *(f"09_inference/quantized.py --model nano --device cuda{compiled}" for compiled in ("", " --compile")),
    "07_memory_tricks/cuda_graphs.py --dtype bf16 --device cuda",
    "09_inference/kv_cache.py --device cuda",
]
LLAMA_124M = "--model llama-124m --seq-len 1024 --global-batch-size 32"
LLAMA_1B = "--model llama-1b --seq-len 2048 --global-batch-size 4"
DECODE = "benchmarks/inference.py --device cuda --max-new-tokens 200 --model"
TRAINER = ("transformers", "accelerate")
PARTS = {
    "smoke": [Part(command) for command in SMOKE],
    "training": [
        Part("01_devices/benchmark.py --device cuda"),
        Part(f"benchmarks/training.py --case trainer {LLAMA_124M} --steps 50 --rounds 5 --device cuda", 0.45, TRAINER),
        Part(f"benchmarks/training.py --case fsdp {LLAMA_1B} --steps 30 --rounds 5 --device cuda", 0.4),
        Part(f"04_amp/compare.py {LLAMA_124M.replace('global-', '')} --steps 18 --device cuda"),
        Part("07_memory_tricks/gradient_checkpointing.py --model llama-1b --seq-len 2048 --batch-size 1 --dtype bf16"),
    ],
    "decode": [
        Part(f"{DECODE} llama-8b --sides generate-compiled,ours-compiled,ours", 0.55, ("transformers",)),
        Part(f"{DECODE} llama-70b --sides int4 --rounds 3", 0.43),
    ],
    "decode-int8": [
        Part(f"{DECODE} llama-70b --sides int8 --rounds 3", 0.55),
        Part(f"{DECODE} llama-70b --sides ours-compiled --rounds 3", 0.43, (), 141.2e9),
    ],
}


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
    print(f"{row['command']}: {row['failed'] or row['not_run'] or 'done'}", flush=True)
    return row


def earlier_rows(name: str, commit: str | None) -> list[dict]:
    """The commands of this part that have been done at this commit, in the newest results."""
    for file in sorted(RESULTS.glob(f"*gpu-{name}-20*.json"), key=lambda file: file.stat().st_mtime, reverse=True):
        content = json.loads(file.read_text())
        if content["about"]["commit"] == commit:
            return [row for row in content["commands"] if row["summary"]]
    return []


def save(name: str, facts_: dict, rows: list[dict]) -> Path:
    """Write the report as far as it has come, under the GPU's name once a command has given it."""
    names = [row["summary"]["device"] for row in rows if row["summary"]]
    facts_["device"] = next(filter(None, names), "gpu")
    parts = [f"# {name.capitalize()}, measured on {facts_['device']}", facts(facts_)]
    for row in rows:
        outcome = row["failed"] or row["not_run"] or "done"
        parts.append(f"## `{row['command']}`\n\n{outcome}\n\n```\n{(row['output'] or '').rstrip()}\n```")
    return write_results(facts_["device"], f"gpu-{name}", {"about": facts_, "commands": rows}, "\n\n".join(parts))


def main() -> int:
    parser = cli.Parser(__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--minutes", type=cli.positive, default=8.5, help="all of it ends within this time")
    parser.add_argument("--model", help="instead of each of the models above: nano for a trial")
    args = parser.parse_args()
    seconds = args.minutes * 60
    deadline = time.monotonic() + seconds
    end_children_at_sigterm()
    choose_device("cuda")  # this process stays off the GPU: its memory is the commands' own
    facts_ = about("benchmarks/gpu_report.py", "cuda")
    print(facts(facts_), flush=True)
    rows = earlier_rows(args.part, facts_["commit"])
    env = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    parts = [
        part._replace(command=re.sub(r"llama-\w+", args.model or r"\g<0>", part.command)) for part in PARTS[args.part]
    ]
    parts = [part for part in parts if f"python {part.command}" not in [row["command"] for row in rows]]

    def run_one(part: Part) -> None:
        left = deadline - time.monotonic()
        if part.share_of_time:
            left = min(left - 2 * LEAST_SECONDS, part.share_of_time * seconds)
        rows.append(run(part, left, env))
        save(args.part, facts_, rows)

    with ThreadPoolExecutor(max(1, CORES // 2) if args.part == "smoke" else 1) as pool:
        list(pool.map(run_one, parts))
    print(f"\nwritten: {save(args.part, facts_, rows)} and .json")
    broken = [row["command"] for row in rows if row["failed"]]
    for command in broken:
        print(f"FAILED: {command}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    exits.run(main)
