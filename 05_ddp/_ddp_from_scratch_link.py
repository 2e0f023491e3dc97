"""Two hosts with a slow link between them, on one Linux machine: what ddp_from_scratch.py --link-mbit runs on.

A network namespace has network interfaces of its own, so a process in it sees another host. A veth pair is the cable
between two of them, and tc's token bucket (tbf) lets so many bits a second through it.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys

from old.exits import UserError

ADDRESSES = ("10.78.0.1", "10.78.0.2")
PORT = "29500"  # the namespaces are new: nobody has it
QUEUE = ("burst", "256kb", "limit", "64mb")  # a queue so long that no packet is dropped


def run_on_two_hosts(mbit_per_second: int) -> int:
    """Start this script again, one rank on each host, and return the first exit code that is not 0."""
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing or os.geteuid() != 0:
        raise UserError("--link-mbit makes network namespaces: it needs Linux, root, ip and tc (Debian's iproute2)")
    hosts = [f"ddp{rank}-{os.getpid()}" for rank in range(2)]
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # through what stands under finally
    try:
        connect(hosts, mbit_per_second)
        ranks = [start_rank(host, rank) for rank, host in enumerate(hosts)]
        return first_failure(ranks)
    except subprocess.CalledProcessError as error:
        raise UserError(f"--link-mbit: {' '.join(error.cmd)}: {error.stderr.strip()}") from None
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host], capture_output=True, timeout=20)


def connect(hosts: list[str], mbit_per_second: int) -> None:
    for host in hosts:
        run("ip", "netns", "add", host)
    run("ip", "link", "add", "eth0", "netns", hosts[0], "type", "veth", "peer", "name", "eth0", "netns", hosts[1])
    for host, address in zip(hosts, ADDRESSES, strict=True):
        run("ip", "-n", host, "address", "add", f"{address}/24", "dev", "eth0")
        run("ip", "-n", host, "link", "set", "lo", "up")
        run("ip", "-n", host, "link", "set", "eth0", "up")
        run("tc", "-n", host, "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", f"{mbit_per_second}mbit", *QUEUE)


def start_rank(host: str, rank: int) -> subprocess.Popen:
    """What torchrun does on each node: the script in a process that knows its rank and where rank 0 is."""
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": PORT,
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # these hosts have no names, of which torch warns
    }
    return subprocess.Popen(["ip", "netns", "exec", host, sys.executable, *sys.argv], env=environment)


def first_failure(ranks: list[subprocess.Popen]) -> int:
    """Wait for both; the first exit code that is not 0. If one fails the other is ended, as torchrun does it."""
    try:
        codes = [None, None]
        while None in codes and not any(codes):
            for rank in ranks:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.wait(timeout=0.2)
            codes = [rank.poll() for rank in ranks]
        return next((code for code in codes if code), 0)
    finally:
        for rank in ranks:
            rank.terminate()
            rank.wait(timeout=60)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
