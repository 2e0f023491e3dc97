"""That each rank of a model cut in three ways holds its part and no more, and that the parts are one model."""

import hashlib
import logging

import torch
import torch.distributed as dist
from _train_3d_tensor import CUT, own_shape
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from old import hf, runtime

# It warns where the tensor ranks are asked and then the shards: here for a norm, one number, and for the digest.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
Shapes = dict[str, torch.Size]  # of all weights of the model, by name


def check_parts(net: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, whole: Shapes) -> dict:
    """The bytes of weights and of optimizer state that each rank holds, in rank order; says them in a line.

    AssertionError if a rank holds anything but its part: of its stage's layers, the rows or columns of its tensor rank,
    and of those the rows of its shard.
    """
    tensor, shard = mesh["tensor"], mesh["shard"]
    held = {"weights": 0, "optimizer state": 0}
    due = 0
    for name, parameter in hf.named_weights(net):
        shape = own_shape(name, whole[name], tensor.get_local_rank(), tensor.size())
        rows = torch.empty(shape, device="meta").chunk(shard.size())
        due += rows[shard.get_local_rank()].nbytes if shard.get_local_rank() < len(rows) else 0
        held["weights"] += parameter.to_local().nbytes
        moments = [state.to_local() for state in optimizer.state[parameter].values() if state.ndim]
        held["optimizer state"] += sum(moment.nbytes for moment in moments)
    by_rank = runtime.gather((held["weights"], held["optimizer state"], due))
    assert all((weights, state) == (due, 2 * due) for weights, state, due in by_rank), f"{by_rank} bytes by rank"
    # nothing is missing: one copy of each matrix, and of each norm one per tensor rank
    copies = {name: tensor.size() if CUT[name.split(".")[-2]] is None else 1 for name in whole}
    total = mesh["replicate"].size() * sum(4 * shape.numel() * copies[name] for name, shape in whole.items())
    assert sum(weights for weights, _, _ in by_rank) == total, f"{by_rank} bytes by rank, of {total}"
    told = []
    for place, what in enumerate(held):
        sizes = [ranks[place] for ranks in by_rank]
        least, most = (f"{size / 2**20:,.1f}" for size in (min(sizes), max(sizes)))
        one_copy = (place + 1) * sum(4 * shape.numel() for shape in whole.values())
        told.append(f"{most if most == least else f'{least} to {most}'} of {one_copy / 2**20:,.1f} MiB of {what}")
    runtime.say(f"checked: each rank holds {', '.join(told)}")
    return {
        "parameter_bytes_per_rank": [weights for weights, _, _ in by_rank],
        "optimizer_bytes_per_rank": [state for _, state, _ in by_rank],
    }


@torch.no_grad()
def check_types(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    dtype: torch.dtype,
    stages: DeviceMesh,
    where: dict[str, object],
    hidden: Tensor,
) -> None:
    """The promise of AMP: low precision is in the arithmetic, never in what is kept. `hidden` is what the stage before
    sends, in shape and type."""
    example = torch.zeros_like(where["positions"]) if stages.get_local_rank() == 0 else hidden
    computed = net(example, **where).dtype
    runtime.reshard(net)  # no backward has followed: what that forward gathered is still there
    kept = {t.dtype for t in (*net.parameters(), *(t for s in optimizer.state.values() for t in s.values()))}
    assert (computed, kept) == (dtype, {torch.float32})
    runtime.say(f"checked: matrices multiplied in {computed}, weights and optimizer state kept in {torch.float32}")


@torch.no_grad()
def digest(net: nn.Module, stages: DeviceMesh, whole: Shapes) -> str:
    """checkpoint.digest of the whole model: each weight is gathered in turn and sent to the other stages."""
    own = dict(hf.named_weights(net))
    names_by_stage = [None] * stages.size()
    dist.all_gather_object(names_by_stage, [*own], group=stages.get_group())
    sha = hashlib.sha256()
    device = next(iter(own.values())).to_local().device
    for name, shape in whole.items():
        holder = next(stage for stage, names in enumerate(names_by_stage) if name in names)
        weight = runtime.whole(own[name]).contiguous() if name in own else torch.empty(shape, device=device)
        dist.broadcast(weight, group=stages.get_group(), group_src=holder)
        sha.update(weight.cpu().view(torch.uint8).numpy())
    return sha.hexdigest()
