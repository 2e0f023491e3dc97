"""Run the parts of gpu.py: commands with limits, several at a time or alone, results on disk."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import _measure
import psutil
from _measure import LEAST_SECONDS, REPO, RESULTS, TORCHRUN, Failed, OutOfTime, facts

from common import exits, files, report
from common.report import table

ALL = -1  # ranks: as many as there are GPUs
MOST_RANKS = 8
NO_TIME = "no time left"  # how _measure.OutOfTime begins, too
# A command is not started with less than this part of the seconds that are planned for it, and is
# ended after so many times as many.
LEAST_SHARE = 0.5
MOST_SHARE = 3
# Relative, of the first and of the last loss, to those of the command that it is compared with.
LOSS_TOLERANCES = {"fp32": (1e-5, 1e-4), "bf16": (5e-3, 5e-2)}
FIGURES = (
    "tokens_per_second",
    "mfu",
    "decode_tokens_per_second",
    "bandwidth_share",
    "peak_memory_bytes",
    "first_loss",
    "last_loss",
)
CACHES = Path(tempfile.gettempdir(), "kernel-caches")
SMALL = {
    "--model": "nano",
    "--steps": "2",
    "--seq-len": "32",
    "--global-batch-size": "8",
    "--max-new-tokens": "4",
    "--log-every": "1",
}


class Command(NamedTuple):
    """A script with its flags, or "-m pytest" and its arguments, and what is planned for it."""

    name: str
    command: str
    seconds: float
    ranks: int = 0  # 0: without torchrun
    memory_gib: float = 0.0  # of the GPU
    against: str | None = None  # the command whose losses must be equal

    def argv(self, ranks: int) -> list[str]:
        """Return the command line after `python`."""
        words = shlex.split(self.command)
        if ranks:
            return [*TORCHRUN, f"--nproc_per_node={ranks}", str(REPO / words[0]), *words[1:]]
        if words[0] == "-m":
            return words
        return [str(REPO / words[0]), *words[1:]]

    def is_test(self) -> bool:
        """Return whether this is pytest, which writes no --json."""
        return self.command.startswith("-m pytest")

    def small(self) -> "Command":
        """Return the command at the size of nano, not compiled."""
        if self.is_test():
            return self
        words = shlex.split(self.command)
        for place, word in enumerate(words[:-1]):
            if word in SMALL:
                words[place + 1] = SMALL[word]
        if "--compile" in words:
            words.remove("--compile")
        return self._replace(command=shlex.join(words), memory_gib=0.0)


class Part(NamedTuple):
    """Commands that run side by side, then commands that run alone, within so many seconds."""

    seconds: float
    alone: list[Command]
    together: list[Command] = []  # noqa: RUF012 (nobody changes it)
    least_gpus: int = 1

    def select(self, words: str) -> "Part":
        """Return the part with the commands that have these words in their name."""
        alone = [command for command in self.alone if words in command.name]
        together = [command for command in self.together if words in command.name]
        if not alone and not together:
            raise exits.UserError(f"--only {words!r}: no command of this part has it in its name")
        return self._replace(alone=alone, together=together)

    def small(self) -> "Part":
        """Return the part with every command at the size of nano."""
        alone = [command.small() for command in self.alone]
        together = [command.small() for command in self.together]
        return self._replace(alone=alone, together=together)


class Machine:
    """The GPUs, and the environment in which commands run. SIGTERM sets `stopped`."""

    def __init__(self, at_once: int) -> None:
        self.stopped = threading.Event()
        self.facts = _measure.about("benchmarks/gpu.py", "cuda")
        self.gpus = 1  # that are used: a power of two, so that every layout divides them
        while 2 * self.gpus <= min(self.facts.get("gpus", 1), MOST_RANKS):
            self.gpus *= 2
        cores = max(1, _measure.CORES // 2)  # each command needs two
        self.at_once = min(at_once, cores)
        self.environment = {
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TORCHINDUCTOR_CACHE_DIR": str(CACHES / "inductor"),
            "TRITON_CACHE_DIR": str(CACHES / "triton"),
        }
        signal.signal(signal.SIGTERM, self.stop)

    def stop(self, *_) -> None:
        """End the commands that run, and start no other."""
        self.stopped.set()
        for child in psutil.Process().children():
            child.terminate()


@dataclass
class Run:
    """A part while it runs: rows of results by the name of their command."""

    name: str
    machine: Machine
    deadline: float
    rows: dict[str, dict] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, command: Command) -> None:
        """Run a command, compare it with another one, print its outcome and save all results."""
        began = time.monotonic()
        left = self.deadline - began
        row = {"name": command.name, "command": self.typed(command), "seconds_planned": None}
        row |= {"summary": None, "output": None, "failed": None, "not_run": None}
        row["seconds_planned"] = command.seconds
        memory_gib = self.machine.facts.get("gpu_memory_gib")
        if self.machine.stopped.is_set():
            row["not_run"] = f"{NO_TIME}: SIGTERM"
        elif memory_gib and memory_gib < command.memory_gib:
            row["not_run"] = f"needs {command.memory_gib} GiB of GPU memory"
        elif left < max(LEAST_SECONDS, LEAST_SHARE * command.seconds):
            row["not_run"] = f"{NO_TIME}: {left:.0f} s of {command.seconds:.0f}"
        else:
            self.start(command, row, min(left, MOST_SHARE * command.seconds + LEAST_SECONDS))
        row["seconds"] = time.monotonic() - began
        with self.lock:
            self.compare(command, row)
            self.rows[command.name] = row
            print(f"{command.name:22} {row['seconds']:5.0f} s  {outcome(row)}", flush=True)
            self.save()

    def typed(self, command: Command) -> str:
        """Return the command as a reader would type it."""
        ranks = self.ranks_of(command)
        if ranks:
            return f"torchrun --standalone --nproc_per_node={ranks} {command.command}"
        return f"python {command.command}"

    def ranks_of(self, command: Command) -> int:
        """Return how many ranks torchrun starts, 0 without torchrun."""
        return self.machine.gpus if command.ranks == ALL else command.ranks

    def start(self, command: Command, row: dict, seconds: float) -> None:
        """Run a command to its end, and fill in its row."""
        with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
            summary = Path(folder, "summary.json")
            argv = [sys.executable, *command.argv(self.ranks_of(command))]
            environment = dict(self.machine.environment)
            where = Path(folder)
            if command.is_test():
                where = REPO
            else:
                argv += ["--json", str(summary)]
            if command.ranks in (0, 1) and not command.is_test():
                visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
                environment["CUDA_VISIBLE_DEVICES"] = visible[0]
            try:
                row["output"] = _measure.start(argv, seconds, environment, where)
            except Failed as error:
                reason, row["output"] = error.args
                key = "not_run" if isinstance(error, OutOfTime) else "failed"
                row[key] = reason
                if self.machine.stopped.is_set():
                    row |= {"failed": None, "not_run": f"{NO_TIME}: SIGTERM"}
                elif key == "not_run" and time.monotonic() < self.deadline - 1:
                    # it is the command that takes too long, not the part
                    row |= {"failed": f"did not end within {seconds:.0f} s", "not_run": None}
            if summary.exists():
                row["summary"] = json.loads(summary.read_text(encoding="utf-8"))

    def compare(self, command: Command, row: dict) -> None:
        """Add the ratio of speeds, and set `failed` if the losses are not equal."""
        other = self.rows.get(command.against) or {}
        own_summary = row["summary"]
        other_summary = other.get("summary")
        if not own_summary or not other_summary:
            return
        row["against"] = command.against
        row["ratio"] = own_summary["tokens_per_second"] / other_summary["tokens_per_second"]
        tolerances = LOSS_TOLERANCES[own_summary["dtype"]]
        for key, tolerance in zip(("first_loss", "last_loss"), tolerances, strict=True):
            expected = other_summary[key]
            difference = abs(own_summary[key] - expected)
            row[f"{key}_difference"] = difference
            # not ">", which is also false for NaN
            if not difference <= tolerance * abs(expected) and not row["failed"]:
                row["failed"] = f"{key} is {own_summary[key]}, not {command.against}'s {expected}"

    def save(self) -> Path:
        """Write the results so far, as .md and .json."""
        facts_ = self.machine.facts
        rows = list(self.rows.values())
        blocks = [f"# Part {self.name}, measured on {facts_['device']}", facts(facts_)]
        blocks.append(results_table(rows))
        for row in rows:
            output = (row["output"] or "").rstrip()
            blocks.append(f"## {row['name']}\n\n`{row['command']}`\n\n```\n{output}\n```")
        result = {"about": facts_, "commands": rows}
        kind = f"gpu-{self.name}"
        return _measure.write_results(facts_["device"], kind, result, "\n\n".join(blocks))


def outcome(row: dict) -> str:
    """Return what became of a command, in one line with its figures."""
    if row["failed"]:
        return f"FAILED: {row['failed']}"
    if row["not_run"]:
        return row["not_run"]
    figures = [f"{key} {report.for_people(key, value)}" for key, value in figures_of(row).items()]
    return ", ".join(["done", *figures])


def figures_of(row: dict) -> dict:
    """Return the figures of a command that are known."""
    summary = row["summary"] or {}
    rows = [other for other in summary.get("rows") or [] if isinstance(other, dict)]
    figures = {}
    for key in FIGURES:
        value = summary.get(key)
        if value is None and len(rows) == 1:  # quantized.py has a row per kind of weights
            value = rows[0].get(key)
        if isinstance(value, int | float):
            figures[key] = value
    if row.get("ratio"):
        figures[f"ratio_to {row['against']}, ratio"] = row["ratio"]
    return figures


def results_table(rows: list[dict]) -> str:
    """Return the commands, their seconds and their outcome as a Markdown table."""
    lines = [["command", "seconds", "planned", "outcome"]]
    for row in rows:
        seconds = f"{row['seconds']:.0f}"
        lines.append([row["name"], seconds, f"{row['seconds_planned']:.0f}", outcome(row)])
    return table(lines)


def is_done(row: dict) -> bool:
    """Return whether a command need not run again."""
    return not row["failed"] and not (row["not_run"] or "").startswith(NO_TIME)


def earlier_rows(name: str, commit: str | None, commands: dict[str, str]) -> dict[str, dict]:
    """Return the rows of these commands, at this commit, in the newest results of the part."""
    files = list(RESULTS.glob(f"*gpu-{name.lower()}-20*.json"))
    files.sort(key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["about"]["commit"] != commit:
            continue
        rows = {}
        for row in content["commands"]:
            if commands.get(row["name"]) == row["command"]:
                rows[row["name"]] = row
        return rows
    return {}


def run_part(name: str, part: Part, machine: Machine, seconds: float) -> int:
    """Run what an earlier run of this part has left, and return the exit code."""
    run = Run(name, machine, time.monotonic() + seconds)
    typed = {command.name: run.typed(command) for command in part.together + part.alone}
    earlier = earlier_rows(name, machine.facts["commit"], typed)
    failed = {other for other, row in earlier.items() if row["failed"]}
    run.rows = {other: row for other, row in earlier.items() if is_done(row)}
    print(f"part {name}, {seconds:.0f} s\n{facts(machine.facts)}", flush=True)
    for row in run.rows.values():
        print(f"{row['name']:22} done before")
    together = [command for command in part.together if command.name not in run.rows]
    alone = [command for command in part.alone if command.name not in run.rows]
    alone.sort(key=lambda command: command.name in failed)  # again, but last

    unpack_caches()
    with watch_power(name):
        if together:
            with ThreadPoolExecutor(machine.at_once) as pool:
                list(pool.map(run.run, together))
            forget_tuning()
        for command in alone:
            run.run(command)
    written = run.save()
    pack_caches()
    print(f"\n{results_table(list(run.rows.values()))}\n\nwritten: {written} and .json")

    rows = run.rows.values()
    if any(row["failed"] for row in rows):
        return exits.FAILURE_EXIT_CODE
    if all(is_done(row) for row in rows):
        return 0
    return exits.REQUEUE_EXIT_CODE


# --- kernels that were compiled


def unpack_caches() -> None:
    """Use the kernels of an earlier run, on this machine or on another one of its kind."""
    archive = RESULTS / "kernel-caches.tar.gz"
    if CACHES.exists():
        return
    if archive.exists():
        with tarfile.open(archive) as tar:
            tar.extractall(CACHES.parent, filter="data")
    CACHES.mkdir(exist_ok=True)
    files.set_mark(CACHES, "benchmarks/gpu.py")


def pack_caches() -> None:
    """Keep the compiled kernels beside the results."""
    if CACHES.exists():
        archive = RESULTS / "kernel-caches.tar.gz"
        with (
            files.complete_file(archive, "wb") as stream,
            tarfile.open(fileobj=stream, mode="w:gz", compresslevel=1) as tar,
        ):
            tar.add(CACHES, CACHES.name)


def forget_tuning() -> None:
    """Forget which launch parameters were fastest while other commands ran beside."""
    files.delete_files(CACHES, "*.best_config")


class watch_power:
    """Write power, clocks and use of the GPUs to a file every two seconds, if nvidia-smi can."""

    def __init__(self, part: str) -> None:
        self.file = RESULTS / f"gpu-{part.lower()}-power-and-clocks.log"
        self.process = None

    def __enter__(self) -> None:
        program = shutil.which("nvidia-smi")
        if program:
            RESULTS.mkdir(parents=True, exist_ok=True)
            with open(self.file, "w", encoding="utf-8") as file:
                argv = [program, "dmon", "-s", "pucm", "-d", "2", "-o", "T"]
                self.process = subprocess.Popen(argv, stdout=file, stderr=subprocess.STDOUT)

    def __exit__(self, *_) -> None:
        if self.process:
            _measure.end(self.process)
