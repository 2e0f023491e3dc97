"""Expert parallelism: tokens travel to the ranks that hold their experts, and back.

    dispatch   an all-to-all sends each row to the rank that holds its expert
    compute    an expert multiplies the rows of all ranks
    combine    an all-to-all sends the results back

A row is the hidden state of a token for one expert. Each of N ranks holds 1/N of the experts, and
rank 0 has the first ones. The router decides how many rows a rank sends to each other rank. None is
dropped. 08_model_parallel/expert_parallel.py explains it, and train_3d.py trains with it.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from common.exits import UserError
from common.torch_versions import all_to_all_with_backward
from lm.shapes import Config


class Exchange(NamedTuple):
    """The sizes of dispatch on this rank. Combine has the same, the other way round."""

    to_ranks: list[int]  # how many rows this rank sends to each rank
    from_ranks: list[int]  # how many rows come from each rank
    order: Tensor  # received[order] is ordered by expert, and order.argsort() undoes it
    counts: Tensor  # received rows for each of this rank's experts, [experts of a rank]


def plan_exchange(leaving: Tensor, arriving: Tensor) -> Exchange:
    """Return who sends how many rows to whom. Both tensors are [ranks, experts of a rank].

    leaving[r] counts the rows of this rank for the experts of rank r. arriving[r] counts the rows
    of rank r for the experts of this rank: it is leaving after an all-to-all.
    """
    sizes = torch.stack((leaving.sum(1), arriving.sum(1)))  # one copy to the CPU for both
    # An all-to-all starts on the CPU, which must know its sizes. So here the CPU waits for the GPU.
    to_ranks, from_ranks = sizes.cpu().tolist()
    # Received rows come by rank, and of each rank by expert. Number each by its expert, then sort.
    ranks, experts = arriving.shape
    expert_of_row = torch.arange(experts, device=arriving.device).repeat(ranks)
    expert_of_row = expert_of_row.repeat_interleave(
        arriving.flatten(),
        output_size=sum(from_ranks),  # without it, the CPU would wait once more
    )
    order = expert_of_row.argsort(stable=True)
    return Exchange(to_ranks, from_ranks, order, counts=arriving.sum(0))


def by_owner(counts: Tensor, ranks: int) -> Tensor:
    """Turn [..., experts] into [..., ranks, experts of a rank]: the counts by the experts' ranks.

    The last ranks may have fewer experts than the others. They get zeros for those that they lack.
    """
    experts = counts.shape[-1]
    experts_of_rank = math.ceil(experts / ranks)
    padding = ranks * experts_of_rank - experts
    return F.pad(counts, (0, padding)).unflatten(-1, (ranks, experts_of_rank))


def run_experts(
    experts: Callable[[Tensor, Tensor], Tensor],
    group: dist.ProcessGroup,
    rows: Tensor,
    counts: Tensor,
) -> Tensor:
    """Return the result of each row's expert, [rows, hidden]. Every rank of the group must call it.

    A rank that receives no rows runs its experts, too: a gradient of 0 must join FSDP's
    reduce-scatter, or the ranks that hold the same experts would wait for ever.

    Args:
        experts: experts(rows, counts) runs this rank's experts, as Experts of lm/moe.py does.
        group: The ranks that share the experts.
        rows: This rank's rows, ordered by expert. Behind them may be rows of no expert, which are
            padding. They stay here, and their result is 0.
        counts: How many rows there are for each of all experts, [experts].
    """
    leaving = by_owner(counts, group.size())
    arriving = all_to_all_with_backward(leaving, None, None, group)  # a row of it to each rank
    exchange = plan_exchange(leaving, arriving)
    sent = sum(exchange.to_ranks)
    # The arguments are the rows, the sizes that come, and the sizes that leave.
    received = all_to_all_with_backward(rows[:sent], exchange.from_ranks, exchange.to_ranks, group)
    outputs = experts(received[exchange.order], exchange.counts)
    outputs = outputs[exchange.order.argsort()]  # ordered by rank again
    outputs = all_to_all_with_backward(outputs, exchange.to_ranks, exchange.from_ranks, group)
    if sent < len(rows):
        outputs = F.pad(outputs, (0, 0, 0, len(rows) - sent))
    return outputs


def check_ranks(expert_ranks: int, model: str, config: Config, ranks: int) -> None:
    """Raise UserError if ranks cannot share the experts of a model.

    Args:
        expert_ranks: --ep, how many ranks share the experts of a layer.
        model: --model.
        config: Its shape.
        ranks: How many ranks hold a copy of the model.
    """
    if config.experts is None:
        if expert_ranks > 1:
            raise UserError(f"--ep {expert_ranks}: --model {model} has no experts: leave it out")
        return
    experts = config.experts.num_experts
    if experts % expert_ranks != 0:
        raise UserError(
            f"--ep {expert_ranks} does not divide the {experts} experts of a layer of --model "
            f"{model}: use --ep {math.gcd(expert_ranks, experts)}"
        )
    if ranks % expert_ranks != 0:
        raise UserError(
            f"--ep {expert_ranks} does not divide the {ranks} ranks of a copy of the model: use "
            f"--ep {math.gcd(expert_ranks, ranks)}"
        )


def shard_experts(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Keep this rank's experts of each stack, as a DTensor that is sharded by experts.

    A DTensor has a place in the full stack. A checkpoint would take plain tensors of one rank for
    those of all, and a run would resume from it without an error.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    for name, stack in list(experts.named_parameters()):
        # src_data_rank=None: every rank has the same stack, or one on the meta device.
        shard = distribute_tensor(stack.detach(), mesh, [Shard(0)], src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(shard, stack.requires_grad))
