"""What train_fsdp.py does beside the concept: its mesh of ranks, and the proof that each rank holds its part alone."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from common import exits, report, runtime


def sharding_mesh(device: torch.device, replicas: int) -> DeviceMesh:
    """The mesh of fully_shard for so many copies of the model: the ranks of one copy are neighbours, and share it."""
    world_size = dist.get_world_size()
    if world_size % replicas:
        raise exits.UserError(f"--replicate {replicas} does not divide {world_size} processes: use a divisor")
    sizes = {"shard": world_size} if replicas == 1 else {"replicate": replicas, "shard": world_size // replicas}
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for name in sizes:  # its groups would take torch's own timeout
        dist.distributed_c10d._set_pg_timeout(runtime.timeout(), mesh.get_group(name))
    return mesh


def check_parts(net: nn.Module, optimizer: torch.optim.Optimizer, replicas: int) -> dict[str, list[int]]:
    """The bytes of weights and of optimizer state that each rank holds, in rank order. AssertionError if they are not
    the ranks' parts."""
    parameters = _bytes_by_rank(net.parameters())
    state = _bytes_by_rank(t for state in optimizer.state.values() for t in state.values() if t.ndim)
    for what, by_rank in (("weights", parameters), ("optimizer state", state)):
        most, whole = (report.for_people("bytes", size) for size in (max(by_rank), sum(by_rank) // replicas))
        runtime.say(f"checked: each rank holds {most} of {whole} of {what}")
    return {"parameter_bytes_per_rank": parameters, "optimizer_bytes_per_rank": state}


def _bytes_by_rank(tensors: Iterable[DTensor]) -> list[int]:
    """The bytes of these tensors that each rank holds. AssertionError if a rank holds anything but its rows: as of
    torch.chunk, ceil(rows / ranks) each, so the last ranks may hold fewer, or none."""
    held = whole = 0
    for tensor in tensors:
        mesh = tensor.device_mesh["shard"]
        rows = -(-len(tensor) // mesh.size())
        own = max(0, min(rows, len(tensor) - rows * mesh.get_local_rank()))
        assert len(tensor.to_local()) == own, f"{len(tensor.to_local())} rows of {tensor.shape} are here, {own} are due"
        held += tensor.to_local().nbytes
        whole += tensor.nbytes * (tensor.device_mesh.size() // mesh.size())  # once per replica
    by_rank = runtime.gather(held)
    assert sum(by_rank) == whole, f"bytes by rank: {by_rank}, of {whole}"
    return by_rank
