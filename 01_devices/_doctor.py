"""Run commands in processes of their own, and examine a training script, for doctor.py."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import psutil

# The variables that torchrun sets for each rank.
RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# --local-addr: torchrun asks for the address of this machine's name, which may have none.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
# In these srun and mpirun say how many tasks they started. What is started here is none of them.
TASK_COUNTS = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
KNOWN_ERRORS = {  # words of torch's messages, and the fix
    "same device|expected device|meta tensor|device type": (
        "move the model with model.to(device) and each batch with batch = batch.to(device)"
    ),
    "dtype|scalar type": (
        "cast the batch to the model's dtype, or run forward under torch.autocast"
    ),
    "out of memory|(allocate|enough) memory|MemoryError": (
        "smaller micro-batches, activation checkpointing, sharding (06, 07)"
    ),
    "Connection|rendezvous|timed out|Timeout": (
        "a rank is missing: look for the first error among all ranks, not for the last"
    ),
}


class Check(NamedTuple):
    name: str
    result: str  # ok, warn, fail or skip
    seen: str
    fix: str  # one line


def run_command(argv: list, seconds: float, **extra: str) -> tuple[int | None, str]:
    """Run a command, and return its exit code (None if the time was up) and its output.

    When the time is up, the command and its children get SIGABRT. With PYTHONFAULTHANDLER=1 each
    Python process then prints where it is.
    """
    environment = dict(os.environ)
    for name in (*RENDEZVOUS, *TASK_COUNTS):
        environment.pop(name, None)
    environment.update(extra)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        argv = [str(argument) for argument in argv]
        process = subprocess.Popen(argv, env=environment, stdout=output, stderr=output)
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
            _abort(psutil.Process(process.pid))
            process.wait()
        output.seek(0)
        return code, output.read()


def _abort(process: psutil.Process) -> None:
    """Send SIGABRT to a script, or to the ranks of a torchrun. Then kill what is left."""
    descendants = process.children(recursive=True)
    scripts = [process]
    if "torch.distributed.run" in process.cmdline():
        scripts = process.children()
    for script in scripts:
        with contextlib.suppress(psutil.NoSuchProcess):
            script.send_signal(signal.SIGABRT)
    _, alive = psutil.wait_procs(scripts, timeout=5)  # time to print where they are
    for victim in [*alive, *descendants, process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()


def error_of(code: int | None, output: str) -> str:
    """Return the first error in an output, else the exit code."""
    if code is None:
        return "no answer in time"
    return first_error(output) or f"exit code {code}"


def first_error(output: str) -> str:
    """Return the first line that names an error, without the rank that torch puts before it."""
    line = re.search(
        r"^(?:\[rank\d+\]: ?)?([\w.]*(?:Error|Exception)\b.*|.*: error: .*)", output, re.MULTILINE
    )
    return line[1] if line else ""


# --- a training script


def examine_script(script: Path, flags: list[str], nproc: int, seconds: float) -> Check:
    """Run a script to its end. Return its first error and the line, or where each rank hangs."""
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, script, *flags]
        if nproc > 1:
            # each rank's output goes to a file of its own
            logs = [f"--log-dir={folder}", "--redirects=3"]
            argv = [*TORCHRUN, f"--nproc_per_node={nproc}", *logs, script, *flags]
        code, output = run_command(argv, seconds, PYTHONFAULTHANDLER="1")
        outputs = [
            file.read_text(encoding="utf-8") for file in sorted(Path(folder).rglob("stderr.log"))
        ]
    if nproc == 1:
        outputs = [output]

    if code == 0:
        return Check("script", "ok", f"ran to its end on {nproc} ranks", "")
    if code is None:
        places = []
        for rank, text in enumerate(outputs):
            # faulthandler prints the main thread last, and its innermost frame first
            main_thread = text.split("most recent call first")[-1]
            places.append(f"rank {rank} at {_lines_of(main_thread)[0]}")
        fix = "a collective: another rank is missing; a data loader: its dataset; slow: --timeout"
        return Check(
            "script", "fail", f"not at its end after {seconds:g} s: {'; '.join(places)}", fix
        )

    texts = [text for text in outputs if first_error(text)]
    # a rank whose connection broke has failed because of another rank
    texts.sort(key=lambda text: "onnection" in first_error(text))
    text = texts[0] if texts else output
    error = error_of(code, text)
    place = _lines_of(text.partition(error)[0])[-1]  # a traceback has the innermost frame last
    fix = "read the first traceback"
    for words, known_fix in KNOWN_ERRORS.items():
        if re.search(words, error):
            fix = known_fix
            break
    return Check("script", "fail", f"exit code {code}: {error} at {place}", fix)


def _lines_of(trace: str) -> list[str]:
    """Return file:line of the frames outside of torch and Python, or a question mark."""
    lines = []
    for file, number in re.findall(r'File "([^<"]+)", line (\d+)', trace):
        if "/lib/python" not in file:
            lines.append(f"{Path(file).name}:{number}")
    return lines or ["?"]
