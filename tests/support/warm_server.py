"""A process that has imported what the scripts import, and forks a job for each request (see warm.py).

A job is three kinds of process, each forked before any of them has started a thread:

    server -> keeper -> the script                     python script.py
    server -> keeper -> agent -> the script, n times   torchrun --nproc_per_node=n script.py

A script that becomes torchrun, because it needs several ranks and has none, becomes the agent here.
The keeper tells the job's process, waits for its end, tells the exit code, and lets nothing of the job outlive it. The
agent does what torchrun's does: it sets the ranks' environment, holds the store where they meet, and ends the others
when one fails. On demand the agent is torch's own, and then its ranks are started anew, as it always does.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What the scripts import at their top, and what they import later in every run.
MODULES = (
    *(
        "torch",
        "torch.distributed.checkpoint",
        "torch.distributed.checkpoint.state_dict",
        "torch.nn.parallel",
    ),
    *("torch.distributed.fsdp", "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"),
    *("torch.distributed.tensor.debug", "torch.distributed.tensor.parallel"),
    "torch.distributed.pipelining",
    *("torch._dynamo", "torch.distributed.elastic.multiprocessing.errors"),
    *("torch.distributed.run", "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend"),
    *("matplotlib.pyplot", "filelock", "numpy", "psutil", "tqdm"),
    "transformers.generation.utils",
    *("transformers.models.auto.tokenization_auto", "transformers.models.llama.modeling_llama"),
)
# The packages of the repository whose modules are imported, too.
PACKAGES = ("common", "training", "lm", "planner")
# what a job's own end may take; what is still there then has been left behind
ENDS_TOGETHER_SECONDS = 10
SAVES_AND_ENDS_SECONDS = 600  # the same for ranks whose torchrun has died
PR_SET_CHILD_SUBREAPER = 36


def serve(requests: socket.socket) -> None:
    """Fork a keeper per request until the client is gone. Returns in each process that is to run a script."""
    keepers = set()
    while True:
        request, files, _, _ = socket.recv_fds(requests, 2**20, 1)
        # those that have ended are waited for, or `time pytest` would not count their jobs
        keepers -= {
            keeper for keeper in keepers if os.waitpid(keeper, 0 if not request else os.WNOHANG)[0]
        }
        if not request:
            os._exit(0)
        keeper = os.fork()
        if keeper == 0:
            requests.close()
            keep(json.loads(request), socket.socket(fileno=files[0]))
            return
        keepers.add(keeper)
        os.close(files[0])


def keep(job: dict, client: socket.socket) -> None:
    """Start the job, wait for its last process, tell the client. The client's going away kills the job."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # whose parent has died comes here
    main_pid = os.fork()
    if main_pid == 0:
        client.close()
        become(job)
        return
    client.send(json.dumps({"pid": main_pid}).encode())
    ended, code, left, deadline = os.pidfd_open(main_pid), None, [], None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break  # nobody is left
        if pid == main_pid:
            seconds = SAVES_AND_ENDS_SECONDS if job["real_torchrun"] else ENDS_TOGETHER_SECONDS
            code, deadline = os.waitstatus_to_exitcode(status), time.monotonic() + seconds
        elif pid == 0:
            if deadline is not None and time.monotonic() > deadline:
                left += kill_descendants()
            # before the main process has ended it or the client wakes us; after that we look for the others
            gone, _, _ = select.select(
                [client] + [ended] * (code is None), [], [], None if code is None else 0.01
            )
            if client in gone:
                kill_descendants()
    with contextlib.suppress(OSError):
        client.send(json.dumps({"code": code, "left": left}).encode())
    os._exit(0)


def kill_descendants() -> list[str]:
    import psutil

    killed = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            killed.append(
                " ".join(process.cmdline()) if process.status() != psutil.STATUS_ZOMBIE else ""
            )
            process.kill()
    return [command for command in killed if command]


def become(job: dict) -> None:
    """Be the process that a shell would have started: folder, environment, output, arguments."""
    os.setsid()
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["env"])
    for library in Path(job["libraries"]).glob("*.so*") if job["libraries"] else ():
        # LD_LIBRARY_PATH is read when a process starts; what is loaded is found by its name
        ctypes.CDLL(str(library))
    for name, number in (("stdout", 1), ("stderr", 2)):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(file, number)
        os.close(file)
    sys.argv = job["argv"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    tempfile.tempdir = None  # TMPDIR may be another
    if job["real_torchrun"]:
        torchrun = importlib.import_module("torch.distributed.run")
        sys.argv = [
            torchrun.__file__,
            "--standalone",
            f"--nproc_per_node={job['nproc']}",
            *job["argv"],
        ]
    elif job["nproc"] is not None:
        start_ranks(job["nproc"])
    else:
        os.execv = become_torchrun


def become_torchrun(python: str, argv: list[str]) -> None:
    """What common.lesson.relaunch means by os.execv, without importing anything again."""
    launcher, count, place, sys.argv = argv[1:3], argv[3], argv[4], argv[5:]
    assert (launcher, place) == (["-m", "torch.distributed.run"], "--standalone"), argv
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not survive the fork"
    start_ranks(int(count.removeprefix("--nproc_per_node=")))
    runpy.run_path(sys.argv[0], run_name="__main__")
    os._exit(0)  # it has returned: a script that is not started through exits.run


def start_ranks(count: int) -> None:
    """torchrun --standalone: returns in each rank; the agent itself exits."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    port = listener.getsockname()[1]
    ranks = set()
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            listener.close()
            for name in ("RANK", "LOCAL_RANK"):
                os.environ[name] = str(rank)
            for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
                os.environ[name] = str(count)
            os.environ.update(GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
            return
        ranks.add(pid)
    from torch.distributed import TCPStore

    # its thread starts after the last fork; the ranks may have connected already
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    failed = False
    signal.signal(signal.SIGALRM, lambda *_: [os.kill(pid, signal.SIGKILL) for pid in ranks])
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        if status and not failed:
            failed = True
            print(
                f"  exitcode  : {os.waitstatus_to_exitcode(status)} (pid: {pid})",
                file=sys.stderr,
                flush=True,
            )
            for other in ranks:
                os.kill(other, signal.SIGTERM)
            signal.alarm(30)  # as torchrun
    del store
    os._exit(1 if failed else 0)


def leave_a_blank_picture(_records: list[dict], file: Path) -> None:
    """Write an empty loss.png. To draw one takes as long as a small run: for DRAW_LOSS=1 alone."""
    file.write_bytes(b"")


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    sys.path.insert(1, str(ROOT))
    import matplotlib
    import numpy
    import torch

    matplotlib.use("Agg")
    own_modules = []
    for package in PACKAGES:
        for file in sorted(ROOT.glob(f"{package}/[a-z]*.py")):
            own_modules.append(f"{package}.{file.stem}")
    for module in (*MODULES, *own_modules):
        importlib.import_module(module)
    matplotlib.pyplot.figure().add_subplot(title="finds the fonts").figure.savefig(io.BytesIO())
    matplotlib.pyplot.close()
    assert len(os.listdir("/proc/self/task")) == 1, (
        "a fork copies the calling thread only: nothing may start one here"
    )
    sys.path.remove(str(ROOT))
    gc.collect()
    gc.freeze()  # or the children's collector would touch, and so copy, every page
    serve(requests)

    # This is a job's process now. What is drawn unseeded differs from process to process.
    random.seed()
    numpy.random.seed()
    torch.default_generator.seed()
    if "DRAW_LOSS" not in os.environ:
        trackers = importlib.import_module("training.trackers")
        trackers.save_loss_plot = leave_a_blank_picture
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        code = end.code or 0
    # A script that is not started through exits.run has ended. To take down all that the server
    # has imported would take longer than a small run.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
