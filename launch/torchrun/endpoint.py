"""Check the address where torchrun's nodes meet before torchrun starts, and watch it afterwards.

    python launch/torchrun/endpoint.py check node0:29400 300
    python launch/torchrun/endpoint.py watch node0:29400 600

`check` prints two words for torchrun's flags: 1 on the node that hosts the meeting and 0 elsewhere,
and the address under which the others reach this node. torchrun guesses both from the host name.
The guess is wrong if the name belongs to another network or to the loopback. On the host, `check`
also tries the port, because torchrun would take any program that listens there for its host. On the
other nodes it waits, here up to 300 s, until the host answers.

`watch` is a child of torchrun, and kills it when the host has not answered for, here, 600 s. When a
link is lost, the ranks stop by themselves. But torchrun (2.13) then asks the host for news without
a timeout: it would wait as long as TCP does, 15 minutes, and ignore SIGTERM.
"""

import ctypes
import os
import signal
import socket
import sys
import time
from typing import NoReturn


def tell(problem: str) -> None:
    """Print an error about the address."""
    print(
        f"launch/torchrun: error: RDZV_ENDPOINT={sys.argv[2]}: {problem}",
        file=sys.stderr,
        flush=True,
    )


def fail(problem: str) -> NoReturn:
    """Print an error about the address, and exit with code 2."""
    tell(problem)
    sys.exit(2)


def resolve(endpoint: str) -> tuple[str, socket.AddressFamily, tuple]:
    """Return the host as it was given, the family of its address, and the address with the port."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        fail("not HOST:PORT")
    host = host.strip("[]")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        fail(f"{host} does not resolve on {socket.gethostname()} ({error.strerror})")
    return host, family, address


def silent(address: tuple, seconds: float, pause: float) -> bool:
    """Ask until the address answers, and return False; or True if it is silent for so long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            socket.create_connection(address[:2], timeout=5).close()
            return False
        except OSError:
            time.sleep(pause)
    return True


def check(join: float) -> None:
    """Print whether this node is the host, and its address. The host must answer in `join` s."""
    host, family, address = resolve(sys.argv[2])
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing: it asks the routing table for this node's address
        own = probe.getsockname()[0]
    # for Debian's 127.0.1.1 it is 127.0.0.1
    hosting = own == address[0] or address[0].startswith("127.")
    if hosting:
        own = host  # as a name it may mean the loopback here: the others resolve it for themselves
        with socket.socket(family) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind(("", address[1]))
            except OSError as error:
                fail(
                    f"port {address[1]} cannot be used here ({error.strerror}): "
                    "take another on all nodes"
                )
    elif silent(address, join, pause=1):
        fail(
            f"no answer in {join:.0f} s: "
            "is the address right, and has this script been started there?"
        )
    print(int(hosting), own)


def watch(limit: float) -> None:
    """Kill torchrun, the parent process, when the host has been silent for `limit` s."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with torchrun
    torchrun = os.getppid()
    _, _, address = resolve(sys.argv[2])
    while not silent(address, limit, pause=2):
        time.sleep(2)
    tell(
        f"no answer for {limit:.0f} s: that node, or the link to it, is gone; "
        "torchrun on this node is killed"
    )
    os.kill(torchrun, signal.SIGKILL)


if __name__ == "__main__":
    {"check": check, "watch": watch}[sys.argv[1]](float(sys.argv[3]))
