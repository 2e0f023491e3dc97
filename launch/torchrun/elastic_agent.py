"""Run torchrun for an elastic job: nodes come and go. elastic.sh calls it.

    elastic_agent.py node0 29400 300 join_timeout=300 --nnodes=1:4 ... 05_ddp/train.py

The words are: the host and the port where the nodes meet (c10d rendezvous), the seconds to wait for
the host, and what torchrun takes as --rdzv-conf. torchrun's other flags follow. Five things are not
as in torchrun, which has no hooks for them. So this file is for torch 2.13, whose names it uses.

1. Whether this node is the host, and its address, follow from the routes. torchrun guesses both
   from the host name, which may belong to another network or to the loopback.
2. When the host has not answered for COLLECTIVE_TIMEOUT_SECONDS, torchrun is killed. It would ask
   the host for news as long as TCP tries, 15 minutes, and ignore SIGTERM.
3. When a node joins or leaves, the ranks of all nodes save and end together, with exit code 75. A
   torchrun that has not heard of the change yet counts that as a failure, and uses up one of
   --max-restarts. Here 75 does not count.
4. A torchrun that has heard of the change gives its ranks 30 s to end, whatever --shutdown-timeout
   says. Here it gives them TORCH_ELASTIC_SHUTDOWN_TIMEOUT.
5. Nodes whose clocks differ think that the others are dead, and torchrun then lets one train alone,
   whatever MIN is. Here no node trains in a group smaller than MIN: it ends with an error.
"""

import os
import signal
import socket
import sys
import threading
import time
from typing import NoReturn

import run
import torch
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

TORCH = "2.13"
torchruns_monitor = LocalElasticAgent._monitor_workers
torchruns_rendezvous = DynamicRendezvousHandler.next_rendezvous
torchruns_wait = run.Rank.wait


def tell(problem: str) -> None:
    """Print an error."""
    print(f"elastic.sh: error: {problem}", file=sys.stderr, flush=True)


def fail(problem: str) -> NoReturn:
    """Print an error and exit with code 2."""
    tell(problem)
    sys.exit(2)


def is_silent(host: str, port: int, seconds: float) -> bool:
    """Ask until the host answers, and return False; or True if it is silent for so long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return False
        except OSError:
            time.sleep(1)
    return True


def find_host(host: str, port: int, join: float) -> tuple[bool, str]:
    """Return whether this node is the host, and its address. The host must answer in `join` s."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing: it asks the routing table for this node's address
        own = probe.getsockname()[0]
    # for Debian's 127.0.1.1 it is 127.0.0.1
    is_host = own == address[0] or address[0].startswith("127.")
    if is_host:
        # Other nodes resolve the name for themselves: here it may be the loopback.
        # torchrun would take any program that listens on the port for its host.
        with socket.socket(family) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind(("", port))
            except OSError as error:
                problem = f"port {port} cannot be used here ({error.strerror})"
                fail(f"RDZV_ENDPOINT={host}:{port}: {problem}: take another on all nodes")
        return True, host
    if is_silent(host, port, join):
        question = "is the address right, and has this script been started there?"
        fail(f"RDZV_ENDPOINT={host}:{port}: no answer in {join:.0f} s: {question}")
    return False, own


def watch(host: str, port: int, limit: float) -> None:
    """Kill this process when the host has been silent for `limit` s. The ranks end with it."""
    while not is_silent(host, port, limit):
        time.sleep(2)
    tell(
        f"RDZV_ENDPOINT={host}:{port}: no answer for {limit:.0f} s: that node, or the link to it, "
        "is gone; torchrun on this node is killed"
    )
    os.kill(os.getpid(), signal.SIGKILL)


def monitor(agent, *args, **kwargs):
    """Check the ranks, and do not count a failure in which all of them have saved and ended."""
    result = torchruns_monitor(agent, *args, **kwargs)
    if result.is_failed():
        exit_codes = {failure.exitcode for failure in result.failures.values()}
        if exit_codes == {run.SAVED_AND_STOPPED}:
            agent._remaining_restarts += 1  # the restart that follows takes it back
    return result


def wait(rank, timeout=None):
    """Wait for a rank that was told to stop, as long as TORCH_ELASTIC_SHUTDOWN_TIMEOUT says."""
    if timeout is not None:
        timeout = max(timeout, float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")))
    return torchruns_wait(rank, timeout)


def next_rendezvous(handler):
    """Join the other nodes. End this node if the group is too small."""
    joined = torchruns_rendezvous(handler)
    least = handler.settings.min_nodes
    if joined.world_size < least:
        size = joined.world_size
        tell(f"{size} of at least {least} nodes left: the others are dead, or clocks differ")
        os._exit(1)  # the ranks end with this process (PR_SET_PDEATHSIG)
    return joined


def main() -> None:
    """Find the host of the meeting, and run torchrun."""
    host, port, join, conf = sys.argv[1:5]
    if torch.__version__.split(".")[:2] != TORCH.split("."):
        fail(f"it replaces parts of torch {TORCH}, and this is {torch.__version__}")
    is_host, address = find_host(host, int(port), float(join))
    if not is_host:
        limit = float(os.environ["COLLECTIVE_TIMEOUT_SECONDS"])
        threading.Thread(target=watch, args=(host, int(port), limit), daemon=True).start()
    LocalElasticAgent._monitor_workers = monitor
    DynamicRendezvousHandler.next_rendezvous = next_rendezvous
    run.Rank.wait = wait
    conf = f"--rdzv-conf={conf},is_host={int(is_host)}"
    sys.argv[1:5] = ["--rdzv-backend=c10d", conf, f"--local-addr={address}"]
    run.run()


main()
