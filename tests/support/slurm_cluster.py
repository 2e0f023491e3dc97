"""A real Slurm of two nodes on this machine: all of it in one folder, and nothing left of it afterwards."""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from support.harness import ROOT, clean_env

PROGRAMS = ["munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo"]
# The nodes are addresses of the loopback interface: names that resolve, as those of a cluster do.
# A requeued job waits until credentials of its first start have expired; 5 s is the least that Slurm takes.
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
FirstJobId={first_job}
JobRequeue=1
KillWait=15
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=127.0.0.1 NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 Gres=gpu:3
NodeName=127.0.0.2 NodeAddr=127.0.0.2 Port={ports[2]} CPUs=4 Gres=gpu:3
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=120
PartitionName=cancel Nodes=ALL PriorityTier=1 GraceTime=1 PreemptMode=CANCEL
PartitionName=high Nodes=ALL PriorityTier=2
"""


@dataclass
class Cluster:
    repository: Path  # a git checkout of the shipped files, in which the jobs write
    env: dict[str, str]

    def command(self, *argv, **env: str) -> str:
        """The output of a Slurm client."""
        words = [str(word) for word in argv]
        result = subprocess.run(
            words,
            cwd=self.repository,
            env=self.env | env,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert result.returncode == 0, f"{words}: {result.stderr}"
        return result.stdout.strip()

    def submit(self, *argv, **env: str) -> str:
        return self.command("sbatch", "--parsable", *argv, **env)

    def show(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job, such as JobState and Restarts."""
        words = self.command("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def finished(self, job: str) -> dict[str, str]:
        """What it knows at the job's end."""
        until(
            lambda: (
                self.show(job)["JobState"]
                in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
            )
        )
        return self.show(job)

    def log(self, job: str) -> str:
        return (self.repository / f"slurm-{job}.out").read_text(encoding="utf-8")


def until(condition: Callable[[], bool], timeout: float = 600) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.1)  # between two looks; the condition decides, not the time


def missing() -> str:
    """Why there can be no cluster here; empty if there can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=path()) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: slurm-wlm and munge)"
    return "" if os.geteuid() == 0 else "Slurm's daemons start as root only"


def path() -> str:
    """Where to look for programs: this Python's own torchrun first, then Debian's places for daemons too."""
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]


def first_job() -> int:
    """A number to count jobs from: their ports follow from it (launch/slurm/) and must be free."""
    for first in range(1, 20000, 20):
        with contextlib.suppress(OSError), ExitStack() as stack:
            for job in range(first, first + 20):
                stack.enter_context(socket.create_server(("", 10000 + job)))
            return first
    raise AssertionError("no 20 free ports in a row")


def belongs(process: psutil.Process, folder: Path) -> bool:
    """Slurm's own processes lose their environment, but all stay in the folder that they are started in."""
    try:
        alive = process.status() != psutil.STATUS_ZOMBIE
        return alive and Path(process.cwd()).is_relative_to(folder)
    except (psutil.Error, OSError):
        return False


@contextmanager
def start(folder: Path) -> Iterator[Cluster]:
    """Bring it up in `folder`; at the end every process in there is killed, jobs and all."""
    folder = folder.resolve()
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    config = CONFIG.format(
        host=socket.gethostname(), ports=free_ports(3), folder=folder, first_job=first_job()
    )
    (folder / "slurm.conf").write_text(config, encoding="utf-8")
    # Slurm counts device files
    (folder / "gres.conf").write_text(
        "Name=gpu File=/dev/null,/dev/zero,/dev/full\n", encoding="utf-8"
    )
    repository = folder / "repository"
    repository.mkdir()
    for name in (
        "01_devices",
        "05_ddp",
        "06_fsdp_zero",
        "08_model_parallel",
        "09_inference",
        "common",
        "lm",
        "planner",
        "training",
        "launch",
    ):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, repository / name, ignore=ignored)
    shutil.copy(ROOT / "requirements.txt", repository)  # doctor.py reads it
    for words in (["init", "--quiet"], ["add", "."]):
        subprocess.run(["git", *words], cwd=repository, check=True, timeout=600)

    env = {
        name: value
        for name, value in clean_env().items()
        if not name.startswith(("SLURM", "SBATCH", "SRUN"))
    }
    env |= {"PATH": path(), "SLURM_CONF": str(folder / "slurm.conf"), "PREFLIGHT": "0"}
    cluster = Cluster(repository, env)
    munge = {
        "socket": "socket",
        "key-file": "key",
        "pid-file": "pid",
        "log-file": "log",
        "seed-file": "seed",
    }
    commands = [
        [
            "munged",
            "--foreground",
            "--force",
            *(f"--{flag}={folder}/munge.{file}" for flag, file in munge.items()),
        ],
        ["slurmctld", "-D"],
        *(["slurmd", "-D", "-N", f"127.0.0.{node}"] for node in (1, 2)),
    ]
    daemons = []

    def state() -> str:
        dead = [daemon.args for daemon in daemons if daemon.poll() is not None]
        assert not dead, (
            f"{dead} ended: {''.join(file.read_text('utf-8') for file in folder.glob('*.out'))}"
        )
        words = ["sinfo", "-h", "-p", "low", "-o", "%T"]
        return subprocess.run(
            words, env=env, capture_output=True, text=True, timeout=600
        ).stdout.strip()

    try:
        for number, command in enumerate(commands):
            with open(folder / f"{number}-{command[0]}.out", "w", encoding="utf-8") as out:
                daemons.append(
                    subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=out)
                )
            if command[0] == "munged":
                until(lambda: (folder / "munge.socket").exists() or daemons[0].poll() is not None)
        until(lambda: state() == "idle")
        yield cluster
    finally:
        while left := [process for process in psutil.process_iter() if belongs(process, folder)]:
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            for daemon in daemons:
                daemon.wait(timeout=600)
