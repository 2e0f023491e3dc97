"""A step of DataParallel and one of DDP by hand, on devices that are lists in this memory; every byte is counted.

Used by data_parallel.py.
"""

import copy
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import report


def send(tensor: Tensor, source: int, target: int, moved: Counter, what: str) -> Tensor:
    """The tensor on another device, here a copy in the same memory; every byte that travels is counted."""
    if source == target:
        return tensor.detach()
    moved[what, "sent", source] += tensor.nbytes
    moved[what, "received", target] += tensor.nbytes
    return tensor.detach().clone()


def data_parallel_by_hand(replicas: list[nn.Module], inputs: Tensor, targets: Tensor, moved: Counter) -> Tensor:
    """Forward and backward as nn.DataParallel does them; replica i is on device i, the gradients end on device 0."""
    n, net = len(replicas), replicas[0]
    for i in range(1, n):  # replicate, at each step: the optimizer has changed the weights of device 0 only
        for p, weight in zip(replicas[i].parameters(), net.parameters(), strict=True):
            p.data, p.grad = send(weight, 0, i, moved, "model"), None
    parts = [send(part, 0, i, moved, "data") for i, part in enumerate(inputs.chunk(n))]  # scatter
    with ThreadPoolExecutor(n) as threads:  # parallel apply
        outputs = list(threads.map(lambda replica, part: replica(part), replicas, parts))
        collected = [send(output, i, 0, moved, "data") for i, output in enumerate(outputs)]  # gather
        logits = torch.cat(collected).requires_grad_()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())  # on device 0, over the whole batch
        loss.backward()
        returned = [send(part, 0, i, moved, "data") for i, part in enumerate(logits.grad.chunk(n))]
        list(threads.map(lambda output, gradient: output.backward(gradient), outputs, returned))
    for i in range(1, n):  # reduce: only now is the gradient complete
        for p, q in zip(net.parameters(), replicas[i].parameters(), strict=True):
            p.grad += send(q.grad, i, 0, moved, "model")
    return loss.detach()


def ring_all_reduce(flats: list[Tensor], moved: Counter) -> None:
    """Leave the sum of all on every device, as DDP's all-reduce does: each sends a chunk at a time to the next one."""
    n = len(flats)
    chunks = [flat.tensor_split(n) for flat in flats]
    for turn in range(2 * (n - 1)):
        arrived = [send(chunks[r][(r - turn) % n], r, (r + 1) % n, moved, "model") for r in range(n)]
        for r in range(n):
            chunk = chunks[r][(r - 1 - turn) % n]
            # reduce-scatter: add what comes, until each device has one chunk complete; all-gather: hand these around
            chunk.copy_(chunk + arrived[r - 1] if turn < n - 1 else arrived[r - 1])


def gradients(net: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in net.parameters()])


def count(net: nn.Module, inputs: Tensor, targets: Tensor, n: int) -> dict:
    """One step of each on n devices: the bytes of weights and gradients that moved. Fails if the gradients are not
    those of one process, or the bytes not those of the formulas."""
    nets = [copy.deepcopy(net) for _ in range(n + 1)]
    nets[n](inputs, targets).backward()
    expected = gradients(nets[n])

    dp, ddp = Counter(), Counter()
    data_parallel_by_hand(nets[:n], inputs, targets, dp)
    found = [gradients(nets[0])]
    for rank, part in enumerate(zip(inputs.chunk(n), targets.chunk(n), strict=True)):
        nets[rank].zero_grad()
        nets[rank](*part).backward()
        found.append(gradients(nets[rank]) / n)
    ring_all_reduce(found[1:], ddp)

    norm = torch.linalg.vector_norm
    off = max((norm(gradient - expected) / norm(expected)).item() for gradient in found)
    assert off < 1e-5, f"{n} devices: gradients {off:.0e} off those of one process"
    for way in ("sent", "received"):
        through_0, others = dp["model", way, 0], {dp["model", way, i] for i in range(1, n)}
        assert (through_0, others) == ((n - 1) * expected.nbytes, {expected.nbytes})
        for rank in range(n):  # chunks differ by an element at most
            assert abs(ddp["model", way, rank] - 2 * (n - 1) / n * expected.nbytes) < 2 * expected.itemsize
    return {
        "devices": n,
        "weight_bytes": expected.nbytes,
        "data_parallel_device_0_sent_bytes": dp["model", "sent", 0],
        "data_parallel_device_0_received_bytes": dp["model", "received", 0],
        "data_parallel_other_sent_bytes": dp["model", "sent", 1],
        "data_parallel_output_bytes": dp["data", "received", 0],
        "ddp_rank_sent_bytes": max(ddp["model", "sent", rank] for rank in range(n)),
        "gradient_difference": off,
    }


def traffic_table(rows: list[dict]) -> str:
    """For people."""
    head = ["devices", "DataParallel: device 0", "each other", "DDP: each", "outputs to device 0", "gradients off"]
    columns = ("data_parallel_device_0_sent", "data_parallel_other_sent", "ddp_rank_sent", "data_parallel_output")
    lines = [head]
    for row in rows:
        moved = (f"{row[column + '_bytes']:,}" for column in columns)
        lines.append([str(row["devices"]), *moved, f"{row['gradient_difference']:.0e}"])
    return (
        "by hand: bytes of weights and gradients that a device sends in a step; it receives as many\n"
        f"{report.table(lines)}\n"
        "checked: (N-1)P through device 0, 2(N-1)/N P through each of DDP's, and the gradients of one process"
    )
