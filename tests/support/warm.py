"""Run a script from a process that has imported torch already: a fork instead of three seconds of imports.

The server (warm_server.py) starts with the first request of a test session and ends with it. What a job is given and
leaves is what a subprocess is given and leaves: folder, environment, stdout and stderr as files, exit code.
"""

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

# Read when a library is loaded, which the server has done already. A job on a GPU starts as its users start it.
READ_AT_IMPORT = (
    "CUDA",
    "LD_",
    "PYTHON",
    "OMP",
    "MKL",
    "OPENBLAS",
    "TORCH",
    "ATEN",
    "DNNL",
    "ONEDNN",
    "GOMP",
    "MPL",
)

_server: tuple[subprocess.Popen, socket.socket] | None = None
_starting = threading.Lock()


def can_take(env: dict[str, str]) -> bool:
    """Whether these additions to the environment still have an effect in a process that has imported everything.

    Not for a GPU: CUDA must be loaded after the last fork, and nobody can promise that of every import.
    """
    read_at_import = [name for name in env if name.startswith(READ_AT_IMPORT)]
    # a Job can be given libraries
    return hasattr(os, "pidfd_open") and read_at_import in ([], ["LD_LIBRARY_PATH"])


def _requests() -> socket.socket:
    global _server
    with _starting:
        if _server is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            argv = [
                sys.executable,
                str(Path(__file__).with_name("warm_server.py")),
                str(theirs.fileno()),
            ]
            env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            env["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported; no job asks the hub
            # stdout and stderr to nobody: the server prints nothing, and its jobs have files
            quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
            process = subprocess.Popen(argv, env=env, pass_fds=[theirs.fileno()], **quiet)
            theirs.close()
            _server = process, ours
            atexit.register(close)
    return _server[1]


def close() -> None:
    """End the server; its jobs have ended before."""
    global _server
    with _starting:
        if _server is not None:
            process, requests = _server
            _server = None
            requests.close()
            process.wait(timeout=30)


class Job:
    """What subprocess.Popen is, for a process that the server has forked."""

    def __init__(
        self,
        argv: list[str],
        folder: Path,
        env: dict[str, str],
        *,
        nproc: int | None = None,
        real_torchrun: bool = False,
        libraries: str | None = None,
    ) -> None:
        """Start `python argv`, or torchrun with nproc: torch's own with real_torchrun, which starts its ranks cold.

        `libraries` is a folder whose shared libraries the job finds before others of their name.
        """
        job = {"argv": argv, "folder": str(folder), "env": env, "nproc": nproc}
        job |= {"real_torchrun": real_torchrun, "libraries": libraries}
        for name in ("stdout", "stderr"):
            (folder / name).write_text(
                "", encoding="utf-8"
            )  # there to be read as soon as this returns
        self.argv = argv
        self.returncode: int | None = None
        self.left: list[str] = []  # what outlived the job by too long
        self._keeper, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        socket.send_fds(_requests(), [json.dumps(job).encode()], [theirs.fileno()])
        theirs.close()
        self.pid: int = self._answer(600)["pid"]

    def _answer(self, timeout: float) -> dict:
        self._keeper.settimeout(timeout)
        try:
            answer = self._keeper.recv(2**20)
        except (TimeoutError, BlockingIOError):
            raise subprocess.TimeoutExpired(self.argv, timeout) from None
        assert answer, "the warm server or a job's keeper died: see stderr"
        return json.loads(answer)

    def wait(self, timeout: float) -> int:
        """The exit code, when all of the job is gone. TimeoutExpired: it runs on."""
        if self.returncode is None:
            ended = self._answer(timeout)
            self.returncode, self.left = ended["code"], ended["left"]
            self._keeper.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill_all(self) -> None:
        """kill -9 for all of the job."""
        if self.poll() is None:
            self._keeper.shutdown(socket.SHUT_WR)
            self.wait(600)


def run(argv: list[str], folder: Path, env: dict[str, str], timeout: float, **how) -> int:
    """The exit code of a Job. TimeoutExpired: all of it has been killed."""
    job = Job(argv, folder, env, **how)
    try:
        code = job.wait(timeout)
    except BaseException:
        job.kill_all()
        raise
    assert not job.left, f"left running: {job.left}"
    return code
