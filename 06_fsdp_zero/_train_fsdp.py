"""What train_fsdp.py does beside the concept: its mesh of ranks, and the proof that each rank holds its part alone."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common import exits, report, runtime


def sharding_mesh(device: torch.device, replicas: int) -> DeviceMesh:
    """The mesh of fully_shard for so many copies of the model: the ranks of one copy are neighbours, and share it."""
    world_size = dist.get_world_size()
    if world_size % replicas:
        raise exits.UserError(
            f"--replicate {replicas} does not divide {world_size} processes: use a divisor"
        )
    sizes = (
        {"shard": world_size}
        if replicas == 1
        else {"replicate": replicas, "shard": world_size // replicas}
    )
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for name in sizes:  # its groups would take torch's own timeout
        dist.distributed_c10d._set_pg_timeout(runtime.timeout(), mesh.get_group(name))
    return mesh


def check_parts(
    net: nn.Module, optimizer: torch.optim.Optimizer, replicas: int
) -> dict[str, list[int]]:
    """The bytes of weights and of optimizer state that each rank holds, in rank order. AssertionError if a rank holds
    anything but its rows: as of torch.chunk, ceil(rows / ranks) each, so the last ranks may hold fewer, or none."""
    state = [t for state in optimizer.state.values() for t in state.values() if t.ndim]
    found = {}
    for kind, what, tensors in (
        ("parameter", "weights", [*net.parameters()]),
        ("optimizer", "optimizer state", state),
    ):
        for tensor in tensors:
            mesh, mine = tensor.device_mesh["shard"], len(tensor.to_local())
            rows = -(-len(tensor) // mesh.size())
            due = max(0, min(rows, len(tensor) - rows * mesh.get_local_rank()))
            assert mine == due, f"{mine} rows of {tensor.shape}"
        whole = sum(tensor.nbytes for tensor in tensors)
        held = runtime.all_gather(sum(tensor.to_local().nbytes for tensor in tensors))
        assert sum(held) == whole * replicas, f"bytes by rank: {held}, of {whole}"
        most, whole = (report.for_people("bytes", size) for size in (max(held), whole))
        runtime.print0(f"checked: each rank holds {most} of {whole} of {what}")
        found[f"{kind}_bytes_per_rank"] = held
    return found
