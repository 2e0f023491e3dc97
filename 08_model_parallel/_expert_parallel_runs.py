"""What expert_parallel.py runs beside its proof: steps under forced routers, and trainings whose balance is counted."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from _expert_parallel_collectives import counts
from _expert_parallel_proof import mixtures, my_part, watch
from torch import Tensor, nn

from old import report, runtime
from old.step_cost import wait_for

TIMED_STEPS = 5  # of each routing, after one to warm up
COUNTED_STEPS = 10  # of a training, at its end


def in_turn(probabilities: Tensor, k: int) -> Tensor:
    """A router forced to be even: token 0 takes the first k experts, token 1 the next k, and so on over all ranks."""
    tokens, experts = probabilities.shape
    first = dist.get_rank() * tokens * k
    return torch.arange(first, first + tokens * k, device=probabilities.device).view(tokens, k) % experts


def always_the_first(probabilities: Tensor, k: int) -> Tensor:
    """A router forced to be skewed: every token takes the first k experts, which the first rank holds."""
    return torch.arange(k, device=probabilities.device).expand(len(probabilities), k)


def time_routings(net: nn.Module, compute_gradients: Callable, micro_batches: list[list[Tensor]]) -> list[dict]:
    """The same step under each router: the choices that each rank computes, and how long the slowest rank takes."""
    of_net = mixtures(net)[0].choose
    routings = {
        "the router's own": (of_net, None),
        "even": (in_turn, None),
        "skewed": (always_the_first, None),
        "skewed, capacity factor 1": (always_the_first, 1.0),
    }
    device = micro_batches[0][0].device
    my_micro_batches = [[my_part(tensor) for tensor in tensors] for tensors in micro_batches]
    rows = [{"routing": name} for name in routings]
    seconds: list[list[float]] = [[] for _ in routings]
    for turn in range(TIMED_STEPS + 1):
        for row, seconds_of_row, (choose, capacity_factor) in zip(rows, seconds, routings.values(), strict=True):
            for mixture in mixtures(net):
                mixture.choose, mixture.capacity_factor = choose, capacity_factor
            counts.clear()
            with watch(net, lambda mixture: (mixture.chosen, mixture.kept)) as seen:
                wait_for(device)
                dist.barrier()
                start = time.perf_counter()
                compute_gradients(net, my_micro_batches, balance_weight=0)
                wait_for(device)
                elapsed = time.perf_counter() - start
            net.zero_grad()
            if turn == 0:
                row.update(count_rows(seen, mixtures(net)[0].held))
                row["all_to_all_bytes_per_rank"] = runtime.gather(counts["all_to_all_bytes"])
            else:
                seconds_of_row.append(max(runtime.gather(elapsed)))
    for row, seconds_of_row in zip(rows, seconds, strict=True):
        row["step_seconds"] = report.spread(seconds_of_row)
    return rows


def count_rows(seen: list[tuple[Tensor, Tensor]], held: list[int]) -> dict:
    """Over all mixtures and micro-batches of a step: what the experts of each rank compute, and what is dropped."""
    chosen = sum(chosen.sum(0) for chosen, _ in seen)
    kept = sum(kept.sum(0) for _, kept in seen)
    return {
        "rows_by_rank": [experts.sum().item() for experts in kept.split(held)],
        "dropped": (chosen.sum() - kept.sum()).item(),
    }


def train_and_count(
    net: nn.Module,
    compute_gradients: Callable,
    balance_weight: float,
    steps: list[list[list[Tensor]]],
    learning_rate: float,
) -> dict:
    """Train with AdamW, and count the share of the choices that fell on each expert of each layer."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=learning_rate, fused=True)
    losses, chosen_of_steps = [], []
    for micro_batches in steps:
        my_micro_batches = [[my_part(tensor) for tensor in tensors] for tensors in micro_batches]
        with watch(net, lambda mixture: mixture.chosen.sum(0)) as seen:
            losses_of_step, _ = compute_gradients(net, my_micro_batches, balance_weight=balance_weight)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(losses_of_step)
        # A micro-batch after the other, and of each the layers: [micro-batches, layers, experts].
        chosen_of_steps.append(torch.stack(seen).unflatten(0, (len(micro_batches), -1)).sum(0))
    last = sum(chosen_of_steps[-COUNTED_STEPS:])
    return {
        "balance_weight": balance_weight,
        "cross_entropies": [loss for loss, _ in torch.stack(losses).tolist()],
        "balance_losses_per_layer": [loss / len(last) for _, loss in torch.stack(losses).tolist()],
        "first_shares": shares(chosen_of_steps[0]),
        "last_shares": shares(last),
    }


def shares(chosen: Tensor) -> list[list[float]]:
    """Of each layer, the share of each expert."""
    return (chosen / chosen.sum(1, keepdim=True)).tolist()
