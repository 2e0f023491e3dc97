"""Start the real scripts as their readers do, and look at what they leave behind.

`run` and `train` fork a script from a warm process (see warm.py), which saves its imports: they are for what a script
computes and tells. They draw loss.png with DRAW_LOSS="1" only. `launch` forks the real torchrun from it, which starts its ranks as it always does: for signals and
faults. `start`, and `run` and `train` with warm=False, start everything as a shell would: for launching. A script that
forgot an import may find it in the warm process, so one test of each starts it cold.
"""

import ctypes
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from support import warm as warm_process

ROOT = Path(__file__).resolve().parents[2]
# 350 sequences of 32 bytes; a file of its own: no edit of the code moves a loss
TEXT = ROOT / "tests/data/text.txt"
LIMIT = 600  # seconds, against hangs: a machine that is merely slow or busy keeps within them
CAN_COMPILE = shutil.which("g++") and Path(sysconfig.get_path("include"), "Python.h").exists()
needs_compiler = pytest.mark.skipif(
    not CAN_COMPILE, reason="torch.compile on a CPU needs g++ and Python.h"
)
# a prelude: makes graphs as torch.compile does, and runs them without a compiler
NO_COMPILER = """
import torch
compile_module = torch.nn.Module.compile
def without_compiler(module, **how):
    compile_module(module, **how, backend="aot_eager")
torch.nn.Module.compile = without_compiler
"""
TINY = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}

# sizes that no script was written with: they share no factor that a mistake could hide behind
ODD = {
    "model_type": "llama",
    "vocab_size": 211,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
}

# The training scripts, and on how many processes each is tried (None: without torchrun). The first is the baseline. A
# new chapter joins the tests of equivalence, clipping, resuming and faults by a line here.
TRAINING_SCRIPTS = {
    "04_amp/train.py": [None],
    "05_ddp/train.py": [None, 1, 2, 3],
    "06_fsdp_zero/train_fsdp.py": [None, 1, 2, 3],
    "08_model_parallel/train_3d.py": [None, 1, 2, 3],
}
BASELINE, *_ = TRAINING_SCRIPTS
# those for several processes
SEVERAL = [script for script, processes in TRAINING_SCRIPTS.items() if 2 in processes]


def in_full(*values, **how):
    """Parameters of a test that `make test-all` has and `make test` has not. Without a mesh train_3d.py is
    train_fsdp.py to the bit, as its own tests show: what both would show here is for `make test-long`."""
    seldom = "08_model_parallel/train_3d.py" in values
    return pytest.param(*values, marks=pytest.mark.long if seldom else pytest.mark.full, **how)


def in_long(*values, **how):
    """Return parameters that `make test-long` alone has. They repeat what another one shows."""
    return pytest.param(*values, marks=pytest.mark.long, **how)


# What the scripts share is in common/: `make test` tries it with the first.
each_script = pytest.mark.parametrize("script", [BASELINE, *map(in_long, SEVERAL)])
each_of_several = pytest.mark.parametrize("script", [SEVERAL[0], *map(in_long, SEVERAL[1:])])
# where shards are saved, or ranks differ, otherwise than by the first
each_way_to_shard = pytest.mark.parametrize("script", [SEVERAL[0], *map(in_full, SEVERAL[1:])])


@dataclass
class Result:
    code: int
    out: str
    err: str
    folder: Path
    argv: tuple[str, ...] = ()  # the command

    def __repr__(self) -> str:
        """What pytest shows where an assertion about a run fails: the command, and its last lines."""
        return f"{shlex.join(self.argv)}\nexit code {self.code}\n{self.out[-2000:]}\n{self.err[-4000:]}"

    @property
    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))

    @property
    def records(self) -> list[dict]:
        return [
            json.loads(line)
            for line in (self.folder / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]

    def column(self, key: str) -> list[float]:
        return [record[key] for record in self.records if key in record]


def command(script: str, *flags, nproc: int | None = None) -> list[str]:
    """The command line for a script; nproc starts it under torchrun, on a port that the system picks."""
    launcher = [sys.executable]
    if nproc:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    return [*launcher, str(ROOT / script), *map(str, flags)]


def two_if_it_can(script: str) -> int | None:
    """The number of processes for a test that wants ranks where a script has them."""
    return 2 if script in SEVERAL else None


def clean_env(**extra: str) -> dict[str, str]:
    """The environment without a launcher's variables, one thread per process unless `extra` says otherwise."""
    launcher = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    inherited = {name: value for name, value in os.environ.items() if name not in launcher}
    return {**inherited, "OMP_NUM_THREADS": "1", **extra}


def start(argv: list[str], folder: Path, **env: str) -> subprocess.Popen:
    """Start argv in folder, output to files there, marked so that its descendants can be found."""
    marker = uuid.uuid4().hex
    with (
        open(folder / "stdout", "w", encoding="utf-8") as out,
        open(folder / "stderr", "w", encoding="utf-8") as err,
    ):
        environment = clean_env(**env | {"HARNESS_MARKER": marker})
        process = subprocess.Popen(argv, cwd=folder, env=environment, stdout=out, stderr=err)
    process.marker = marker
    return process


Process = subprocess.Popen | warm_process.Job


def descendants(process: Process) -> list[psutil.Process]:
    """Every live process that inherited the marker of `process`, itself included."""
    found = []
    for candidate in psutil.process_iter():
        try:
            alive = candidate.status() != psutil.STATUS_ZOMBIE
            if alive and candidate.environ().get("HARNESS_MARKER") == process.marker:
                found.append(candidate)
        except psutil.Error:
            continue
    return found


def kill_all(process: Process) -> None:
    """kill -9 for the whole job, as when its node loses power."""
    if isinstance(process, warm_process.Job):
        return process.kill_all()
    while victims := descendants(process):
        for victim in victims:
            victim.kill()
        psutil.wait_procs(victims, timeout=10)
    process.wait(timeout=LIMIT)


def result_in(folder: Path, code: int, argv: list) -> Result:
    return Result(
        code,
        (folder / "stdout").read_text(encoding="utf-8"),
        (folder / "stderr").read_text(encoding="utf-8"),
        folder,
        (*map(str, argv),),
    )


def finish(process: Process, folder: Path, timeout: float = LIMIT) -> Result:
    """Wait for the end; nothing of the job may outlive it."""
    try:
        code = process.wait(timeout=timeout)
        _, left = psutil.wait_procs(descendants(process), timeout=60)
        left = getattr(process, "left", []) or [p.cmdline() for p in left]
        assert not left, f"left running: {left}"
    finally:
        kill_all(process)
    argv = process.argv if isinstance(process, warm_process.Job) else process.args
    return result_in(folder, code, argv)


def run(
    script: str,
    folder: Path,
    *flags,
    nproc: int | None = None,
    timeout: float = LIMIT,
    warm: bool = True,
    **env: str,
) -> Result:
    """Run a script to its end in `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (warm and warm_process.can_take(env)):
        return finish(start(command(script, *flags, nproc=nproc), folder, **env), folder, timeout)
    argv, libraries = [str(ROOT / script), *map(str, flags)], env.get("LD_LIBRARY_PATH")
    code = warm_process.run(
        argv, folder, clean_env(**env), timeout, nproc=nproc, libraries=libraries
    )
    return result_in(folder, code, command(script, *flags, nproc=nproc))


def with_prelude(script: str, folder: Path, prelude: str) -> Path:
    """A file in folder that runs `prelude` and then becomes `script`, with its arguments. Both can import common."""
    folder.mkdir(parents=True, exist_ok=True)
    path = ROOT / script
    become = f"sys.argv[0] = {str(path)!r}\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    paths = [str(path.parent), str(ROOT)]
    file = folder / "prelude.py"
    file.write_text(
        f"import os, runpy, sys\nsys.path[:1] = {paths!r}\n{prelude}\n{become}", encoding="utf-8"
    )
    return file


def with_fault(script: str, folder: Path, line: str, wrong: str) -> Path:
    """A copy of the script in folder, with `wrong` instead of a line that must stand there once. Its neighbours and
    common/ are the real ones."""
    path = ROOT / script
    source = path.read_text(encoding="utf-8")
    assert source.count(line) == 1
    file = folder / script
    file.parent.mkdir()
    file.write_text(source.replace(line, wrong), encoding="utf-8")
    for neighbour in path.parent.glob("_*.py"):
        if neighbour != path:
            (file.parent / neighbour.name).symlink_to(neighbour)
    for package in ("common", "lm", "planner", "training"):
        (folder / package).symlink_to(ROOT / package)
    return file


def with_small_files(script: str, folder: Path, most_bytes: int) -> Path:
    """The script, where no file may grow larger."""
    limit = (
        f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({most_bytes}, {most_bytes}))"
    )
    return with_prelude(script, folder, limit)


def drop_after(folder: Path, step: int) -> None:
    """The run as a kill after `step` would have left it."""
    for saved_at in (folder / "run").glob("step-*"):
        if int(saved_at.name.removeprefix("step-")) > step:
            shutil.rmtree(saved_at)


def launch(
    script: str | Path,
    folder: Path,
    *flags,
    nproc: int | None = None,
    torchrun: bool = True,
    **env: str,
) -> Process:
    """Start what train() would run to its end, and leave it running. With nproc: under torch's own torchrun, which
    starts its ranks cold, or under the warm process's, which does not."""
    write_tiny(folder)
    flags = [*map(str, (*tiny_flags(folder), *flags))]
    if not warm_process.can_take(env):
        return start(command(script, *flags, nproc=nproc), folder, **env)
    marker = uuid.uuid4().hex
    environment = clean_env(HARNESS_MARKER=marker, **env)
    argv = [str(ROOT / script), *flags]
    process = warm_process.Job(
        argv, folder, environment, nproc=nproc, real_torchrun=torchrun and nproc is not None
    )
    process.marker = marker
    return process


def train(
    script: str,
    folder: Path,
    *flags,
    nproc: int | None = None,
    code: int = 0,
    warm: bool = True,
    **env: str,
) -> Result:
    """A small training run on the CPU, its run in folder/run and its summary in folder/summary.json."""
    write_tiny(folder)
    result = run(script, folder, *tiny_flags(folder), *flags, nproc=nproc, warm=warm, **env)
    assert result.code == code, result
    return result


def error_lines(result: Result) -> list[str]:
    """Return the lines of ranks about an error, without the line that torchrun ends with."""
    lines = [line for line in result.err.splitlines() if "error: " in line]
    return [line for line in lines if "traceback : " not in line]


def assert_refused(result: Result, *words: str) -> None:
    """Exit code 2, and one line for people with these words in it. Of several ranks one speaks."""
    shown = f"exit code {result.code}\n{result.out[-1000:]}\n{result.err[-3000:]}"
    lines = error_lines(result)
    assert len(lines) == 1, f"expected one line that says what is wrong: {shown}"
    missing = [word for word in words if word not in lines[0]]
    assert not missing, f"expected {missing} in the line: {shown}"
    if "exitcode  : " in result.err:
        assert "exitcode  : 2" in result.err, f"expected exit code 2 of a rank: {shown}"
        # torchrun's own traceback ends with ChildFailedError
        of_torchrun = result.err.count("errors.ChildFailedError: ")
        assert result.err.count("Traceback") == of_torchrun, f"expected no traceback: {shown}"
    else:
        assert (result.code, result.err.count("\n")) == (2, 1), (
            f"expected exit code 2 and nothing else: {shown}"
        )


def checkpoints(folder: Path) -> list[str]:
    """The names of the checkpoints that a run has left, and of what it has left of them."""
    return sorted(path.name for path in (folder / "run").glob("step-*"))


def content(folder: Path) -> dict[str, bytes]:
    """The files of a run's folder, without its lock."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock.lease"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def config_of(shape: dict):
    """The shapes.Config that the scripts make of a config.json with this content."""
    # not above: mutations.py takes a name from here and has no common/ to import
    from lm import shapes

    return shapes.parse_config(shape, "shape")


def write_tiny(folder: Path) -> None:
    """The config of the model that tiny_flags names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.json").write_text(json.dumps(TINY), encoding="utf-8")


def tiny_flags(folder: Path) -> list:
    shared = ["--model", "tiny.json", "--device", "cpu", "--dtype", "fp32", "--seq-len", 32]
    shared += ["--data", TEXT]  # to list the default corpus takes 0.1 s a process
    shared += ["--global-batch-size", 12, "--steps", 20]
    return [
        *shared,
        "--warmup-steps",
        4,
        "--log-every",
        1,
        "--run-dir",
        folder / "run",
        "--json",
        "summary.json",
    ]


def steps_logged(folder: Path) -> int:
    """How many lines metrics.jsonl has by now."""
    file = folder / "run/metrics.jsonl"
    return file.read_text(encoding="utf-8").count("\n") if file.exists() else 0


def rank_process(process: Process, rank: int) -> psutil.Process:
    """The worker with that rank among the processes of a job."""
    workers = [p for p in descendants(process) if p.environ().get("RANK") == str(rank)]
    return min(workers, key=lambda p: p.create_time())


def signal_another_thread(process: subprocess.Popen, number: int) -> None:
    """Send a signal to a thread that is not the main one, as the system may: Python acts on it in the main one only."""
    threads = [thread.id for thread in psutil.Process(process.pid).threads()]
    another = min(set(threads) - {process.pid})
    assert ctypes.CDLL(None).tgkill(process.pid, another, number) == 0


def damage(path: Path, how: str, files: str = "*.distcp") -> None:
    """Spoil a checkpoint: the largest of these files is `truncated`, has `one bit` changed or is `missing`."""
    file = max(path.glob(files), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    if how == "truncated":
        del data[len(data) // 2 :]
    elif how == "one bit":
        data[len(data) // 2] ^= 1
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(data)


def holds(process: Process, condition, timeout: float = LIMIT) -> bool:
    """Wait until condition() is true; False if the process has ended before that."""
    deadline = time.monotonic() + timeout
    while not condition():
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.002)  # between two looks; the condition decides, not the time
    return True
