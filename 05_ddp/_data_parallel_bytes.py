"""How many bytes a step of DataParallel and one of DDP move between devices, counted on devices that are copies here.

Used by data_parallel.py.
"""

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from old import report


def send(tensor: Tensor, source: int, target: int, what: str, moved: Counter) -> Tensor:
    """The tensor on another device, here a copy in the same memory; every byte that travels is counted."""
    if source == target:
        return tensor.detach()
    moved[what, "sent", source] += tensor.nbytes
    moved[what, "received", target] += tensor.nbytes
    return tensor.detach().clone()


def ring_all_reduce(flats: list[Tensor], moved: Counter) -> None:
    """Leave the sum of all on every device, as DDP's all-reduce does: each sends a chunk at a time to the next one."""
    n = len(flats)
    chunks = [flat.tensor_split(n) for flat in flats]
    for turn in range(2 * (n - 1)):
        arrived = [send(chunks[r][(r - turn) % n], r, (r + 1) % n, "model", moved) for r in range(n)]
        for r in range(n):
            chunk = chunks[r][(r - 1 - turn) % n]
            # reduce-scatter: add what comes, until each device has one chunk complete; all-gather: hand these around
            chunk.copy_(chunk + arrived[r - 1] if turn < n - 1 else arrived[r - 1])


def gradients(net: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in net.parameters()])


def count_bytes(data_parallel_by_hand: Callable, net: nn.Module, inputs: Tensor, targets: Tensor, n: int) -> dict:
    """One step of each on n devices: the bytes of weights and gradients that moved. Fails if the gradients are not
    those of one process, or the bytes not those of the formulas."""
    nets = [copy.deepcopy(net) for _ in range(n + 1)]
    nets[n](inputs, targets).backward()
    expected = gradients(nets[n])

    dp_moved, ddp_moved = Counter(), Counter()
    data_parallel_by_hand(nets[:n], inputs, targets, partial(send, moved=dp_moved))
    found = [gradients(nets[0])]
    for rank, part in enumerate(zip(inputs.chunk(n), targets.chunk(n), strict=True)):
        nets[rank].zero_grad()
        nets[rank](*part).backward()
        found.append(gradients(nets[rank]) / n)
    ring_all_reduce(found[1:], ddp_moved)

    norm = torch.linalg.vector_norm
    relative_error = max((norm(gradient - expected) / norm(expected)).item() for gradient in found)
    assert relative_error < 1e-5, f"{n} devices: gradients differ from one process's by {relative_error:.0e}"
    for way in ("sent", "received"):
        assert dp_moved["model", way, 0] == (n - 1) * expected.nbytes
        for device in range(1, n):
            assert dp_moved["model", way, device] == expected.nbytes
        for rank in range(n):  # chunks differ by an element at most
            assert abs(ddp_moved["model", way, rank] - 2 * (n - 1) / n * expected.nbytes) < 2 * expected.itemsize
    return {
        "devices": n,
        "weight_bytes": expected.nbytes,
        "data_parallel_device_0_sent_bytes": dp_moved["model", "sent", 0],
        "data_parallel_device_0_received_bytes": dp_moved["model", "received", 0],
        "data_parallel_other_sent_bytes": dp_moved["model", "sent", 1],
        "data_parallel_output_bytes": dp_moved["data", "received", 0],
        "ddp_rank_sent_bytes": max(ddp_moved["model", "sent", rank] for rank in range(n)),
        "gradient_difference": relative_error,
    }


def print_bytes(rows: list[dict]) -> None:
    head = ["devices", "DataParallel: device 0 sends", "each other sends", "DDP: each sends", "outputs to device 0"]
    lines = [[*head, "relative error of gradients"]]
    columns = ("data_parallel_device_0_sent", "data_parallel_other_sent", "ddp_rank_sent", "data_parallel_output")
    for row in rows:
        moved = [f"{row[column + '_bytes'] / 2**20:.1f} MiB" for column in columns]
        lines.append([str(row["devices"]), *moved, f"{row['gradient_difference']:.0e}"])
    print(
        f"Weights and gradients of {rows[0]['weight_bytes'] / 2**20:.1f} MiB: what a device sends in a step, by hand."
    )
    print("It receives as much. Over NCCL, DataParallel's device 0 sends about the weights once, whatever the number.")
    print(report.table(lines))
    print("checked: (N-1)P through device 0, 2(N-1)/N P through each rank of DDP, and the gradients of one process")
