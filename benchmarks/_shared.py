"""What the benchmarks share: facts about the machine, runs in processes of their own, results on disk."""

import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import psutil
import torch

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # old/, with nothing installed
from old.hardware import cpu_model
from old.report import read_records

RESULTS = REPO / "benchmarks/results"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]
WARMUP_STEPS = 10  # left out of the timing: compilation, first allocations, clocks
LOG_EVERY = 10  # runs log, and are timed, in windows of so many steps
PATIENCE_SECONDS = 30  # for a process to end that was asked to


class Failed(RuntimeError):
    """A command that ended badly: the reason in one line, and everything that it printed."""

    def __init__(self, reason: str, output: str) -> None:
        super().__init__(reason)
        self.output = output


class OutOfTime(Failed):
    """A command that was ended because its time was over: no fault of its own."""


# Facts about the machine


def versions(*packages: str) -> dict[str, str | None]:
    """Installed versions; None for what is not there."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    found["torch"] = torch.__version__
    return found


def cpu() -> dict:
    """The processor and how much of it this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": cpu_model() or platform.machine(), "cores": cores}


def facts(pairs: dict) -> str:
    """A list in Markdown, a line for each fact."""
    return "\n".join(f"- {name}: {'n/a' if value is None else value}" for name, value in pairs.items())


def number(value: float | None, form: str = ",.0f") -> str:
    return "n/a" if value is None else format(value, form)


def spread_cells(spread: dict, form: str = ",.0f") -> list[str]:
    """n, median, min and max as cells of a table."""
    return [str(spread["n"]), *(number(spread[key], form) for key in ("median", "min", "max"))]


# Runs in processes of their own


def start(command: list[str], env: dict[str, str], timeout: float) -> str:
    """Run to the end; everything it printed. Failed if it ends badly, OutOfTime if it takes too long."""
    process = subprocess.Popen(
        command, cwd=REPO, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace"
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise OutOfTime(f"did not end within {timeout:.0f} s", end(process)) from None
    except BaseException:
        end(process)
        raise
    if process.returncode:
        said = [line for line in output.splitlines() if line.strip()]
        wrong = [line for line in said if re.search(r"error|exception", line, re.IGNORECASE)]
        last_words = (wrong or said or ["no output"])[-1].strip()[:300]
        raise Failed(f"exit code {process.returncode}: {last_words}", output)
    return output


def end(process: subprocess.Popen) -> str:
    """End a process that is no longer wanted and what it has started: one that lives on would keep the GPU's memory.

    Asked first, because torchrun then takes its processes along.
    """
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended by itself
        family = psutil.Process(process.pid).children(recursive=True)  # now: an orphan is no one's child
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
    """Make SIGTERM an exception, which `start` ends its process for; else that would live on."""

    def leave(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not cut the ending short
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)


def train(
    script: str, flags: list[str], env: dict[str, str], timeout: float, launcher: list[str] | None = None
) -> dict:
    """Run a training script of this repository: its --json summary, its `windows` and its `tokens_per_second`."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        summary = Path(folder, "summary.json")
        own = ["--run-dir", f"{folder}/run", "--json", str(summary), "--log-every", str(LOG_EVERY)]
        start([sys.executable, *(launcher or []), script, *flags, *own], env, timeout)
        records = [record for record in read_records(Path(folder, "run/metrics.jsonl")) if "loss" in record]
        return {**json.loads(summary.read_text()), **steady(records)}


def steady(records: list[dict]) -> dict:
    """Tokens/s of each logged window after the warm-up, and over all their wall time together."""
    windows = []
    tokens = 0
    seconds = 0.0
    for before, record in pairwise(records):
        if before["step"] >= WARMUP_STEPS:
            window_tokens = record["tokens"] - before["tokens"]
            windows.append(record["tokens_per_second"])
            tokens += window_tokens
            seconds += window_tokens / record["tokens_per_second"]
    return {"windows": windows, "tokens_per_second": tokens / seconds if seconds else None}


def repeat(step: Callable[[], object], times: int) -> None:
    for _ in range(times):
        step()


# Results on disk


def write_results(device: str, kind: str, result: dict, text: str) -> Path:
    """Write results/<device><kind>-<date>.json and .md beside it; returns the .md."""
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    RESULTS.mkdir(parents=True, exist_ok=True)
    name = f"{slug}{kind}-{date.today().isoformat()}"
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(text.rstrip() + "\n")
    return RESULTS / f"{name}.md"
