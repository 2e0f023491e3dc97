"""What ddp_from_scratch.py measures with: a clock, the moments of a step, and the row of a way to average."""

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common import runtime
from lm import weights

# torch 2.11 does not have its successor
warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)
WARMUP_STEPS = 2  # not counted: DDP rebuilds its buckets after the first step


@dataclass
class Way:
    """A way to average gradients. DDP averages within backward, and the control never."""

    name: str
    net: nn.Module
    average: Callable[[], None] = lambda: None  # called after backward
    steps: list[dict] = field(default_factory=list)  # what was seen, an entry per step

    def __post_init__(self) -> None:
        # SGD moves by the gradient itself. Adam divides by its size and would hide one that is N times too large.
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)


@contextmanager
def watch(net: nn.Module) -> Iterator[dict]:
    """When the last gradient is computed, and each all-reduce as [bytes, start, end], but not those of DDP. On a GPU
    these are the times at which work was queued: only their order means something."""
    step: dict = {"all_reduces": []}
    real_all_reduce = dist.all_reduce

    def all_reduce(tensor: Tensor, **flags) -> dist.Work | None:
        seen = [tensor.nbytes, time.perf_counter(), None]
        step["all_reduces"].append(seen)
        work = real_all_reduce(tensor, **flags)
        if work is None:
            seen[2] = time.perf_counter()
        elif not tensor.is_cuda:
            work.get_future().then(lambda _: seen.__setitem__(2, time.perf_counter()))
        return work

    def gradient_is_there(_: Tensor) -> None:
        step["last_gradient"] = time.perf_counter()  # the next one overwrites it

    handles = [parameter.register_hook(gradient_is_there) for parameter in net.parameters()]
    with patch.object(dist, "all_reduce", all_reduce):
        yield step
    for handle in handles:
        handle.remove()


def train(way: Way, inputs: Tensor, targets: Tensor) -> None:
    """One training step, timed from the common start of all ranks until the slowest is done. The optimizer's part,
    which is the same for all, is not timed."""
    runtime.synchronize(inputs.device)
    dist.barrier()
    with watch(way.net) as step:
        step["start"] = time.perf_counter()
        loss = way.net(inputs, targets)
        step["forward_end"] = time.perf_counter()
        loss.backward()
        way.average()
        runtime.synchronize(inputs.device)
        step["seconds"] = max(runtime.all_gather(time.perf_counter() - step["start"]))
    way.optimizer.step()
    way.optimizer.zero_grad()
    step["loss"] = statistics.fmean(runtime.all_gather(loss.item()))  # the ranks' parts are equal
    way.steps.append(step)


@torch.no_grad()
def run(way: Way, control: Way, one_process: nn.Module, start: nn.Module) -> dict:
    """The row of a way that has been trained. What a step takes longer than the control's is exposed. Every rank must
    call it."""
    last, counted = way.steps[-1], way.steps[WARMUP_STEPS:]
    bucket_bytes = [size for size, _, _ in last["all_reduces"]]
    started_in_backward = sum(
        sent_from < last["last_gradient"] for _, sent_from, _ in last["all_reduces"]
    )
    net = way.net
    if isinstance(net, DistributedDataParallel):  # its all-reduces start in C++, unseen
        sizes = net._get_ddp_logging_data().get("rebuilt_bucket_sizes", "")
        bucket_bytes = [int(size) for size in sizes.split(",") if size]
        net, started_in_backward = net.module, None
    ours, whole, before = (
        nn.utils.parameters_to_vector(each.parameters()) for each in (net, one_process, start)
    )
    pairs = zip(counted, control.steps[WARMUP_STEPS:], strict=True)
    exposed = [
        own["seconds"] - without_communication["seconds"] for own, without_communication in pairs
    ]
    digests = runtime.all_gather(weights.digest(net))
    return {
        "name": way.name,
        "losses": [step["loss"] for step in way.steps],
        "weights": digests[0][:8],
        "weights_sha256": digests,
        "relative_error": ((ours - whole).norm() / (whole - before).norm()).item(),
        "bucket_bytes": bucket_bytes,
        "all_reduces": len(bucket_bytes),
        "started_in_backward": started_in_backward,
        "step_seconds": statistics.median(step["seconds"] for step in counted),
        "exposed_seconds": statistics.median(exposed),
        "min_exposed_seconds": min(exposed),
        "max_exposed_seconds": max(exposed),
        "fastest_step": min(counted, key=lambda step: step["seconds"]),  # moments of rank 0
    }
