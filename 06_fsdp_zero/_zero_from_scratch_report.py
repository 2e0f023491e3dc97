"""The reporting side of zero_from_scratch.py: what each rank holds and sends, and whether that is what it must be."""

import argparse
import copy
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from _zero_from_scratch_collectives import counts
from _zero_from_scratch_memory import measure_memory
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from old import hardware, report, runtime

# What another order of the same sums may change, relative to the norm of a tensor. AdamW enlarges it: where a gradient
# is almost zero, rounding decides which way the weight goes.
TOLERANCE = 1e-3
STAGES = ["(0) data parallelism", "(1) optimizer state", "(2) and gradients", "(3) and weights"]  # what is sharded


def expect(number: int, start: nn.Module, world_size: int) -> dict[str, int]:
    """What a stage must hold and send, from the model's shape alone."""
    parameters = sum(parameter.numel() for parameter in start.parameters())
    blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in start.model.layers.values()]
    groups = [parameters] if number == 1 else [*blocks, parameters - sum(blocks)]
    part = sum(math.ceil(size / world_size) for size in groups)
    whole = parameters if number == 0 else part * world_size  # with padding
    updated_tensors = len(list(start.parameters())) if number == 0 else len(groups)
    trips = 3 if number == 3 else 2
    return {
        "parameter_bytes_per_rank": 4 * (part if number == 3 else whole),
        "gradient_bytes_per_rank": 4 * (part if number >= 2 else whole),
        # two moments of each element, and of each tensor the number of steps so far
        "optimizer_bytes_per_rank": 8 * (part if number >= 1 else whole) + 4 * updated_tensors,
        "other_bytes_per_rank": 0,
        "all_gathers_per_step": (0, 1, len(groups), 2 * len(groups))[number],
        "reduce_scatters_per_step": (0, 1, len(groups), len(groups))[number],
        "all_reduces_per_step": updated_tensors if number == 0 else 0,
        "bytes_sent_per_rank_per_step": round(trips * 4 * whole * (world_size - 1) / world_size),
    }


@dataclass
class Baseline:
    """What DistributedDataParallel reaches, with an AdamW for all parameters on every rank."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float]


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
    return Baseline(net, optimizer, losses)


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


def describe(
    number: int, stage, losses: list[float], live_before: dict[int, int], ddp: Baseline, start: nn.Module
) -> dict:
    """A stage after its last step, as --json has it. Every rank must call it."""
    seen = Counter(counts)
    counts.clear()
    world_size = dist.get_world_size()
    steps = len(losses)
    assert all(count % steps == 0 for count in seen.values()), f"not the same in each of {steps} steps: {seen}"
    row = {
        "stage": number,
        **measure_memory(stage, live_before),
        "all_gathers_per_step": seen["all_gathers"] // steps,
        "reduce_scatters_per_step": seen["reduce_scatters"] // steps,
        "all_reduces_per_step": seen["all_reduces"] // steps,
        "bytes_sent_per_rank_per_step": round(seen["bytes"] // steps * (world_size - 1) / world_size),
    }
    row_of_each_rank = runtime.gather(row)
    assert all(other == row for other in row_of_each_rank), f"ranks differ: {row_of_each_rank}"

    moments = collect(stage, lambda parameter: stage.optimizer.state[parameter]["exp_avg"])
    # Up to stage 2, what forward uses on this rank, which is more than what AdamW has updated here.
    weights = list(stage.net.parameters())
    if number == 3:
        weights = collect(stage, lambda parameter: parameter.detach())
    ddp_weights = list(ddp.net.parameters())
    ddp_moments = [ddp.optimizer.state[parameter]["exp_avg"] for parameter in ddp_weights]
    zeros = [torch.zeros_like(moment) for moment in ddp_moments]
    row["max_relative_difference"] = largest_difference(weights, ddp_weights, list(start.parameters()))
    row["first_moment_max_relative_difference"] = largest_difference(moments, ddp_moments, zeros)
    row["losses"] = mean_over_ranks(losses)
    return row


def mean_over_ranks(losses: list[float]) -> list[float]:
    """The loss of each global batch: its parts are equal."""
    return [sum(of_ranks) / len(of_ranks) for of_ranks in zip(*runtime.gather(losses), strict=True)]


def check(rows: list[dict], ddp_losses: list[float], start: nn.Module, world_size: int) -> None:
    """What the script teaches; fails where it does not hold."""
    for number, row in enumerate(rows):
        for name, expected in expect(number, start, world_size).items():
            assert row[name] == expected, f"stage {number}: {name} is {row[name]:,}, and must be {expected:,}"
    print("checked: bytes held, calls and bytes sent are those of the formulas, padding included, on every rank")
    losses = [abs(a / b - 1) for row in rows for a, b in zip(row["losses"], ddp_losses, strict=True)]
    differences = {
        # AdamW divides by the gradients' size. With gradients N times too large it would reach almost the same weights,
        # but its first moment, their running mean, would be N times too large.
        "first moments": [row["first_moment_max_relative_difference"] for row in rows],
        "weights": [row["max_relative_difference"] for row in rows],
        "losses": losses,
    }
    for what, found in differences.items():
        for difference in found:
            assert difference <= TOLERANCE, f"{what} differ from those of DDP by {difference:.0e}: that is no rounding"
    told = ", ".join(f"{what} {max(found):.1g}" for what, found in differences.items())
    print(f"checked: each stage ends where DistributedDataParallel does (tolerance {TOLERANCE:g}): {told}")


def paper_bytes(number: int, parameters: float, n: int) -> float:
    """Rajbhandari et al. 2020, Figure 1: bytes per GPU in mixed precision with Adam, K = 12."""
    weights, gradients, optimizer_state = 2 * parameters, 2 * parameters, 12 * parameters
    return (
        weights / (n if number >= 3 else 1)
        + gradients / (n if number >= 2 else 1)
        + optimizer_state / (n if number else 1)
    )


def memory_table(rows: list[dict]) -> str:
    formulas = ["16P", "4P + 12P/N", "2P + 14P/N", "16P/N"]
    lines = [["sharded", "weights", "gradients", "AdamW state", "together", "ZeRO paper, P = 7.5e9, N = 64 GPUs"]]
    for row in rows:
        held = [row[f"{kind}_bytes_per_rank"] for kind in ("parameter", "gradient", "optimizer")]
        of_paper = paper_bytes(row["stage"], 7.5e9, 64) / 1e9
        lines.append(
            [
                STAGES[row["stage"]],
                *(f"{size / 2**20:.2f} MiB" for size in (*held, sum(held))),
                f"{formulas[row['stage']]} = {of_paper:.1f} GB",
            ]
        )
    return report.table(lines)


def communication_table(rows: list[dict], weight_bytes: int) -> str:
    lines = [["sharded", "all-reduces", "reduce-scatters", "all-gathers", "sent", "weights' difference from DDP"]]
    for row in rows:
        sent = row["bytes_sent_per_rank_per_step"]
        lines.append(
            [
                STAGES[row["stage"]],
                *(f"{row[name + '_per_step']:g}" for name in ("all_reduces", "reduce_scatters", "all_gathers")),
                f"{sent / 2**20:.2f} MiB = {sent / weight_bytes:.2f} P",
                f"{row['max_relative_difference']:.1g}",
            ]
        )
    return report.table(lines)


def conclude(
    rows: list[dict],
    ddp: Baseline,
    args: argparse.Namespace,
    batches: list[list[Tensor]],
    start: nn.Module,
    device: torch.device,
    began: float,
) -> None:
    """Say what was measured, then whether what the script teaches holds. Every rank must call it."""
    ddp_losses = mean_over_ranks(ddp.losses)
    if not runtime.is_rank0():
        return
    world_size = dist.get_world_size()
    parameters = sum(parameter.numel() for parameter in start.parameters())
    print(f"{args.model}: {parameters:,} parameters (P) in fp32, {args.steps} steps, N = {world_size}\n")
    print("Bytes that a rank holds after a step. Within a step (2) and (3) also hold the whole group that is in use.")
    print(memory_table(rows))
    print("\nWhat a rank calls and sends in a step, in a ring: (N-1)/N P each time that all weights or all gradients")
    print("go around. That is twice in (0) to (2), up to 2 P, and three times in (3), up to 3 P.")
    print(communication_table(rows, 4 * parameters))
    print()
    summary = {
        "device": hardware.device_name(device),
        "world_size": world_size,
        "dtype": "fp32",
        "model": args.model,
        "parameters": parameters,
        "steps": args.steps,
        "tokens": world_size * sum(inputs.numel() for inputs, _ in batches),
        "first_loss": ddp_losses[0],
        "last_loss": ddp_losses[-1],
        "peak_memory_bytes": report.peak_memory_bytes(device),
        "seconds": time.perf_counter() - began,
        "rows": rows,
    }
    report.write_json(summary, args.json)
    check(rows, ddp_losses, start, world_size)
