"""The clock of ddp_from_scratch.py: how long a step takes, how long its all-reduces alone, and what happens when."""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)  # torch 2.11 does not have its successor
WARMUP_STEPS = 2  # not counted: DDP rebuilds its buckets after the first step


@dataclass
class Record:
    """What was seen of one variant: an entry per step."""

    losses: list[Tensor] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    communication_seconds: list[float] = field(default_factory=list)
    timelines: list[dict] = field(default_factory=list)


def timed(work: Callable, *args) -> tuple[object, float]:
    """The result, and this rank's seconds from the common start of all ranks to the end of its work."""
    on_gpu = torch.cuda.is_initialized()
    if on_gpu:
        torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    result = work(*args)
    if on_gpu:
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


def of_slowest_rank(seconds: list[float]) -> list[float]:
    """The same measurements as the slowest rank made them: nobody can go on before it. Every rank must call it."""
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


def communicate(variant, gradients: Tensor) -> None:
    """The all-reduces of a step and nothing else: one after the other, or all under way at once."""
    under_way = []
    for part in gradients.split(variant.bucket_sizes):
        work = dist.all_reduce(part, async_op=variant.overlaps)
        if work is not None:
            under_way.append(work)
    for work in under_way:
        work.wait()


def update_bucket_sizes(variant) -> None:
    """DDP makes buckets of its own, and makes them anew after its first step."""
    if variant.forward is variant.net:
        return
    rebuilt = variant.forward._get_ddp_logging_data().get("rebuilt_bucket_sizes")
    if rebuilt:
        variant.bucket_sizes = [int(size) // 4 for size in rebuilt.split(",")]  # bytes of fp32


@contextmanager
def watch(net: nn.Module) -> Iterator[dict]:
    """Note when forward starts and ends, when the last gradient is computed, and when each all-reduce starts and ends.

    On a GPU the times are those at which the work was queued; only their order means something. DDP's own all-reduces
    are started in C++ and are not seen.
    """
    timeline: dict = {"all_reduces": []}
    real_all_reduce = dist.all_reduce

    def forward_starts(*_) -> None:
        timeline["start"] = time.perf_counter()

    def forward_ended(*_) -> None:
        timeline["forward_end"] = time.perf_counter()

    def gradient_computed(_) -> None:
        timeline["last_gradient"] = time.perf_counter()  # the last one to come overwrites the others

    def all_reduce(tensor: Tensor, *args, **flags):
        seen = {"bytes": tensor.nbytes, "start": time.perf_counter(), "end": None}
        timeline["all_reduces"].append(seen)
        work = real_all_reduce(tensor, *args, **flags)

        def ended(_) -> None:
            seen["end"] = time.perf_counter()

        if work is None:
            ended(None)
        elif not tensor.is_cuda:
            work.get_future().then(ended)
        return work

    handles = [net.register_forward_pre_hook(forward_starts), net.register_forward_hook(forward_ended)]
    handles += [parameter.register_hook(gradient_computed) for parameter in net.parameters()]
    dist.all_reduce = all_reduce
    try:
        yield timeline
    finally:
        dist.all_reduce = real_all_reduce
        for handle in handles:
            handle.remove()


def measure_step(step: Callable, variant, record: Record, inputs: Tensor, targets: Tensor) -> None:
    with watch(variant.net) as timeline:
        loss, seconds = timed(step, variant, inputs, targets)
    record.losses.append(loss)
    record.step_seconds.append(seconds)
    record.timelines.append(timeline)


def measure_communication(variant, record: Record, gradients: Tensor) -> None:
    update_bucket_sizes(variant)
    if variant.bucket_sizes:
        _, seconds = timed(communicate, variant, gradients)
        record.communication_seconds.append(seconds)
