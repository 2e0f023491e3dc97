"""How many bytes of a sharded model each rank holds, and that they are its part and no more."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from common import runtime


def check_parts(net: nn.Module, optimizer: torch.optim.Optimizer, replicas: int) -> dict[str, list[int]]:
    """The bytes of weights and of optimizer state that each rank holds, in rank order; says them in a line.

    AssertionError if they are not the ranks' parts.
    """
    parameter_bytes = _bytes_by_rank(net.parameters())
    optimizer_bytes = _bytes_by_rank(t for state in optimizer.state.values() for t in state.values() if t.ndim)
    parts = []
    for what, by_rank in (("weights", parameter_bytes), ("optimizer state", optimizer_bytes)):
        least, most = (f"{size(by_rank) / 2**20:,.1f}" for size in (min, max))
        held = most if most == least else f"{least} to {most}"
        parts.append(f"{held} of {sum(by_rank) / replicas / 2**20:,.1f} MiB of {what}")
    copies = f", {replicas} copies of the model" if replicas > 1 else ""
    runtime.say(f"checked: each rank holds {', '.join(parts)}{copies}")
    return {"parameter_bytes_per_rank": parameter_bytes, "optimizer_bytes_per_rank": optimizer_bytes}


def _bytes_by_rank(tensors: Iterable[DTensor]) -> list[int]:
    """The bytes of these tensors that each rank holds, in rank order.

    AssertionError if a rank holds anything but its rows, those that torch.chunk gives it: ceil(rows / ranks) each, so
    the last ranks may hold fewer, or none. (fully_shard pads those to equal sizes, which is not counted.)
    """
    held = due = whole = 0
    for tensor in tensors:
        mesh = tensor.device_mesh["shard"]
        parts = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").chunk(mesh.size())
        own = mesh.get_local_rank()
        due += parts[own].nbytes if own < len(parts) else 0
        held += tensor.to_local().nbytes
        whole += tensor.nbytes * (tensor.device_mesh.size() // mesh.size())  # once per replica
    by_rank = runtime.gather((held, due))
    assert all(held == due for held, due in by_rank), f"(held, due) bytes by rank: {by_rank}"
    assert sum(held for held, _ in by_rank) == whole, f"(held, due) bytes by rank: {by_rank}, of {whole}"
    return [held for held, _ in by_rank]
