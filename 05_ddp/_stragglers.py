"""Ranks whose inputs are uneven, for stragglers.py: what waits for ever without join(), and what join() does about it.

Module weights are all that join() brings into line at the end: the optimizer state and the learning rate schedule of a
rank that ran out early stay behind.
"""

from contextlib import nullcontext
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


def train(device: torch.device, group: dist.ProcessGroup | None, join: bool) -> list[float]:
    """All of each rank's batches, with SGD at a learning rate of 1. Weight r grows by just what the samples of rank r
    count in the mean: their input is 1 there and 0 elsewhere."""
    rank, n = dist.get_rank(), dist.get_world_size()
    net = nn.Linear(n, 1, bias=False, device=device)
    nn.init.zeros_(net.weight)
    ddp = DistributedDataParallel(net, process_group=group)
    sample = nn.functional.one_hot(torch.tensor(rank, device=device), n).float()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    with ddp.join() if join else nullcontext():
        for _ in range(batches_of(rank)):
            optimizer.zero_grad()
            (-ddp(sample)).sum().backward()
            optimizer.step()
    return net.weight.flatten().tolist()


def uneven_inputs(device: torch.device) -> list[str]:
    """Run out of batches with join() and without it; returns what was checked. Every rank must call it."""
    n = dist.get_world_size()
    weights = runtime.all_gather(train(device, None, join=True))
    # join() divides every sum by all n ranks, also when some have left: so all samples count alike
    expected = [batches_of(rank) / n for rank in range(n)]
    assert all(found == weights[0] for found in weights), (
        f"ranks end with different weights: {weights}"
    )
    right = torch.allclose(torch.tensor(weights[0]), torch.tensor(expected))
    assert right, f"ranks end with the weights {weights[0]}, not with {expected}"

    group = dist.new_group(backend="gloo", timeout=HANG_TIMEOUT)  # NCCL would end the process
    error = ""
    try:
        train(torch.device("cpu"), group, join=False)
    except RuntimeError as caught:
        error = str(caught)
    errors = runtime.all_gather(error)
    # the first rank to give up hangs up on the others, so that not each of them speaks of time
    hung = [rank for rank in range(n) if errors[rank]]
    assert any("Timed out" in error for error in errors), f"no rank waited: {errors}"
    assert hung == list(range(1, n)), (
        f"ranks {hung} hung, not all that have more batches than rank 0"
    )
    return [
        f"uneven inputs: with join() all {n} ranks end with the same weights, in which every sample counts alike",
        f"without join() ranks {hung} waited for rank 0 until the timeout",
    ]
