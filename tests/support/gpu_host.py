"""Run a script on a GPU in a process that other scripts have used before it: see gpu_host_process.

Most of a small run on a GPU is starting Python, importing torch and making a context on the GPU.
warm.py saves the imports with a fork, which is not for GPUs. Here scripts run one after another in
the same process, the host. It is ended, and the next script gets a new one,

- if a script leaves tensors on the GPU, because the next one would count them in its peak
- if a script takes longer than its limit
- if the process dies: that job fails, and no other

Not for what is read when a process starts or when a library is first used: TORCH_*, CUBLAS_*. A
script that needs these starts by itself (harness.run with warm=False), and so do several ranks:
process groups of more than one rank cannot be made twice in a process.
"""

import json
import socket
import sys
import tempfile
from pathlib import Path

from support import harness
from support.harness import LIMIT, ROOT, Result, clean_env, kill_all, result_in, start

PROCESS = Path(__file__).with_name("gpu_host_process.py")
# Read once by a library. A script with --deterministic would set it too late in a used process.
CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
OMP_THREADS = "4"
# NCCL keeps a byte for its barrier
LEFT_BYTES = 2**20

_hosts: dict[str, "Host"] = {}  # by CUDA_VISIBLE_DEVICES


class HostEndedError(Exception):
    """The host's process has ended."""


class Host:
    """A process that runs scripts one after another."""

    def __init__(self, visible: str) -> None:
        """Start it on the GPUs with these UUIDs."""
        self.folder = tempfile.TemporaryDirectory(prefix="gpu-host-")
        address = str(Path(self.folder.name, "jobs"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(address)
            listener.listen()
            listener.settimeout(LIMIT)
            argv = [sys.executable, str(PROCESS), address]
            environment = {"CUDA_VISIBLE_DEVICES": visible, "OMP_NUM_THREADS": OMP_THREADS}
            self.process = start(argv, Path(self.folder.name), **CUBLAS, **environment)
            self.connection, _ = listener.accept()
        self.received = b""

    def run(self, job: dict, timeout: float) -> dict:
        """Send a job and return the answer. Raise TimeoutError or HostEndedError."""
        self.connection.settimeout(timeout)
        try:
            self.connection.sendall(json.dumps(job).encode() + b"\n")
            while b"\n" not in self.received:
                part = self.connection.recv(2**16)
                if not part:
                    raise ConnectionError
                self.received += part
        except ConnectionError:
            raise HostEndedError(
                Path(self.folder.name, "stderr").read_text(encoding="utf-8")[-2000:]
            ) from None
        answer, _, self.received = self.received.partition(b"\n")
        return json.loads(answer)

    def close(self) -> None:
        """End the host at once, with all that it has started."""
        self.connection.close()
        kill_all(self.process)
        self.folder.cleanup()


def run(
    script: str | Path,
    folder: Path,
    *flags,
    gpus: dict[str, str],
    nproc: int | None = None,
    timeout: float = LIMIT,
    **env: str,
) -> Result:
    """Run a script to its end in `folder`, on the GPUs of the fixture `gpus`.

    With nproc=1 the script gets the variables of a job's only rank. More ranks are started by
    torchrun, each in a process of its own.
    """
    visible = gpus["CUDA_VISIBLE_DEVICES"]
    if nproc is not None and nproc > 1:
        env |= {"CUDA_VISIBLE_DEVICES": visible, "OMP_NUM_THREADS": OMP_THREADS}
        return harness.run(script, folder, *flags, nproc=nproc, timeout=timeout, warm=False, **env)

    folder.mkdir(parents=True, exist_ok=True)
    for name in ("stdout", "stderr"):
        (folder / name).write_text("", encoding="utf-8")
    argv = [str(ROOT / script), *map(str, flags)]
    job_env = clean_env(**env) | CUBLAS | {"CUDA_VISIBLE_DEVICES": visible}
    if nproc == 1:
        job_env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}

    if visible not in _hosts:
        _hosts[visible] = Host(visible)
    try:
        job = {"argv": argv, "folder": str(folder), "env": job_env}
        answer = _hosts[visible].run(job, timeout)
    except (TimeoutError, HostEndedError) as error:
        _hosts.pop(visible).close()
        with open(folder / "stderr", "a", encoding="utf-8") as file:
            file.write(f"\n{type(error).__name__}: {error}\n")
        return result_in(folder, -1, argv)
    if answer["left_bytes"] > LEFT_BYTES:
        _hosts.pop(visible).close()
    return result_in(folder, answer["code"], argv)


def close() -> None:
    """End all hosts."""
    while _hosts:
        _hosts.popitem()[1].close()
