"""What the benchmarks share: commands in processes of their own, sides that take turns, and results on disk."""

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

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # common/, with nothing installed
from common import report
from common.exits import UserError
from common.table import table

RESULTS = Path(os.environ.get("BENCHMARK_RESULTS") or REPO / "benchmarks/results")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]
PATIENCE_SECONDS = 30  # between SIGTERM and SIGKILL
LEAST_SECONDS = 10  # a command is not started with less time than that
LEAST_ROUNDS = 3  # fewer give no verdict


# A command in a process of its own


class Failed(RuntimeError):
    """A command that ended badly: the reason in one line, and everything that it printed."""

    def __init__(self, reason: str, output: str) -> None:
        super().__init__(reason)
        self.output = output


class OutOfTime(Failed):
    """A command that was ended because its time was over. The command itself may be right."""


def start(command: list[str], timeout: float, env: dict[str, str] | None = None, cwd: Path = REPO) -> str:
    """Run a command to its end; everything that it printed. Failed if it ends badly, OutOfTime if it takes longer."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    process = subprocess.Popen(command, cwd=cwd, env={**os.environ, **(env or {})}, **pipes)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise OutOfTime(f"did not end within {timeout:.0f} s", end(process)) from None
    except BaseException:
        end(process)
        raise
    if process.returncode:
        lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no output"]
        errors = [line for line in lines if re.search(r"error|exception", line, re.IGNORECASE)]
        raise Failed(f"exit code {process.returncode}: {(errors or lines)[-1][:300]}", output)
    return output


def end(process: subprocess.Popen) -> str:
    """End a process and all that it has started; what it printed. SIGTERM first: torchrun then ends its ranks."""
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)  # now: later an orphan has another parent
    process.send_signal(signal.SIGTERM)
    output = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    process.kill()
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    if output is None:
        output, _ = process.communicate()
    return output or ""


def end_children_at_sigterm() -> None:
    """Turn SIGTERM into an exception, so that `start` ends its process before this one ends."""

    def leave(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the ending
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)


# Sides that take turns


class Side(NamedTuple):
    """A command that is compared with others."""

    name: str
    script: str
    flags: list[str]
    ranks: int = 0  # 0: without torchrun
    against: str | None = None  # the side that this one is compared with
    env: dict[str, str] | None = None

    def command(self) -> str:
        """The command as a reader would type it: paths from the repository's folder, temporary files by name."""
        launcher = f"torchrun --standalone --nproc_per_node={self.ranks}" if self.ranks else "python"
        variables = [f"{name}={value}" for name, value in (self.env or {}).items()]
        text = " ".join([*variables, launcher, self.script, *self.flags])
        return re.sub(rf"(?<= ){re.escape(str(REPO))}/|\S*/benchmark-\w+/", "", text)

    def summary(self, timeout: float) -> dict:
        """Run the command: what it writes with --json."""
        launcher = [*TORCHRUN, f"--nproc_per_node={self.ranks}"] if self.ranks else []
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:  # runs/ with its checkpoints is made there
            file = Path(folder, "summary.json")
            command = [sys.executable, *launcher, str(REPO / self.script), *self.flags, "--json", str(file)]
            start(command, timeout, {"TOKENIZERS_PARALLELISM": "false", **(self.env or {})}, Path(folder))
            return json.loads(file.read_text())


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
        """One row for each side: its figures, and its ratio to another side, round by round."""
        return [self._row(side) for side in self.sides]

    def _row(self, side: Side) -> dict:
        runs = self.runs.get(side.name, [])
        shares = [run[self.share_key] for run in runs if run.get(self.share_key)]
        peaks = [run["peak_memory_bytes"] for run in runs if run.get("peak_memory_bytes")]
        row = {
            "side": side.name,
            self.key: spread([run[self.key] for run in runs]),
            self.share_key: spread(shares),
            "peak_memory_bytes": max(peaks, default=None),
            "failed": self.failed.get(side.name),
            "not_run": self.not_run.get(side.name) if not runs else None,
        }
        if side.against:
            pairs = zip(runs, self.runs.get(side.against, []), strict=False)  # neighbours in time
            row["against"] = side.against
            row["ratio"] = spread([own[self.key] / other[self.key] for own, other in pairs])
            row["verdict"] = verdict(row["ratio"])
        return row

    def faults(self) -> list[str]:
        """Runs that failed, and shares above 1, which are a fault of the timing."""
        found = [f"{self.name}, {side}: {reason}" for side, reason in self.failed.items()]
        for row in self.rows():
            highest = row[self.share_key]["max"]
            if highest is not None and highest > 1:
                found.append(f"{self.name}, {row['side']}: BUG of the timing: {self.share_key} {highest:.1%}")
        return found


def spread(values: list[float]) -> dict:
    """Median, lowest and highest, and how many; None where there is no value."""
    if not values:
        return {"n": 0, "median": None, "min": None, "max": None}
    return {"n": len(values), "median": statistics.median(values), "min": min(values), "max": max(values)}


def verdict(ratio: dict) -> str:
    """What the ratios of all rounds show: a range on both sides of 1 shows no difference."""
    if ratio["n"] < LEAST_ROUNDS:
        return f"open: n < {LEAST_ROUNDS}"
    if ratio["min"] > 1:
        return "faster"
    return "slower" if ratio["max"] < 1 else "equal within noise"


def take_turns(comparison: Comparison, rounds: int, deadline: float, save: Callable[[], object]) -> None:
    """Run each side once before any runs twice, until all rounds or the time are over; `save` after every run.

    A side that fails is not run again. One without enough time is named: that is no failure."""
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
                summary = side.summary(left)
            except OutOfTime as error:
                comparison.not_run[side.name] = f"no time left: {error}"
                took[side.name] = left
                outcome = f"{error}\n{error.output[-3000:]}"
            except Failed as error:
                comparison.failed[side.name] = str(error)
                outcome = f"FAILED: {error}\n{error.output[-3000:]}"
            else:
                comparison.runs.setdefault(side.name, []).append(summary)
                took[side.name] = time.monotonic() - began
                outcome = f"{number(summary[comparison.key])} tokens/s ({took[side.name]:.0f} s in all)"
            print(f"{comparison.name:<12} round {round_number} {side.name:<28} {outcome}", flush=True)
            save()


# Results on disk


def number(value: float | None, form: str = ",.0f") -> str:
    return "n/a" if value is None else format(value, form)


def cells(spread: dict, form: str) -> list[str]:
    return [number(spread[key], form) for key in ("median", "min", "max")]


def write_up(comparison: Comparison) -> str:
    """One comparison as Markdown: its table, what failed or was not run, and the commands."""
    key, share_key = comparison.key, comparison.share_key
    heads = ["side", "n", "tokens/s", "lowest", "highest", share_key.replace("_", " "), "peak GiB"]
    lines = [[*heads, "against", "ratio", "lowest", "highest", "verdict"]]
    notes = []
    for row in comparison.rows():
        form = ",.0f" if (row[key]["median"] or 0) >= 1000 else ",.1f"
        memory = row["peak_memory_bytes"]
        line = [row["side"], str(row[key]["n"]), *cells(row[key], form), number(row[share_key]["median"], ".1%")]
        line.append(number(memory and memory / 2**30, ".2f"))
        if "ratio" in row:
            line += [row["against"], *cells(row["ratio"], ".3f"), row["verdict"]]
        else:
            line += [""] * 5
        lines.append(line)
        for word in ("failed", "not_run"):
            if row[word]:
                notes.append(f"- {word.replace('_', ' ')}: {row['side']}: {row[word]}")
    commands = "\n".join(side.command() for side in comparison.sides)
    parts = [f"## {comparison.name}", table(lines), "\n".join(notes), f"```\n{commands}\n```"]
    return "\n\n".join(part for part in parts if part)


def about(script: str, device: str, *packages: str) -> dict:
    """What a figure has to be read with: hardware, versions, commit, command."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {"device": cpu_model() if device == "cpu" else device, "cpu": cpu_model(), "cores": cores}
    if device != "cpu":
        found["driver"] = first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    found["python"] = platform.python_version()
    for package in ("torch", *packages):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    found["commit"] = first_line("git", "describe", "--always", "--dirty", "--exclude=*")
    found["date"] = date.today().isoformat()
    found["command"] = " ".join(["python", script, *sys.argv[1:]])
    return found


def cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.is_file() else None
    return found[1] if found else platform.machine()


def first_line(*command: str) -> str | None:
    """The first line that a command prints; None if it is missing, fails or prints nothing."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True, timeout=60)
        return next(iter(done.stdout.splitlines()), None)
    return None


def facts(pairs: dict) -> str:
    """A list in Markdown, a line for each fact."""
    return "\n".join(f"- {name}: {'n/a' if value is None else value}" for name, value in pairs.items())


def write_results(device: str, kind: str, result: dict, text: str) -> Path:
    """Write results/DEVICE-KIND-DATE.json, and .md beside it, which is returned."""
    slug = re.sub(r"[^a-z0-9]+", "-", f"{device} {kind}".lower()).strip("-")
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = RESULTS / f"{slug}-{date.today().isoformat()}.md"
    file.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    file.write_text(text.rstrip() + "\n")
    return file


def save_comparison(comparison: Comparison, title: str, kind: str, facts_: dict) -> Path:
    """Write what has been measured so far: a kill leaves that."""
    if facts_["device"] == "cuda":
        for runs in comparison.runs.values():
            facts_["device"] = runs[0]["device"]  # its name, without a context of this process on the GPU
    measured = {"rows": comparison.rows(), "runs": comparison.runs}
    result = {"about": facts_, "comparisons": {comparison.name: measured}}
    text = "\n\n".join([f"# {title}", facts(facts_), write_up(comparison)])
    return write_results(facts_["device"], kind, result, text)


def run_comparison(
    comparison: Comparison, args, deadline: float, *, title: str, kind: str, facts_: dict, check: Callable | None = None
) -> int:
    """Measure, write results after each run, `check` what was measured, print it, write --json; the exit code."""

    def save() -> Path:
        return save_comparison(comparison, title, kind, facts_)

    take_turns(comparison, args.rounds, deadline, save)
    written = save()
    if check and comparison.runs:
        check(comparison)
    print(f"\n{write_up(comparison)}\n\nwritten: {written} and .json")
    report.write_json({"device": facts_["device"], "rows": comparison.rows()}, args.json)
    for fault in comparison.faults():
        print(f"FAILED: {fault}", file=sys.stderr)
    return 1 if comparison.faults() else 0


def choose_device(name: str) -> str:
    """--device as cuda or cpu, without touching the GPU, which is the measured processes' own."""
    import torch

    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UserError(f"--device cuda: torch {torch.__version__} sees no GPU: check the driver or use --device cpu")
    if name == "mps":
        raise UserError("--device mps is not measured here: use --device cpu")
    return "cuda" if available and name != "cpu" else "cpu"
