"""Run commands in processes of their own, in turns, and write what they measured.

The benchmarks share this: `start` runs a command, a Side is a command that is compared with others,
`take_turns` runs the sides of a Comparison, `about` says what a figure has to be read with.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # so that `import common` works
from common import cli, files, report
from common.exits import UserError
from common.report import table
from lm import shapes

RESULTS = Path(os.environ.get("OUT") or REPO / "benchmarks/results")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]
PATIENCE_SECONDS = 30  # between SIGTERM and SIGKILL
LEAST_SECONDS = 10  # a command is not started with less time than that
LEAST_ROUNDS = 3  # fewer give no verdict
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


class Failed(RuntimeError):
    """A command that ended badly: the reason in one line, and everything that it printed."""


class OutOfTime(Failed):
    """A command that was ended because its time was over. The command itself may be right."""


def start(command: list[str], timeout: float, env: dict[str, str], cwd: Path) -> str:
    """Run a command to its end and return everything that it printed.

    Raise Failed if it ends badly, and OutOfTime if it takes longer than `timeout` seconds.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        where = {"cwd": cwd, "stdout": file, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, env=os.environ | env, **where)
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout)
        finally:
            end(process)
        file.seek(0)
        output = file.read()
    if code is None:
        raise OutOfTime(f"no time left: did not end within {timeout:.0f} s", output)
    if code:
        lines = ["no output", *filter(None, map(str.strip, output.splitlines()))]
        errors = [line for line in lines if re.search(r"error|exception", line, re.IGNORECASE)]
        raise Failed(f"exit code {code}: {(errors or lines)[-1][:300]}", output)
    return output


def end(process: subprocess.Popen) -> None:
    """End a process and all that it has started. SIGTERM first: torchrun then ends its ranks."""
    if process.poll() is not None:
        return
    # now: later an orphan has another parent
    family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE_SECONDS)
    process.kill()
    process.wait()
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()


def end_children_at_sigterm() -> None:
    """Turn SIGTERM into an exception, so that `start` ends its process before this one ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


class Side(NamedTuple):
    """A command that is compared with others."""

    name: str
    script: str
    flags: str = ""
    ranks: int = 0  # 0: without torchrun
    against: str | None = None  # the side that this one is compared with
    env: dict[str, str] | None = None

    def command(self) -> str:
        """Return the command as a reader would type it, from the repository's folder."""
        launcher = (
            f"torchrun --standalone --nproc_per_node={self.ranks}" if self.ranks else "python"
        )
        variables = [f"{name}={value}" for name, value in (self.env or {}).items()]
        return (
            " ".join([*variables, launcher, self.script, self.flags])
            .replace(f"{REPO}/", "")
            .rstrip()
        )

    def run(self, timeout: float) -> tuple[dict, str]:
        """Run the command. Return what it writes with --json, and what it prints."""
        launcher = [*TORCHRUN, f"--nproc_per_node={self.ranks}"] if self.ranks else []
        # runs/ with its checkpoints is made there
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            file = Path(folder, "summary.json")
            command = [
                sys.executable,
                *launcher,
                str(REPO / self.script),
                *self.flags.split(),
                "--json",
                str(file),
            ]
            output = start(
                command,
                timeout,
                {"TOKENIZERS_PARALLELISM": "false", **(self.env or {})},
                Path(folder),
            )
            return json.loads(file.read_text(encoding="utf-8")), output


@dataclass
class Comparison:
    """The sides of one case, and what has been measured of them so far."""

    name: str
    sides: list[Side]
    key: str  # of a summary: the figure that is compared
    share_key: str  # of a summary: the share of what the hardware can do
    runs: dict[str, list[dict]] = field(default_factory=dict)  # by side, as are the next two
    failed: dict[str, str] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)

    def rows(self) -> list[dict]:
        """Return a row per side: its figures, and its ratio to another side in each round."""
        rows = []
        for side in self.sides:
            runs = self.runs.get(side.name, [])
            row = {"side": side.name, "failed": self.failed.get(side.name)}
            row["not_run"] = self.not_run.get(side.name) if not runs else None
            row[self.key] = spread([run[self.key] for run in runs])
            row[self.share_key] = spread(
                [run[self.share_key] for run in runs if run.get(self.share_key)]
            )
            row["peak_memory_bytes"] = max(
                (run.get("peak_memory_bytes") or 0 for run in runs), default=None
            )
            if side.against:
                # neighbours in time
                pairs = zip(runs, self.runs.get(side.against, []), strict=False)
                row["against"] = side.against
                row["ratio"] = spread([own[self.key] / other[self.key] for own, other in pairs])
                row["verdict"] = verdict(row["ratio"])
            rows.append(row)
        return rows

    def faults(self) -> list[str]:
        """Return the runs that failed, and shares above 1, which are a fault of the timing."""
        found = [f"{self.name}, {side}: {reason}" for side, reason in self.failed.items()]
        for row in self.rows():
            if (highest := row[self.share_key]["max"] or 0) > 1:
                found.append(
                    f"{self.name}, {row['side']}: BUG of the timing: {self.share_key} {highest:.1%}"
                )
        return found


def spread(values: list[float]) -> dict:
    """Return median, lowest, highest and how many; None where there is no value."""
    if not values:
        return {"n": 0, "median": None, "min": None, "max": None}
    return {
        "n": len(values),
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
    }


def verdict(ratio: dict) -> str:
    """Return what the ratios of all rounds show. A range on both sides of 1 is no difference."""
    if ratio["n"] < LEAST_ROUNDS:
        return f"open: n < {LEAST_ROUNDS}"
    if ratio["min"] > 1:
        return "faster"
    return "slower" if ratio["max"] < 1 else "equal within noise"


def take_turns(
    comparison: Comparison, rounds: int, deadline: float, save: Callable[[], object]
) -> None:
    """Run each side once before any runs twice, until all rounds or the time are over.

    `save` is called after every run. A side that fails is not run again. A side without enough time
    is named, and that is no failure.
    """
    took: dict[str, float] = {}
    for round_number in range(1, rounds + 1):
        for side in comparison.sides:
            left = deadline - time.monotonic()
            if side.name in comparison.failed:
                continue
            if left < took.get(side.name, LEAST_SECONDS):
                comparison.not_run[side.name] = f"no time left: {max(left, 0):.0f} s"
                continue
            began = time.monotonic()
            try:
                summary, _ = side.run(left)
                comparison.runs.setdefault(side.name, []).append(summary)
                outcome = f"{summary[comparison.key]:,.1f} tokens/s"
            except Failed as error:
                reason, output = error.args
                ended = comparison.not_run if isinstance(error, OutOfTime) else comparison.failed
                ended[side.name] = reason
                outcome = f"{reason}\n{output[-3000:]}"
            took[side.name] = time.monotonic() - began
            print(
                f"{comparison.name:<12} round {round_number} {side.name:<28} {outcome}", flush=True
            )
            save()


def cell(key: str, value: object) -> str:
    """Format a figure. One of several rounds is shown as 1.31x (1.25x to 1.39x), n = 3."""
    if isinstance(value, dict):
        median, low, high = (
            report.for_people(key, value[which]) for which in ("median", "min", "max")
        )
        return f"{median} ({low} to {high}), n = {value['n']}" if value["n"] else "n/a"
    return "" if value is None else report.for_people(key, value)


def write_up(comparison: Comparison) -> str:
    """Return a comparison as Markdown: its table, what failed or was not run, the commands."""
    keys = [
        "side",
        comparison.key,
        comparison.share_key,
        "peak_memory_bytes",
        "against",
        "ratio",
        "verdict",
    ]
    keys += ["failed", "not_run"]
    lines = [[key.replace("_", " ") for key in keys]]
    for row in comparison.rows():
        lines.append([cell(key, row.get(key)) for key in keys])
    commands = "\n".join(side.command() for side in comparison.sides)
    return f"## {comparison.name}\n\n{table(lines)}\n\n```\n{commands}\n```"


def about(script: str, device: str) -> dict:
    """Return what a figure has to be read with: hardware, versions, commit, command."""
    cpu = first_line("sed", "-n", "s/^model name[^:]*: //p", "/proc/cpuinfo") or platform.machine()
    found = {"device": cpu, "cpu": cpu, "cores": CORES}
    if device != "cpu":  # nvidia-smi: torch would make a context on the GPU, which takes memory
        found |= about_gpus()
    found["python"] = platform.python_version()
    for package in ("torch", "triton", "transformers", "accelerate", "deepspeed"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    found["commit"] = first_line("git", "describe", "--always", "--dirty", "--exclude=*")
    found["date"] = date.today().isoformat()
    found["command"] = " ".join(["python", script, *sys.argv[1:]])
    return found


def about_gpus() -> dict:
    """Return what the driver and torch say about the GPUs, asked in a process of its own.

    Its context on the GPU is gone before anything is measured.
    """
    code = "from benchmarks import _about; _about.print_facts()"
    answer = first_line(sys.executable, "-c", code)
    return json.loads(answer) if answer else {"device": "cuda", "gpu_memory_gib": None}


def first_line(*command: str) -> str | None:
    """Return the first line that a command prints; None if it is missing or prints nothing."""
    with contextlib.suppress(OSError):
        return (
            subprocess.run(command, cwd=REPO, capture_output=True, text=True).stdout.partition(
                "\n"
            )[0]
            or None
        )
    return None


def facts(pairs: dict) -> str:
    """Return a list in Markdown, a line for each fact."""
    return "\n".join(
        f"- {name}: {'n/a' if value is None else value}" for name, value in pairs.items()
    )


def write_results(device: str, kind: str, result: dict, text: str) -> Path:
    """Write results/DEVICE-KIND-DATE.json, and .md beside it, which is returned."""
    slug = re.sub(r"[^a-z0-9]+", "-", f"{device} {kind}".lower()).strip("-")
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = RESULTS / f"{slug}-{date.today().isoformat()}.md"
    texts = {".json": json.dumps(result, indent=1), ".md": text.rstrip()}
    for suffix, content in texts.items():
        with files.complete_file(file.with_suffix(suffix)) as stream:
            stream.write(content + "\n")
    return file


def parser(doc: str) -> cli.Parser:
    flags = cli.Parser(doc)
    flags.add_argument(
        "--rounds", type=cli.positive_int, default=5, help="how often each side runs"
    )
    flags.add_argument(
        "--minutes", type=cli.positive, default=120.0, help="all of it ends within this time"
    )
    cli.add_device_and_json(flags)
    return flags


def start_comparison(
    flags: cli.Parser, defaults: dict[str, dict] | None = None
) -> argparse.Namespace:
    """Parse the flags, and fill in the device's defaults for those that are not given.

    `deadline` is the time when all must be over.
    """
    args = flags.parse_args()
    args.deadline = time.monotonic() + args.minutes * 60
    end_children_at_sigterm()
    args.device = choose_device(args.device)
    for name, value in (defaults or {}).get(args.device, {}).items():
        setattr(args, name, getattr(args, name) or value)
    shapes.read_config(args.model)
    shapes.has_weights(args.model)  # raises UserError for weights that cannot be read
    if Path(args.model).exists():
        args.model = str(Path(args.model).resolve())
    return args


def run_comparison(comparison: Comparison, args, title: str, check: Callable | None = None) -> int:
    """Measure, write results after each run, check and print them, and return the exit code."""
    facts_ = about(os.path.relpath(sys.argv[0], REPO), args.device)
    print(facts(facts_), flush=True)

    def save() -> Path:  # what has been measured so far: a kill leaves that
        measured = {"rows": comparison.rows(), "runs": comparison.runs}
        result = {"about": facts_, "comparisons": {comparison.name: measured}}
        text = f"# {title}\n\n{facts(facts_)}\n\n{write_up(comparison)}"
        return write_results(facts_["device"], comparison.name, result, text)

    take_turns(comparison, args.rounds, args.deadline, save)
    written = save()
    if check and comparison.runs:
        check(comparison)
    print(f"\n{write_up(comparison)}\n\nwritten: {written} and .json")
    report.write_json({"device": facts_["device"], "rows": comparison.rows()}, args.json)
    for fault in comparison.faults():
        print(f"FAILED: {fault}", file=sys.stderr)
    return 1 if comparison.faults() else 0


def choose_device(name: str) -> str:
    """Return --device as cuda or cpu.

    The GPU is not touched: its memory is the measured processes' own.
    """
    available = torch.cuda.is_available()
    if name == "mps" or (name == "cuda" and not available):
        raise UserError(
            f"--device {name}: no CUDA device that torch {torch.__version__} sees: use --device cpu"
        )
    return "cuda" if available and name != "cpu" else "cpu"
