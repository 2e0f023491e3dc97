"""What doctor.py asks of a job on this machine: its environment variables, port, threads, NCCL, and a real
collective between two processes. The form of a check is told in _doctor_machine.py.
"""

import errno
import fnmatch
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from _doctor_machine import Check

RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
ALL_REDUCE = """
import faulthandler, sys, torch, torch.distributed as dist
backend, folder, rank, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
faulthandler.dump_traceback_later(seconds, exit=True)  # a hang says where
device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=2)
numbers = torch.full((2**20,), rank + 1.0, device=device)
dist.all_reduce(numbers)
assert numbers.eq(3).all(), "1 + 2 came out wrong"
dist.destroy_process_group()
"""


def rendezvous(environ: Mapping[str, str], gpus: int) -> Check:
    """torchrun sets all of these; by hand, a job where one is wrong waits until its timeout."""
    name, given = "rendezvous", {key: environ[key] for key in RENDEZVOUS if key in environ}
    fix = "unset them and start with torchrun, or set all: " + ", ".join(RENDEZVOUS)
    if not given.keys() - {"MASTER_ADDR", "MASTER_PORT"}:  # these two alone are what a batch script prepares
        return name, "ok", "RANK, WORLD_SIZE, ... are not set: torchrun sets them", ""
    if missing := [key for key in RENDEZVOUS if key not in given]:
        return name, "fail", f"half set: {', '.join(given)} without {', '.join(missing)}", fix
    numbers = {key: given[key] for key in RENDEZVOUS if key != "MASTER_ADDR"}
    if wrong := [f"{key}={text!r}" for key, text in numbers.items() if not text.isdecimal()]:
        return name, "fail", f"not a whole number: {', '.join(wrong)}", fix
    rank, world_size, local_rank, port = (int(text) for text in numbers.values())
    wrong = {
        f"RANK={rank} of WORLD_SIZE={world_size}: ranks are 0 to {world_size - 1}": rank >= world_size,
        f"LOCAL_RANK={local_rank} above RANK={rank}": local_rank > rank,
        f"LOCAL_RANK={local_rank} with {gpus} GPU(s) visible": 0 < gpus <= local_rank,
        f"MASTER_PORT={port} is no port": not 0 < port < 65536,
    }
    bad = [text for text, holds in wrong.items() if holds]
    try:
        socket.getaddrinfo(given["MASTER_ADDR"], None)
    except (OSError, UnicodeError) as error:
        bad.append(f"MASTER_ADDR={given['MASTER_ADDR']} does not resolve: {error}")
    return (name, "fail", "; ".join(bad), fix) if bad else (name, "ok", f"rank {rank} of {world_size}", "")


def master_port(environ: Mapping[str, str]) -> Check:
    """Rank 0 listens there; 29500 is what torchrun takes without --standalone or --rdzv-endpoint."""
    name, text = "port", environ.get("MASTER_PORT", "29500")
    if not text.isdecimal() or not 0 < int(text) < 65536 or environ.get("RANK", "0") != "0":
        return name, "skip", f"MASTER_PORT={text} is not for this process to open", ""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
        try:
            probe.bind(("", int(text)))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return name, "fail", f"{text} cannot be opened: {error.strerror}", "a MASTER_PORT above 1023"
        else:
            return name, "ok", f"{text} is free", ""
    status = "fail" if "MASTER_PORT" in environ else "warn"
    return name, status, f"{text} is in use by {_owner(int(text))}", "end that, or use another MASTER_PORT"


def _owner(port: int) -> str:
    try:
        for found in psutil.net_connections("tcp"):
            if found.laddr and found.laddr.port == port and found.pid:
                process = psutil.Process(found.pid)
                return f"pid {found.pid} of {process.username()}: {' '.join(process.cmdline())[:60]}"
    except psutil.Error:
        pass
    return "a process of another user or container"


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may use: a container's share of time counts, which torch does not look at."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share, _, period = quota.read_text().partition(" ") if quota.exists() else ("max", "", "")
    return cores if share == "max" else max(1, min(cores, int(share) // int(period)))


def threads(environ: Mapping[str, str], cores: int, processes: int, gpus: int) -> Check:
    """More threads than cores wait for each other; fewer, on a CPU, leave cores idle: torchrun's default is 1."""
    name, text = "threads", environ.get("OMP_NUM_THREADS")
    if text is not None and (not text.isdecimal() or not int(text)):
        return name, "fail", f"OMP_NUM_THREADS={text!r} is no number of threads", "unset it"
    each = int(text) if text else torch.get_num_threads()
    seen = f"{each} per process ({'OMP_NUM_THREADS' if text else 'not set; torchrun would set 1'}), {cores} core(s)"
    if processes > 1:
        seen += f", {processes} processes"
    fits = each * processes <= max(cores, processes) or (text is None and processes > 1)  # torchrun will set 1
    if fits and (gpus or text is None or 4 * each * processes > cores):
        return name, "ok", seen, ""
    return name, "warn", seen, f"OMP_NUM_THREADS={max(1, cores // processes)}"


def nccl(environ: Mapping[str, str], interfaces: list[str], usable: bool) -> Check:
    """NCCL's interface: those that NCCL_SOCKET_IFNAME names, as prefixes, =exact, or ^ all but these."""
    name, wanted = "NCCL", environ.get("NCCL_SOCKET_IFNAME")
    interface = f"interface {_first_choice(interfaces) or 'none'}"
    if wanted:
        exact, all_but = wanted.lstrip("^").startswith("="), wanted.startswith("^")
        patterns = [part + "*" * (not exact) for part in wanted.lstrip("^=").split(",")]
        taken = [i for i in interfaces if all_but != any(fnmatch.fnmatchcase(i, p) for p in patterns)]
        interface = f"NCCL_SOCKET_IFNAME={wanted} takes {', '.join(taken) or 'none'} of {', '.join(interfaces)}"
        if not taken:
            return name, "fail", interface, "name an interface that is there, or unset it"
    if dist.is_nccl_available():
        return name, "ok", f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, {interface}", ""
    if usable:
        return name, "fail", "this torch has CUDA but no NCCL", "install a torch build with NCCL (Linux only)"
    return name, "skip", f"not in this torch build; {interface}", ""


def _first_choice(interfaces: list[str]) -> str | None:
    """Left alone NCCL takes InfiniBand's (ib...), else any but docker's and the loopback, else what there is."""
    prefixes = ["ib", "", "docker", "lo"]
    place = {name: max(i for i, prefix in enumerate(prefixes) if name.startswith(prefix)) for name in interfaces}
    return min(interfaces, key=lambda name: 0 if name.startswith("ib") else place[name], default=None)


def collective(backend: str, gpus: int, seconds: float = 60, code: str = ALL_REDUCE) -> Check:
    """Two processes add up 4 MiB. In subprocesses, so that a hang becomes an answer and leaves nothing behind."""
    name = f"{backend} all-reduce"
    if backend == "nccl" and gpus < 2:
        return name, "skip", f"{gpus} GPU(s) visible to torch: needs 2", ""
    environ = {key: value for key, value in os.environ.items() if key not in RENDEZVOUS}
    start = time.monotonic()
    deadline = start + seconds + 120  # each process stops itself after `seconds`, not counting its start
    with tempfile.TemporaryDirectory() as folder:
        ranks, files = [], [Path(folder, f"rank-{rank}") for rank in range(2)]
        for rank, file in enumerate(files):
            argv = [sys.executable, "-c", code, backend, folder, str(rank), str(seconds)]
            with file.open("w") as output:
                ranks.append(subprocess.Popen(argv, env=environ, stdout=output, stderr=output))
        try:
            while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
                if any(rank.returncode for rank in ranks):
                    deadline = min(deadline, time.monotonic() + 20)  # the other may wait for it for ever
                time.sleep(0.02)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        told = [file.read_text() for file in files]
    if not any(rank.returncode for rank in ranks):
        return name, "ok", f"2 processes agree, {time.monotonic() - start:.1f} s with their start", ""
    stacks = [re.findall(r'File "(?:.*/)?(.+?)", line (\d+) in (\S+)', text.split("Thread 0x")[-1]) for text in told]
    if not any(stacks):
        errors = [re.search(r"^(?:\[rank\d\]: )?([\w.]*(?:Error|Exception)\b.*)", text, re.MULTILINE) for text in told]
        seen = "; ".join(f"rank {r}: {error[1][:100]}" for r, error in enumerate(errors) if error)
        fix = "the host's name must resolve to an address of its own; NCCL_DEBUG=INFO says more"
        return name, "fail", seen or f"exit codes {[rank.returncode for rank in ranks]}, no error printed", fix
    places = [f"rank {r} in {stack[0][2]} ({stack[0][0]}:{stack[0][1]})" for r, stack in enumerate(stacks) if stack]
    fix = f"{'NCCL' if backend == 'nccl' else 'GLOO'}_SOCKET_IFNAME=<a working interface>; a firewall; NCCL_DEBUG=INFO"
    return name, "fail", f"no answer in {seconds:g} s: {', '.join(places)}", fix


def checks(environ: Mapping[str, str], gpus: int) -> list[Check]:
    processes = environ.get("LOCAL_WORLD_SIZE", "")
    return [
        rendezvous(environ, gpus),
        master_port(environ),
        threads(environ, usable_cores(), int(processes) if processes.isdecimal() else max(1, gpus), gpus),
        nccl(environ, [name for name, state in psutil.net_if_stats().items() if state.isup], bool(gpus)),
        collective("gloo", gpus),
        collective("nccl", gpus),
    ]
