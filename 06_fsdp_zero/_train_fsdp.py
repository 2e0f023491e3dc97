"""The device mesh of train_fsdp.py, and the check of what each rank holds."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from common import exits, report, runtime
from lm.loss import replace_loss


def sharding_mesh(device: torch.device, replicas: int) -> DeviceMesh:
    """Return the mesh for fully_shard, with so many copies of the model.

    One copy is sharded over neighbouring ranks. With replicas=2, for example, ranks 0 to 3 of eight
    share the first copy and ranks 4 to 7 the second. Raise UserError if `replicas` does not divide
    the number of ranks.
    """
    world_size = dist.get_world_size()
    if world_size % replicas != 0:
        raise exits.UserError(
            f"--replicate {replicas} does not divide {world_size} processes: use a divisor, "
            f"or start a multiple of {replicas}: torchrun --nproc_per_node={replicas} ..."
        )
    sizes = {"shard": world_size}
    if replicas > 1:
        sizes = {"replicate": replicas, "shard": world_size // replicas}
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for name in sizes:
        runtime.set_timeout(mesh.get_group(name))
    return mesh


def compile_loss(model: nn.Module) -> None:
    """Compile the head and the loss of lm.model.Transformer as one function.

    The logits are the largest tensor, and one function reads them less often. torch.compile cannot
    trace the hooks of fully_shard on lm_head, so they run outside of the compiled function.
    """

    @torch.compile(fullgraph=True)
    def compiled_loss(hidden: Tensor, head: Tensor, targets: Tensor, reduction: str) -> Tensor:
        return F.cross_entropy(
            F.linear(hidden, head).flatten(0, 1).float(), targets.flatten(), reduction=reduction
        )

    replace_loss(model, compiled_loss)


def check_shards(
    model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype, replicas: int
) -> dict[str, list[int]]:
    """Assert that each rank holds its shards in fp32 and nothing else; return how many bytes.

    Also assert that weights are gathered in `dtype`. The result lists the bytes of weights and of
    optimizer state by rank.
    """
    fsdp_modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in fsdp_modules:
        module.reshard()  # the last evaluation gathered the head, and no backward followed

    last = fsdp_modules[-1]
    last.unshard()
    for parameter in last.parameters():
        assert parameter.dtype == dtype
    last.reshard()

    parameters = list(model.parameters())
    moments = []
    for state in optimizer.state.values():
        moments += [value for value in state.values() if value.ndim > 0]  # not the step count
    return {
        "parameter_bytes_per_rank": _check_shards_of(parameters, "weights", replicas),
        "optimizer_bytes_per_rank": _check_shards_of(moments, "optimizer state", replicas),
    }


def _check_shards_of(tensors: list[Tensor], what: str, replicas: int) -> list[int]:
    """Assert that this rank holds its rows of each tensor; return the bytes of all ranks.

    The rows of a tensor are shared out as torch.chunk does: ceil(rows / ranks) to each rank, so the
    last ranks may hold fewer rows, or none.
    """
    for tensor in tensors:
        mesh = tensor.device_mesh["shard"]
        rows_per_rank = -(-len(tensor) // mesh.size())
        rows_before = rows_per_rank * mesh.get_local_rank()
        expected_rows = max(0, min(rows_per_rank, len(tensor) - rows_before))
        local_rows = len(tensor.to_local())
        assert local_rows == expected_rows, f"{local_rows} rows of {tensor.shape}"
        assert tensor.dtype == torch.float32

    full_bytes = sum(tensor.nbytes for tensor in tensors)
    local_bytes = sum(tensor.to_local().nbytes for tensor in tensors)
    bytes_per_rank = runtime.all_gather(local_bytes)
    assert sum(bytes_per_rank) == full_bytes * replicas, f"{bytes_per_rank} of {full_bytes} bytes"

    largest = report.for_people("bytes", max(bytes_per_rank))
    full = report.for_people("bytes", full_bytes)
    runtime.print0(f"checked: each rank holds {largest} of {full} of {what}, in {torch.float32}")
    return bytes_per_rank
