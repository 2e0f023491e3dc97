"""Ranks whose inputs are uneven: what waits for ever, what join() does about it, and how to even them out. Below:
time as intervals, for the shares of a step.

stragglers.py runs this. Module weights are all that join() brings into line at the end: the optimizer state and the
learning rate schedule of a rank that ran out early stay behind.
"""

import statistics
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common import runtime

HANG_TIMEOUT = timedelta(seconds=5)


def batches_of(rank: int) -> int:
    """How many batches a rank has: uneven on purpose."""
    return 4 + 2 * rank


def count_samples(ddp: DistributedDataParallel, rank: int) -> None:
    """Train so that weight r grows by just what the samples of rank r weigh: its input is 1 there and 0 elsewhere."""
    sample = nn.functional.one_hot(torch.tensor(rank, device=ddp.device), ddp.module.in_features).float()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    for _ in range(batches_of(rank)):
        optimizer.zero_grad()
        (-ddp(sample)).sum().backward()
        optimizer.step()


def zeros(n: int, device: torch.device) -> nn.Linear:
    net = nn.Linear(n, 1, bias=False, device=device)
    nn.init.zeros_(net.weight)
    return net


def without_join(rank: int, n: int) -> list[int]:
    """The ranks that wait for one that never comes; a group of their own gives up after HANG_TIMEOUT, and the first
    to give up hangs up on the rest."""
    group = dist.new_group(backend="gloo", timeout=HANG_TIMEOUT)  # NCCL would end the process
    error = ""
    try:
        count_samples(DistributedDataParallel(zeros(n, torch.device("cpu")), process_group=group), rank)
    except RuntimeError as caught:
        error = str(caught)
    errors = runtime.gather(error)
    assert any("Timed out" in error for error in errors), f"no rank waited: {errors}"
    return [rank for rank in range(n) if errors[rank]]


def with_join(rank: int, n: int, device: torch.device, divide_by_initial: bool) -> list[float]:
    """How much the samples of each rank count in the end. AssertionError if ranks differ or it is wrong."""
    ddp = DistributedDataParallel(zeros(n, device))
    with ddp.join(divide_by_initial_world_size=divide_by_initial):
        count_samples(ddp, rank)
    weights = runtime.gather(ddp.module.weight.flatten().tolist())
    assert all(other == weights[0] for other in weights), f"ranks hold different weights: {weights}"
    for owner, weight in enumerate(weights[0]):
        active = [sum(batches_of(r) > step for r in range(n)) for step in range(batches_of(owner))]
        right = sum(1 / (n if divide_by_initial else left) for left in active)
        assert abs(weight - right) < 1e-5, f"rank {owner}'s samples weigh {weight}, not {right}"
    return weights[0]


def balance(lengths: list[int], n: int) -> list[list[int]]:
    """Sequences for each of n ranks, of about equal tokens: longest first, each to who has the fewest so far."""
    shares: list[list[int]] = [[] for _ in range(n)]
    for length in sorted(lengths, reverse=True):
        min(shares, key=sum).append(length)
    return shares


def waiting_share(shares: list[list[int]]) -> float:
    """The part of all ranks' time that is spent waiting for the one with the most tokens."""
    tokens = [sum(share) for share in shares]
    return 1 - statistics.mean(tokens) / max(tokens)


def uneven_inputs(device: torch.device) -> tuple[dict, list[str]]:
    """Run out of batches without join() and with it: what each rank's samples weigh, and what was checked."""
    rank, n = dist.get_rank(), dist.get_world_size()
    found = {
        "samples": [batches_of(r) for r in range(n)],
        "weights_divided_by_all": with_join(rank, n, device, divide_by_initial=True),
        "weights_divided_by_left": with_join(rank, n, device, divide_by_initial=False),
        "hung_ranks_without_join": without_join(rank, n),
    }
    hung = found["hung_ranks_without_join"]
    assert hung == list(range(1, n)), f"ranks {hung} hung, not all that have more batches than rank 0"
    for key in ("weights_divided_by_all", "weights_divided_by_left"):
        of_each = [weight / samples for weight, samples in zip(found[key], found["samples"], strict=True)]
        text = ", ".join(f"{weight:.3f}" for weight in of_each)
        runtime.say(f"uneven inputs, join(), {key.replace('_', ' ')}: a sample of each rank counts {text}")
    return found, [
        f"uneven inputs without join(): ranks {hung} waited for rank 0 until the timeout",
        f"with join() all {n} ranks end with equal weights, and with the weights computed by hand",
    ]


def waiting_shares() -> dict[str, float]:
    """64 sequences on 8 ranks, computed: the share of time that ranks wait for the one with the most tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(64).log_normal_(6, 1, generator=generator).int().clamp(1, 2048)
    as_they_come, balanced = waiting_share(lengths.view(8, 8).tolist()), waiting_share(balance(lengths.tolist(), 8))
    text = f"{as_they_come:.1%} of the time as they come, {balanced:.1%} balanced by tokens"
    runtime.say(f"64 sequences of uneven length on 8 ranks, computed: ranks wait {text}")
    return {"as they come": as_they_come, "balanced": balanced}


Intervals = list[tuple[float, float]]


def union(intervals: Intervals) -> Intervals:
    """The same time as intervals in order that do not overlap."""
    found: Intervals = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def length_of(intervals: Intervals) -> float:
    return sum(end - start for start, end in intervals)


def without(intervals: Intervals, others: Intervals) -> Intervals:
    """What of `intervals` none of the `others` covers; both as union() gives them."""
    found: Intervals = []
    for start, end in intervals:
        for other_start, other_end in others:
            if other_start < end and other_end > start:
                found.append((start, max(start, other_start)))
                start = max(start, other_end)
        found.append((start, end))
    return [(start, end) for start, end in found if start < end]
