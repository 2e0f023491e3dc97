"""The address where torchrun's nodes meet: checked before torchrun starts, watched while it runs.

    python launch/torchrun/endpoint.py check node0:29400 300
    python launch/torchrun/endpoint.py watch node0:29400 600

`check` prints two words for torchrun's flags: 1 on the node that hosts the meeting and 0 elsewhere, and the address
under which the others reach this node. torchrun guesses both from the host name, which is wrong where that name belongs
to another network or to the loopback. On the host, `check` also tries the port: torchrun would take whatever listens
there for its host. Elsewhere it waits, here up to 300 s, until the host answers.

`watch` is a child of torchrun, and kills it when the host has not answered for, here, 600 s. When a link is lost, the
ranks give up by themselves. But torchrun (2.13) then asks the host for news without a timeout of its own: it would wait
as long as TCP does, 15 minutes, and not hear SIGTERM.
"""

import ctypes
import os
import signal
import socket
import sys
import time
from typing import NoReturn


def tell(problem: str) -> None:
    print(
        f"launch/torchrun: error: RDZV_ENDPOINT={sys.argv[2]}: {problem}",
        file=sys.stderr,
        flush=True,
    )


def fail(problem: str) -> NoReturn:
    tell(problem)
    sys.exit(2)


def resolve(endpoint: str) -> tuple[str, socket.AddressFamily, tuple]:
    """The host as it was given; the family of its address; that address with the port."""
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
    """Ask until there is an answer (False), or there has been none for so long (True)."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            socket.create_connection(address[:2], timeout=5).close()
            return False
        except OSError:
            time.sleep(pause)
    return True


def check(join: float) -> None:
    host, family, address = resolve(sys.argv[2])
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing, but asks the routing table for this node's side
        own = probe.getsockname()[0]
    # the answer to Debian's 127.0.1.1 is 127.0.0.1
    hosting = own == address[0] or address[0].startswith("127.")
    if hosting:
        own = host  # as a name it may mean the loopback here: the others resolve it for themselves
        with socket.socket(family) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind(("", address[1]))
            except OSError as error:
                fail(
                    f"port {address[1]} cannot be used here ({error.strerror}): take another on all nodes"
                )
    elif silent(address, join, pause=1):
        fail(
            f"no answer in {join:.0f} s: is the address right, and has this script been started there?"
        )
    print(int(hosting), own)


def watch(limit: float) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with torchrun
    torchrun = os.getppid()
    _, _, address = resolve(sys.argv[2])
    while not silent(address, limit, pause=2):
        time.sleep(2)
    tell(
        f"no answer for {limit:.0f} s: that node, or the link to it, is gone; torchrun on this node is killed"
    )
    os.kill(torchrun, signal.SIGKILL)


if __name__ == "__main__":
    {"check": check, "watch": watch}[sys.argv[1]](float(sys.argv[3]))
