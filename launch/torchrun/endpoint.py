"""The address where torchrun's nodes meet: checked before torchrun starts, watched while it runs.

    python launch/torchrun/endpoint.py check node0:29400 300
    python launch/torchrun/endpoint.py watch node0:29400 300 600

`check` prints two words for torchrun's flags: 1 on the node that hosts the meeting and 0 elsewhere, and the address
under which the others reach this node. torchrun guesses both from the host name, which is wrong where that name belongs
to another network or to the loopback. On the host, `check` also tries the port: torchrun would take whatever listens
there for its host. Elsewhere it waits, here up to 300 s, until the host answers.

`watch` is a child of torchrun, and kills it in two cases: no rank has started within twice those 300 s, or the host has
not answered for, here, 600 s. When a link is lost, the ranks give up by themselves. But torchrun (2.13) then asks the
host for news without a timeout of its own: it would wait as long as TCP does, 15 minutes, and not hear SIGTERM.
"""

import ctypes
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn


def tell(problem: str) -> None:
    print(f"launch/torchrun: error: RDZV_ENDPOINT={sys.argv[2]}: {problem}", file=sys.stderr, flush=True)


def fail(problem: str) -> NoReturn:
    tell(problem)
    sys.exit(2)


def resolve(endpoint: str) -> tuple[str, tuple[str, int]]:
    """The host as it was given; its address and port."""
    match = re.fullmatch(r"([\w.-]+|\[[\w:.]+\]):(\d{1,5})", endpoint)
    if match is None or not 0 < int(match[2]) < 2**16:
        fail("not HOST:PORT")
    host = match[1].strip("[]")
    try:
        return host, socket.getaddrinfo(host, int(match[2]), type=socket.SOCK_STREAM)[0][4][:2]
    except socket.gaierror as error:
        fail(f"{host} does not resolve on {socket.gethostname()} ({error.strerror})")


def silent(address: tuple[str, int], seconds: float, pause: float) -> bool:
    """Ask until there is an answer (False), or there has been none for so long (True)."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            socket.create_connection(address, timeout=5).close()
            return False
        except OSError:
            time.sleep(pause)
    return True


def check(join: float) -> None:
    host, address = resolve(sys.argv[2])
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)  # sends nothing, but asks the routing table for this node's side
        except OSError as error:
            fail(f"no route to {address[0]} ({error.strerror})")
        own = probe.getsockname()[0]
    hosting = own == address[0] or address[0].startswith("127.")  # the answer to Debian's 127.0.1.1 is 127.0.0.1
    if hosting:
        own = host  # as a name it may mean the loopback here: the others resolve it for themselves
        with socket.socket(family) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind(("", address[1]))
            except OSError as error:
                fail(f"port {address[1]} cannot be used here ({error.strerror}): take another on all nodes")
    elif silent(address, join, pause=1):
        fail(f"no answer in {join:.0f} s: is the address right, and has this script been started there?")
    print(int(hosting), own)


def watch(join: float, collective: float) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with torchrun
    torchrun = os.getppid()
    _, address = resolve(sys.argv[2])
    children = Path(f"/proc/{torchrun}/task/{torchrun}/children")
    deadline = time.monotonic() + 2 * join + 10  # torchrun's own limit is join: this is for what it has no limit for
    problem = None
    while problem is None:
        if silent(address, collective, pause=2):
            problem = f"no answer for {collective:.0f} s: that node, or the link to it, is gone"
        elif len(children.read_text().split()) > 1:  # this watch and a rank: the nodes have met
            deadline = float("inf")
        elif time.monotonic() > deadline:
            problem = f"no rank has started after {2 * join + 10:.0f} s: is it torchrun that answers there?"
        time.sleep(2)
    tell(f"{problem}; torchrun on this node is killed")
    os.kill(torchrun, signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "check":
        check(float(sys.argv[3]))
    else:
        watch(float(sys.argv[3]), float(sys.argv[4]))
