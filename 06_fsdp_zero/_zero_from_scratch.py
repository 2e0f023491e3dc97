"""What zero_from_scratch.py measures: the bytes that each rank holds and sends, and how far it is from DDP."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from _shared import bytes_of_training, of_zero
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common import runtime
from common.traffic import Traffic

# What another order of the same sums may change, relative to the norm of a tensor. AdamW enlarges it: where a gradient
# is almost zero, rounding decides which way the weight goes.
TOLERANCE = 1e-3


@dataclass
class Baseline:
    """What DistributedDataParallel reaches, with an AdamW for all parameters on every rank."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float]  # of each global batch


def train_ddp(start: nn.Module, batches: list[list[Tensor]], learning_rate: float) -> Baseline:
    """The same batches and the same learning rate as every stage has."""
    net = copy.deepcopy(start)
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=learning_rate)
    losses = []
    for inputs, targets in batches:
        loss = ddp(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Baseline(net, optimizer, mean_over_ranks(losses))


def mean_over_ranks(losses: list[float]) -> list[float]:
    """The loss of each global batch: its parts are equal."""
    return [sum(of_ranks) / len(of_ranks) for of_ranks in zip(*runtime.gather(losses), strict=True)]


def run(make: Callable, train: Callable, batches: list[list[Tensor]], start: nn.Module, ddp: Baseline) -> dict:
    """A row: `make` a stage from a copy of `start`, `train` it, and compare it with DDP. Every rank must call it."""
    stage = make(copy.deepcopy(start))
    with Traffic() as sent:
        losses = train(stage, batches)
    weights = [tensor for group in stage.groups for tensor in (group.my_weights, group.weights)]
    row = {
        **bytes_of_training([*stage.net.parameters(), *weights], stage.optimizer),
        **{f"{kind}_per_step": sent.calls[kind] // len(batches) for kind in sent.calls},
        "bytes_sent_per_rank_per_step": round(sum(sent.bytes_sent.values()) / len(batches)),
    }
    of_ranks = runtime.gather(row)
    assert all(other == row for other in of_ranks), f"ranks differ: {of_ranks}"
    moments = collect(stage, lambda parameter: stage.optimizer.state[parameter]["exp_avg"])
    # where weights are not sharded, what forward uses on this rank: more than what AdamW has updated here
    sharded = any(group.weights.untyped_storage().nbytes() == 0 for group in stage.groups)
    weights = collect(stage, lambda parameter: parameter.detach()) if sharded else list(stage.net.parameters())
    ddp_weights = list(ddp.net.parameters())
    ddp_moments = [ddp.optimizer.state[parameter]["exp_avg"] for parameter in ddp_weights]
    zeros = [torch.zeros_like(moment) for moment in ddp_moments]
    return {
        **row,
        "losses": mean_over_ranks(losses),
        "max_relative_difference": largest_difference(weights, ddp_weights, list(start.parameters())),
        # AdamW divides by the gradients' size. With gradients N times too large it would reach almost the same weights,
        # but its first moment, their running mean, would be N times too large.
        "first_moment_max_relative_difference": largest_difference(moments, ddp_moments, zeros),
    }


def collect(stage, part_of: Callable[[nn.Parameter], Tensor]) -> list[Tensor]:
    """Whole tensors in the order of net.parameters(), from what AdamW has on each rank."""
    if not stage.groups:
        return [part_of(parameter) for parameter in stage.net.parameters()]
    whole = {}
    for group in stage.groups:
        mine = part_of(group.my_weights)
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        flat = torch.cat(parts)
        end = 0
        for parameter in group.parameters:
            begin, end = end, end + parameter.numel()
            whole[parameter] = flat[begin:end].view(parameter.shape)
    return [whole[parameter] for parameter in stage.net.parameters()]


@torch.no_grad()
def largest_difference(ours: list[Tensor], theirs: list[Tensor], before: list[Tensor]) -> float:
    """Over all tensors and ranks: the distance to the other, over the distance that the other has moved."""
    norm = torch.linalg.vector_norm
    differences = [(norm(a - b) / norm(b - c)).item() for a, b, c in zip(ours, theirs, before, strict=True)]
    return torch.tensor(runtime.gather(differences)).max().item()  # NaN if any is, which Python's max may drop


def check(rows: list[dict], ddp_losses: list[float], start: nn.Module, world_size: int) -> list[str]:
    for number, row in enumerate(rows):
        for name, expected in of_zero(number, start, world_size).items():
            assert row.get(name, 0) == expected, f"stage {number}: {name} is {row.get(name)}, and must be {expected:,}"
    differences = {
        "first moments": [row["first_moment_max_relative_difference"] for row in rows],
        "weights": [row["max_relative_difference"] for row in rows],
        "losses": [abs(a / b - 1) for row in rows for a, b in zip(row["losses"], ddp_losses, strict=True)],
    }
    for what, found in differences.items():
        for difference in found:
            assert difference <= TOLERANCE, f"{what} differ from those of DDP by {difference:.0e}: that is no rounding"
    largest = ", ".join(f"{what} {max(found):.1g}" for what, found in differences.items())
    return [
        "bytes held, calls and bytes sent are those of the formulas, padding included, on every rank",
        f"each stage ends where DistributedDataParallel does (tolerance {TOLERANCE:g}): {largest}",
    ]


def paper_gigabytes(number: int) -> float:
    """Rajbhandari et al. 2020, Figure 1: a rank's share of 7.5e9 parameters on 64 GPUs in mixed precision, 16 bytes
    each: 2 for the weight, 2 for the gradient, 12 for Adam's state and the fp32 weight."""
    weights, gradients, state = (2, 2, 12)
    shares = weights / (64 if number >= 3 else 1) + gradients / (64 if number >= 2 else 1)
    return 7.5 * (shares + state / (64 if number >= 1 else 1))
