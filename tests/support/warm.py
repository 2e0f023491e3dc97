"""Run a script from a process that has imported torch already: a fork instead of three seconds of imports.

The server (warm_server.py) starts with the first request of a test session and ends with it. What a job is given and
leaves is what a subprocess is given and leaves: folder, environment, stdout and stderr as files, exit code.
"""

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

# Read when a library is loaded, which the server has done already. A job on a GPU starts as its users start it.
READ_AT_IMPORT = ("CUDA", "LD_P", "PYTHON", "OMP", "MKL", "OPENBLAS", "TORCH", "ATEN", "DNNL", "ONEDNN", "GOMP", "MPL")

_server: tuple[subprocess.Popen, socket.socket] | None = None
_starting = threading.Lock()


def can_take(env: dict[str, str]) -> bool:
    """Whether these additions to the environment still have an effect in a process that has imported everything.

    Not for a GPU: CUDA must be loaded after the last fork, and nobody can promise that of every import.
    """
    return hasattr(os, "pidfd_open") and not any(name.startswith(READ_AT_IMPORT) for name in env)


def _requests() -> socket.socket:
    global _server
    with _starting:
        if _server is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            argv = [sys.executable, str(Path(__file__).with_name("warm_server.py")), str(theirs.fileno())]
            env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
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


def run(
    argv: list[str],
    folder: Path,
    env: dict[str, str],
    nproc: int | None,
    timeout: float,
    libraries: str | None = None,
) -> int:
    """The exit code of `python argv`, or of torchrun with nproc. TimeoutExpired: all of the job has been killed.

    `libraries` is a folder whose shared libraries the job finds before others of their name.
    """
    job = {"argv": argv, "folder": str(folder), "env": env, "nproc": nproc, "libraries": libraries}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        socket.send_fds(_requests(), [json.dumps(job).encode()], [theirs.fileno()])
        theirs.close()
        ours.settimeout(timeout)
        try:
            answer = ours.recv(2**20)
        except TimeoutError:
            ours.shutdown(socket.SHUT_WR)  # the keeper kills the job, and answers when all of it is gone
            ours.settimeout(60)
            ours.recv(2**20)
            raise subprocess.TimeoutExpired(argv, timeout) from None
        except BaseException:
            ours.shutdown(socket.SHUT_WR)
            raise
    assert answer, "the warm server or a job's keeper died: see stderr"
    ended = json.loads(answer)
    assert not ended["left"], f"left running: {ended['left']}"
    return ended["code"]
