"""Time the training steps of ddp_from_scratch.py, and compare the weights of its variants."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

from common import runtime
from training.digest import digest

WARMUP_STEPS = 2  # not counted: DDP rebuilds its buckets after the first step
# Of the distance that the weights have moved: what another order of the same sums may change.
TOLERANCE = 1e-4
TIMES = {
    "name": "variant",
    "step_seconds": "step",
    "exposed_seconds": "exposed",
}
CALLS = {
    "name": "variant",
    "all_reduces": "all-reduces",
    "started_in_backward": "started in backward",
    "weights": "SHA-256 of the weights",
}


def do_nothing() -> None:
    """Average nothing: DDP has averaged within backward, and variant (0) does not average."""


@dataclass
class Variant:
    """A model, and how its gradients are averaged."""

    name: str
    net: nn.Module
    average: Callable[[], None] = do_nothing  # called after backward
    steps: list[dict] = field(default_factory=list)  # what `watch` saw, one entry per step

    def __post_init__(self) -> None:
        # A step of SGD is proportional to the gradient. Adam divides by the gradient's size, which
        # would hide a gradient that is N times too large.
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)


# --- a training step


def train(variant: Variant, inputs: Tensor, targets: Tensor) -> None:
    """Train for one step, and time it until the slowest rank has its averaged gradients.

    The optimizer's part is the same for all variants, and is not timed. Every rank must call this.
    """
    runtime.synchronize(inputs.device)
    dist.barrier()  # all ranks start together
    with watch(variant.net) as step:
        step["start"] = time.perf_counter()
        loss = variant.net(inputs, targets)
        step["forward_end"] = time.perf_counter()
        loss.backward()
        variant.average()
        runtime.synchronize(inputs.device)
        own_seconds = time.perf_counter() - step["start"]
        step["seconds"] = max(runtime.all_gather(own_seconds))
    variant.optimizer.step()
    variant.optimizer.zero_grad()
    step["loss"] = statistics.fmean(runtime.all_gather(loss.item()))  # the shares are equal
    variant.steps.append(step)


@contextmanager
def watch(net: nn.Module) -> Iterator[dict]:
    """Record when the last gradient is computed, and each all-reduce as [bytes, start, end].

    DDP's all-reduces are not seen: they start in C++. On a GPU the times are those at which work
    was queued, and only their order has a meaning.
    """
    step: dict = {"all_reduces": []}
    real_all_reduce = dist.all_reduce

    def all_reduce(tensor: Tensor, **options) -> dist.Work | None:
        record = [tensor.nbytes, time.perf_counter(), None]
        step["all_reduces"].append(record)

        def note_end(_: object = None) -> None:
            record[2] = time.perf_counter()

        work = real_all_reduce(tensor, **options)
        if work is None:
            note_end()
        elif not tensor.is_cuda:
            work.get_future().then(note_end)
        return work

    def gradient_is_computed(_: Tensor) -> None:
        step["last_gradient"] = time.perf_counter()  # a later gradient overwrites it

    handles = [parameter.register_hook(gradient_is_computed) for parameter in net.parameters()]
    with patch.object(dist, "all_reduce", all_reduce):
        yield step
    for handle in handles:
        handle.remove()


# --- the results


@torch.no_grad()
def row_of(variant: Variant, control: Variant, one_process: nn.Module, start: nn.Module) -> dict:
    """Return the results of a variant after its last step. Every rank must call this."""
    net = variant.net
    last_step = variant.steps[-1]
    if isinstance(net, DistributedDataParallel):
        sizes = net._get_ddp_logging_data().get("rebuilt_bucket_sizes", "")
        bucket_bytes = [int(size) for size in sizes.split(",") if size]
        started_in_backward = None  # not seen
        net = net.module
    else:
        bucket_bytes = [size for size, _, _ in last_step["all_reduces"]]
        starts = [start_time for _, start_time, _ in last_step["all_reduces"]]
        started_in_backward = sum(moment < last_step["last_gradient"] for moment in starts)

    own_weights = parameters_to_vector(net.parameters())
    expected_weights = parameters_to_vector(one_process.parameters())
    moved = expected_weights - parameters_to_vector(start.parameters())

    steps = variant.steps[WARMUP_STEPS:]
    exposed = []
    for step, step_of_control in zip(steps, control.steps[WARMUP_STEPS:], strict=True):
        exposed.append(step["seconds"] - step_of_control["seconds"])

    digests = runtime.all_gather(digest(net))
    return {
        "name": variant.name,
        "losses": [step["loss"] for step in variant.steps],
        "weights": digests[0][:8],
        "weights_sha256": digests,
        "relative_error": ((own_weights - expected_weights).norm() / moved.norm()).item(),
        "bucket_bytes": bucket_bytes,
        "all_reduces": len(bucket_bytes),
        "started_in_backward": started_in_backward,
        "step_seconds": statistics.median(step["seconds"] for step in steps),
        "exposed_seconds": statistics.median(exposed),
        "min_exposed_seconds": min(exposed),
        "max_exposed_seconds": max(exposed),
        # as rank 0 saw them
        "fastest_step": min(steps, key=lambda step: step["seconds"]),
        "median_step": sorted(steps, key=lambda step: step["seconds"])[(len(steps) - 1) // 2],
    }


def check(rows: list[dict]) -> list[str]:
    """Assert that every variant but (0) reaches the weights of one process.

    Return a line for each thing that was checked.
    """
    control = rows[0]
    averaged = rows[1:]
    world_size = len(control["weights_sha256"])
    digests = [row["weights_sha256"] for row in averaged]
    for row in averaged:
        assert len(set(row["weights_sha256"])) == 1, (
            f"{row['name']}: ranks hold different weights: {row['weights_sha256']}"
        )
    checked = [f"in each variant that averages, all {world_size} ranks hold identical weights"]

    assert len(set(control["weights_sha256"])) == world_size, (
        "ranks that do not communicate hold the same weights: they read the same data"
    )
    checked.append(
        f"without communication, weights are {control['relative_error']:.0%} from those of one "
        "process"
    )

    assert digests[0] == digests[1], "starting the same all-reduces earlier has changed their sums"
    identical = all(ranks == digests[0] for ranks in digests)
    # a + b = b + a. With three terms the order matters, and the layout of a bucket determines it.
    assert identical or world_size > 2, (
        f"a sum of {world_size} terms came out differently: {digests}"
    )
    result = "identical weights" if identical else "equal weights up to rounding"
    checked.append(f"(1) to (4) and every bucket size give {result}")

    largest_error = max(row["relative_error"] for row in averaged)
    assert largest_error <= TOLERANCE, (
        f"weights differ from those of one process by {largest_error:.0e}: this is not rounding"
    )
    checked.append(
        "one process with the whole batch reaches the same weights "
        f"(relative error {largest_error:.0e} at most)"
    )

    for row in rows:
        count = len(row["bucket_bytes"])
        expected = 0
        if row["name"].startswith(("(2)", "(3)")):
            expected = count - 1  # the last starts when backward has no gradient left to compute
        assert row["started_in_backward"] in (None, expected), (
            f"{row['name']}: {row['started_in_backward']} of {count} all-reduces started in "
            "backward"
        )
    checked.append("(2) and (3) start each all-reduce but the last while backward runs")
    return checked
