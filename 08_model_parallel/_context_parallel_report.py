"""The reporting side of context_parallel.py: does each way train as one process does, and what does it send?"""

import argparse
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from _context_parallel_collectives import counts
from _context_parallel_growth import check_growth, growth_table, measure_growth
from torch import Tensor, nn

from old import checkpoint, hardware, metrics, report, runtime, shapes

TOLERANCE = 1e-5  # relative: what another order of the same fp32 sums may change


@dataclass
class Trainee:
    """A model that attends in one way, and what it has done so far."""

    name: str
    order: str | None  # of the tokens on the ranks; None: one process has them all
    net: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    gradient_differences: list[float] = field(default_factory=list)  # the largest of a step
    gradient_norms: list[float] = field(default_factory=list)  # before clipping
    counted: Counter = field(default_factory=Counter)


@torch.no_grad()
def note_step(trainee: Trainee, loss: Tensor, baseline: Trainee) -> None:
    """Keep a step's loss and counts, and how far its gradients are from the baseline's, before they are clipped."""
    trainee.losses.append(loss.item())
    trainee.gradient_norms.append(nn.utils.get_total_norm([p.grad for p in trainee.net.parameters()]).item())
    trainee.counted.update(counts)
    counts.clear()
    if trainee is not baseline:
        trainee.gradient_differences.append(gradient_difference(trainee.net, baseline.net))


def gradient_difference(net: nn.Module, other: nn.Module) -> float:
    """The largest over the parameters: the distance of two gradients, over the norm of the second."""
    least = metrics.least_norm(parameter.grad for parameter in other.parameters())
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    distances = [(p.grad - q.grad).norm() / q.grad.norm().clamp_min(least) for p, q in pairs]
    return torch.stack(distances).max().item()


def expected_counts(name: str, config: shapes.Config, args: argparse.Namespace, world_size: int) -> dict[str, int]:
    """What a rank calls and sends in a step, from the shape alone."""
    n = world_size
    forwards = config.num_hidden_layers * (args.global_batch_size // args.micro_batch_size)
    tokens = args.micro_batch_size * args.seq_len // n  # of a rank in a forward
    q_bytes = 4 * tokens * config.num_attention_heads * config.head_dim
    kv_bytes = 2 * 4 * tokens * config.num_key_value_heads * config.head_dim
    calls = dict.fromkeys(("all_gathers", "reduce_scatters", "all_to_alls", "rounds", "sends"), 0)
    if name == "all-gather":
        calls |= {"all_gathers": 1, "reduce_scatters": 1}
        sent = 2 * (n - 1) * kv_bytes
    elif name == "Ulysses":
        calls |= {"all_to_alls": 4}
        sent = 2 * (n - 1) * (2 * q_bytes + kv_bytes) // n
    else:
        # keys and values make n - 1 hops in forward and in backward, their gradients n in backward
        calls |= {"rounds": 2 * n, "sends": 3 * n - 2} if n > 1 else {}
        sent = (3 * n - 2) * kv_bytes if n > 1 else 0
    weight_bytes = 4 * (shapes.parameter_count(config) + 1)  # and the loss
    return {
        **{f"{call}_per_step": forwards * count for call, count in calls.items()},
        "bytes_sent_per_rank_per_step": forwards * sent,
        "all_reduces_per_step": 1,
        "weight_gradient_bytes_sent_per_rank_per_step": round(2 * weight_bytes * (n - 1) / n),
    }


def expected_scores(name: str, seq_len: int, rank: int, world_size: int) -> int:
    """Score elements that a rank computes in ring attention, for one head of one sequence."""
    if name == "ring, contiguous":
        chunk = seq_len // world_size
        return (rank + 1) * chunk**2
    if name == "ring, zigzag":
        chunk = seq_len // (2 * world_size)
        return (2 * world_size + 1) * chunk**2  # on every rank
    return 0  # counted for ring attention alone


def loss_difference(losses: list[float], others: list[float]) -> float:
    """The largest over the steps, relative to the others."""
    losses, others = torch.tensor(losses), torch.tensor(others)
    return (losses / others - 1).abs().max().item()


def largest(values: list[float]) -> float:
    """NaN if any is, which Python's max may drop."""
    return torch.tensor(values).max().item()


def describe(trainee: Trainee, baseline: Trainee, config: shapes.Config, args: argparse.Namespace) -> dict:
    """A way after its last step, as --json has it. Every rank must call it."""
    world_size = dist.get_world_size()
    uneven = {name: count for name, count in trainee.counted.items() if count % args.steps}
    assert not uneven, f"{trainee.name}: not the same in each of {args.steps} steps: {uneven}"
    per_step = Counter({name: count // args.steps for name, count in trainee.counted.items()})
    # forward computes each score, and backward computes it again
    times = 2 * config.num_hidden_layers * (args.global_batch_size // args.micro_batch_size)
    row = {
        "name": trainee.name,
        "losses": trainee.losses,
        "loss_max_relative_difference": loss_difference(trainee.losses, baseline.losses),
        "gradient_max_relative_difference": largest(trainee.gradient_differences),
        "all_gathers_per_step": per_step["all_gathers"],
        "reduce_scatters_per_step": per_step["reduce_scatters"],
        "all_to_alls_per_step": per_step["all_to_alls"],
        "rounds_per_step": per_step["rounds"],
        "sends_per_step": per_step["sends"],
        "bytes_sent_per_rank_per_step": per_step["bytes"],
        "all_reduces_per_step": per_step["all_reduces"],
        "weight_gradient_bytes_sent_per_rank_per_step": round(per_step["weight_bytes"] * (world_size - 1) / world_size),
    }
    assert per_step["scores"] % times == 0, f"{trainee.name}: layers differ in their scores"
    of_ranks = runtime.gather((row, per_step["scores"], checkpoint.digest(trainee.net)))
    assert len({digest for *_, digest in of_ranks}) == 1, f"{trainee.name}: ranks hold different weights"
    for rank, (other, *_) in enumerate(of_ranks):
        different = [key for key in row if "per_step" in key and other[key] != row[key]]
        assert not different, f"{trainee.name}: rank {rank} differs in {different}"
    worst = [other["gradient_max_relative_difference"] for other, *_ in of_ranks]
    row["gradient_max_relative_difference"] = largest(worst)
    row["scores_of_each_rank"] = [scores // times for _, scores, _ in of_ranks]
    return row


def check(rows: list[dict], config: shapes.Config, args: argparse.Namespace) -> None:
    """What the script teaches; fails where it does not hold."""
    world_size = len(rows[0]["scores_of_each_rank"])
    for row in rows:
        name = row["name"]
        for key, expected in expected_counts(name, config, args, world_size).items():
            assert row[key] == expected, f"{name}: {key} is {row[key]:,}, and must be {expected:,}"
        found = row["scores_of_each_rank"]
        expected = [expected_scores(name, args.seq_len, rank, world_size) for rank in range(world_size)]
        assert found == expected, f"{name}: the ranks compute {found} scores, and must compute {expected}"
    print("checked: calls, bytes and score elements are those of the formulas, on every rank")
    for row in rows:
        for what in ("loss", "gradient"):
            found = row[f"{what}_max_relative_difference"]
            assert found <= TOLERANCE, f"{row['name']}: {what} differs from that of one process by {found:.0e}"
    worst = [max(row[f"{what}_max_relative_difference"] for row in rows) for what in ("loss", "gradient")]
    print(
        f"checked: {len(rows[0]['losses'])} steps are those of one process (tolerance {TOLERANCE:g}): losses differ by "
        f"{worst[0]:.1g}, gradients of each parameter by {worst[1]:.1g}; all ranks hold the same weights, to the bit"
    )


FORMULAS = {"all-gather": "2 (N-1) KV", "Ulysses": "2 (N-1)/N (2 Q + KV)", "ring": "(3 N-2) KV"}


def communication_table(rows: list[dict]) -> str:
    lines = [["way", "calls", "sent", "formula, a layer and micro-batch", "gradients' difference"]]
    for row in rows:
        calls = {kind: row[f"{kind}_per_step"] for kind in ("all_gathers", "reduce_scatters", "all_to_alls", "rounds")}
        told = [f"{count} {kind.replace('_', '-')}" for kind, count in calls.items() if count]
        lines.append(
            [
                row["name"],
                ", ".join(told) or "none",
                f"{row['bytes_sent_per_rank_per_step'] / 2**20:.3f} MiB",
                FORMULAS[row["name"].split(",")[0]],
                f"{row['gradient_max_relative_difference']:.1g}",
            ]
        )
    return report.table(lines)


def print_balance(rows: list[dict], seq_len: int) -> None:
    """Who computes how much in ring attention. The others wait for the busiest rank."""
    rings = [row for row in rows if row["name"].startswith("ring")]
    if not rings:
        return
    scores = [row["scores_of_each_rank"] for row in rings]
    lines = [["rank", *(row["name"] for row in rings)]]
    lines += [
        [str(rank), *(f"{score:,}" for score in of_ways)] for rank, of_ways in enumerate(zip(*scores, strict=True))
    ]
    busiest = [max(of_way) * len(of_way) / sum(of_way) for of_way in scores]
    lines.append(["busiest / mean", *(f"{ratio:.2f}" for ratio in busiest)])
    needed = seq_len * (seq_len + 1) // 2
    print(f"\nScore elements that each rank computes, of a head and a sequence. The mask shows {needed:,} in all.")
    print(report.table(lines))


def conclude(
    args: argparse.Namespace,
    config: shapes.Config,
    baseline: Trainee,
    trainees: list[Trainee],
    forward_backward: Callable,
    device: torch.device,
    began: float,
) -> None:
    """Say what was measured, then whether what the script teaches holds. Every rank must call it."""
    world_size = dist.get_world_size()
    rows = [describe(trainee, baseline, config, args) for trainee in trainees]
    growth = measure_growth([baseline, *trainees], forward_backward, args.seq_len, config, device)
    peak_memory = max(runtime.gather(report.peak_memory_bytes(device)))
    if not runtime.is_rank0():
        return
    parameters = shapes.parameter_count(config)
    print(f"{args.model}: {parameters:,} parameters in fp32, sequences of {args.seq_len} tokens, N = {world_size}\n")
    print("What a rank calls and sends in a step, for attention. Q, KV: bytes of its queries, of its keys and values.")
    print(communication_table(rows))
    weight_bytes = rows[0]["weight_gradient_bytes_sent_per_rank_per_step"]
    print(f"Beside that, {weight_bytes / 2**20:.1f} MiB for the gradients of the weights, as in data parallelism.")
    print_balance(rows, args.seq_len)
    print("\nOne sequence, forward and backward without the sum of gradients, on the rank with the most:")
    print(growth_table(growth))
    print()
    summary = {
        "device": hardware.device_name(device),
        "world_size": world_size,
        "dtype": "fp32",
        "model": args.model,
        "parameters": parameters,
        "steps": args.steps,
        "tokens": args.steps * args.global_batch_size * args.seq_len,
        "first_loss": baseline.losses[0],
        "last_loss": baseline.losses[-1],
        "peak_memory_bytes": peak_memory,
        "seconds": time.perf_counter() - began,
        "clipped_steps": sum(norm > args.clip_norm for norm in baseline.gradient_norms),
        "losses": baseline.losses,
        "rows": rows,
        "growth": growth,
    }
    report.write_json(summary, args.json)
    check_growth(growth, world_size)
    check(rows, config, args)
