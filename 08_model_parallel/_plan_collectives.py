"""Seconds of a collective: its start, a hop for each rank of the ring, and bytes over the narrowest link."""

from math import log2

from _estimate_time import PCIE
from _plan_machine import ACROSS_SOCKETS, HOP, NETWORK_HOP, START, Machine


def links(machine: Machine, ranks: int, stride: int) -> tuple[int, float, float]:
    """Of a group whose members are `stride` ranks apart: how many share a node, and bytes per second and GPU inside
    nodes and between them."""
    inside = max(1, min(ranks, machine.gpus_per_node // stride))
    link = machine.link * machine.efficiency.links
    if machine.link == PCIE and inside * stride > machine.gpus_per_node / 2:
        link *= ACROSS_SOCKETS
    return inside, link, machine.network * machine.efficiency.network


def gather_seconds(machine: Machine, ranks: int, stride: int, size: float, pieces: float = 1) -> float:
    """All-gather or reduce-scatter of `size` bytes, in so many calls.

    A ring crosses each node's border once, and members of one node use their network ports together."""
    if ranks <= 1:
        return 0.0
    nodes = ranks / links(machine, ranks, stride)[0]
    latency = START + HOP * (ranks - 1) + NETWORK_HOP * (nodes if nodes > 1 else 0)
    return pieces * latency + size * (ranks - 1) / ranks / ring_speed(machine, ranks, stride)


def reduce_seconds(machine: Machine, ranks: int, stride: int, size: float, pieces: float = 1) -> float:
    """All-reduce of `size` bytes, in so many calls. It sends what a reduce-scatter and an all-gather send, but along a
    tree, whose depth is the logarithm of the number of nodes."""
    if ranks <= 1:
        return 0.0
    inside = links(machine, ranks, stride)[0]
    latency = START + 2 * HOP * (inside - 1) + 2 * NETWORK_HOP * log2(ranks / inside)
    return pieces * latency + 2 * size * (ranks - 1) / ranks / ring_speed(machine, ranks, stride)


def ring_speed(machine: Machine, ranks: int, stride: int) -> float:
    """Bytes per second and GPU of the narrowest link."""
    inside, link, network = links(machine, ranks, stride)
    if inside >= ranks:
        return link
    return min(link, inside * network) if inside > 1 else network


def exchange_seconds(machine: Machine, ranks: int, stride: int, size: float) -> float:
    """All-to-all of `size` bytes per rank. What leaves the node goes through the rank's own port."""
    if ranks <= 1:
        return 0.0
    inside, link, network = links(machine, ranks, stride)
    near = size * (inside - 1) / ranks / link
    far = size * (ranks - inside) / ranks / network
    hops = HOP * (ranks - 1) + (NETWORK_HOP if inside < ranks else 0)
    return START + hops + max(near, far)


def send_seconds(machine: Machine, stride: int, size: float) -> float:
    """To the rank that is `stride` away."""
    _, link, network = links(machine, 1, stride)
    if stride < machine.gpus_per_node:
        return START + size / link
    return START + NETWORK_HOP + size / network


def behind(work: float, other: float, overlap: float) -> float:
    """Seconds by which `other`, running beside `work`, makes the sum longer."""
    return max(0.0, other - work) + (1 - overlap) * min(other, work)
