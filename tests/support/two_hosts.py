"""Hosts on one machine: network namespaces with addresses of their own, joined by cables."""

import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.harness import start

# the first host is the one that stays; its address sorts after the other's
ADDRESSES = ("10.77.0.9", "10.77.0.2")


class Host:
    """One of them: starts processes there, and cuts and mends its cable."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address

    def start(self, argv: list[str], folder: Path, **env: str) -> subprocess.Popen:
        return start(
            ["ip", "netns", "exec", self.name, *argv], folder, GLOO_SOCKET_IFNAME="eth0", **env
        )

    def cable(self, state: str) -> None:
        ip("-n", self.name, "link", "set", "eth0", state)

    def connect(self) -> None:
        """Give the end of the cable the host's address."""
        ip("-n", self.name, "address", "add", f"{self.address}/24", "dev", "eth0")
        ip("-n", self.name, "link", "set", "lo", "up")
        self.cable("up")

    def slow_down(self, mbit: int) -> None:
        """Let so many Mbit a second out of the cable."""
        limit = ["rate", f"{mbit}mbit", "burst", "64kb", "limit", "64mb"]
        tc = ["tc", "-n", self.name, "qdisc", "add", "dev", "eth0", "root", "tbf"]
        subprocess.run([*tc, *limit], check=True, timeout=600)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=600)


@contextmanager
def two_hosts():
    """The two, which are gone afterwards; skips the test with the reason where they cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need ip (Debian's iproute2)")
    hosts = [Host(f"host{i}-{os.getpid()}", address) for i, address in enumerate(ADDRESSES)]
    try:
        try:
            for host in hosts:
                ip("netns", "add", host.name)
            peer = ("type", "veth", "peer", "name", "eth0", "netns", hosts[1].name)
            ip("link", "add", "eth0", "netns", hosts[0].name, *peer)
            for host in hosts:
                host.connect()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces need root: {error.stderr.strip()}")
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, timeout=600)


@contextmanager
def hosts_on_a_switch(count: int):
    """Make hosts with a cable each to a bridge in another namespace. Skip as two_hosts does."""
    if shutil.which("tc") is None:
        pytest.skip("network namespaces need ip and tc (Debian's iproute2)")
    switch = f"switch-{os.getpid()}"
    hosts = []
    for number in range(count):
        hosts.append(Host(f"host{number}-{os.getpid()}", f"10.79.0.{number + 1}"))
    try:
        try:
            ip("netns", "add", switch)
            ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", switch, "link", "set", "bridge", "up")
            for i, host in enumerate(hosts):
                ip("netns", "add", host.name)
                peer = ("type", "veth", "peer", "name", f"port{i}", "netns", switch)
                ip("link", "add", "eth0", "netns", host.name, *peer)
                ip("-n", switch, "link", "set", f"port{i}", "master", "bridge", "up")
                host.connect()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces need root: {error.stderr.strip()}")
        yield hosts
    finally:
        for name in (switch, *(host.name for host in hosts)):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=600)
