"""DistributedDataParallel rebuilt in three steps on all_reduce, then the real one: the same weights.

Data parallelism adds one thing to training: before the optimizer step, each gradient is averaged over the ranks.
(1) one by one after backward, (2) each in a hook while backward runs, (3) in hooks and buckets, (4) in C++, as (3). A
control, (0), sends nothing. What a step takes longer than the control's is exposed communication.

    laptop    python 05_ddp/ddp_from_scratch.py
    one node  torchrun --nproc_per_node=8 05_ddp/ddp_from_scratch.py --model llama-124m --seq-len 512
    cluster   the same on every node, with --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400

Overlap saves time only where communication needs none of backward's cores. Two ranks on two cores share them: nothing
is hidden. ../benchmarks/slow_link.sh puts them on two hosts with a slow link, where waiting costs no core.

Look for: the exposed time from (1) to (4); one bucket for everything, which hides nothing; equal hashes where weights
are equal to the bit. Before: train.py. Next: collectives.py.
"""

import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from _ddp_from_scratch import WARMUP_STEPS, Way, run, train

from common import exits, report, runtime
from lm import data, shapes, weights

# of the distance that the weights have moved: what another order of the same sums may change
TOLERANCE = 1e-4


def average_gradients(net: nn.Module) -> None:
    """(1) Data parallelism in four lines: after backward, every rank ends with the mean gradient."""
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


# What (1) lacks: nothing travels while backward computes, and nothing is computed while the gradients travel.


def average_in_hooks(net: nn.Module) -> Callable[[], None]:
    """(2) Start the all-reduce of a gradient as soon as backward has computed it.

    Registers hooks that do so. Returns a function to call after backward: it waits for what is still under way.
    """
    under_way: list[tuple[dist.Work, nn.Parameter]] = []

    def gradient_is_ready(parameter: nn.Parameter) -> None:
        work = dist.all_reduce(parameter.grad, async_op=True)
        under_way.append((work, parameter))

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(gradient_is_ready)

    def wait_for_all() -> None:
        for work, parameter in under_way:
            work.wait()
            parameter.grad /= dist.get_world_size()
        under_way.clear()

    return wait_for_all


# What (2) lacks: it makes a call per parameter, 56 for nano, and each call costs a latency. Fewer, larger calls help.


def make_buckets(net: nn.Module, cap_bytes: float) -> list[list[nn.Parameter]]:
    """Each parameter in one bucket, last layer first: about the order in which backward computes gradients."""
    buckets, room = [], 0.0
    for parameter in reversed(list(net.parameters())):
        if not buckets or parameter.nbytes > room:
            buckets.append([])
            room = cap_bytes
        buckets[-1].append(parameter)
        room -= parameter.nbytes
    return buckets


def average_buckets(buckets: list[list[nn.Parameter]]) -> Callable[[], None]:
    """(3) As (2), but a bucket of gradients leaves in one call, as soon as its last one is there."""
    bucket_of = {parameter: index for index, bucket in enumerate(buckets) for parameter in bucket}
    gradients_missing = [len(bucket) for bucket in buckets]
    under_way: list[tuple[dist.Work, Tensor]] = []

    def gradient_is_ready(parameter: nn.Parameter) -> None:
        gradients_missing[bucket_of[parameter]] -= 1
        # Ranks match collectives by their order alone. So a bucket that is ready waits for its turn.
        # as many as have left
        while (turn := len(under_way)) < len(buckets) and gradients_missing[turn] == 0:
            flat = torch.cat([p.grad.flatten() for p in buckets[turn]])
            work = dist.all_reduce(flat, async_op=True)
            under_way.append((work, flat))

    for parameter in bucket_of:
        parameter.register_post_accumulate_grad_hook(gradient_is_ready)

    def wait_for_all() -> None:
        for index, (work, flat) in enumerate(under_way):
            work.wait()
            flat /= dist.get_world_size()
            parts = flat.split([parameter.numel() for parameter in buckets[index]])
            for parameter, part in zip(buckets[index], parts, strict=True):
                parameter.grad = part.view_as(parameter)  # a view: nothing is copied back
            gradients_missing[index] = len(buckets[index])
        under_way.clear()

    return wait_for_all


# What (3) lacks: the hooks run in Python. (4), DistributedDataParallel, has them in C++ and can also skip them
# (no_sync) and search for parameters that forward did not use (find_unused_parameters).


def make_ways(start: nn.Module, cap_bytes: float) -> list[Way]:
    """Each with a copy of the model of its own, and what is called after backward."""
    nets = [copy.deepcopy(start) for _ in range(7)]
    # no broadcasts: rotary tables are fixed
    ddp = partial(DistributedDataParallel, gradient_as_bucket_view=True, broadcast_buffers=False)
    return [
        Way("(0) no communication", nets[0]),
        Way("(1) each gradient", nets[1], partial(average_gradients, nets[1])),
        Way("(2) each, in hooks", nets[2], average_in_hooks(nets[2])),
        Way("(3) buckets, in hooks", nets[3], average_buckets(make_buckets(nets[3], cap_bytes))),
        Way("(4) DistributedDataParallel", ddp(nets[4], bucket_cap_mb=cap_bytes / 2**20)),
        Way("(3) one bucket", nets[5], average_buckets(make_buckets(nets[5], float("inf")))),
        Way("one process, whole batch", nets[6]),
    ]


def check(rows: list[dict]) -> list[str]:
    silent, *averaged = (row["weights_sha256"] for row in rows)
    world_size = len(silent)
    assert all(len(set(ranks)) == 1 for ranks in averaged), (
        f"ranks hold different weights: {averaged}"
    )
    checked = [
        f"in each way that averages, all {world_size} ranks hold the same weights to the bit"
    ]
    assert len(set(silent)) == world_size, (
        "ranks that never talk hold the same weights: they read the same data"
    )
    checked.append(
        f"without communication, weights are {rows[0]['relative_error']:.0%} from those of one process"
    )
    assert averaged[0] == averaged[1], (
        "starting the same all-reduces earlier has changed their sums"
    )
    same = all(ranks == averaged[0] for ranks in averaged)
    # a + b = b + a. With three terms the order counts, and a bucket's layout decides it.
    assert same or world_size > 2, f"a sum of {world_size} terms came out differently: {averaged}"
    checked.append(
        f"(1) to (4) and every bucket size give {'the same bits' if same else 'one result, up to rounding'}"
    )
    largest = max(row["relative_error"] for row in rows[1:])
    assert largest <= TOLERANCE, (
        f"weights differ from those of one process by {largest:.0e}: that is no rounding"
    )
    checked.append(
        f"one process with the whole batch ends there too (relative error {largest:.0e} at most)"
    )
    for row in rows:
        early, count = row["started_in_backward"], len(row["bucket_bytes"])
        # the last starts when backward has no gradient left to compute
        expected = count - 1 if row["name"].startswith(("(2)", "(3)")) else 0
        assert early in (None, expected), (
            f"{row['name']}: {early} of {count} all-reduces started in backward"
        )
    return [*checked, "(2) and (3) start each all-reduce but the last while backward runs"]


COLUMNS = {
    "name": "way",
    "all_reduces": "all-reduces",
    "started_in_backward": "started in backward",
    "step_seconds": "step",
    "exposed_seconds": "exposed",
    "weights": "SHA-256 of the weights",
}


def main() -> int:
    args = report.lesson_flags(__doc__, model="nano", seq_len=16, steps=10)
    # raises a UserError before any rank starts
    config = shapes.load_config(args.model, 256, args.seq_len)
    runtime.relaunch(args.device)  # plain python becomes torchrun: a rank per GPU, 2 on a CPU
    runtime.seed_all(0, deterministic=True)  # before the group: NCCL reads variables when it starts
    device = runtime.init_process_group(args.device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch_size = -(-24 // world_size) * world_size  # 24, or the next number that the ranks divide
    steps = WARMUP_STEPS + args.steps
    sequences = data.one_batch(steps * batch_size, args.seq_len, device)  # of all ranks
    batches = zip(*(tensor.split(batch_size) for tensor in sequences), strict=True)

    start = weights.build(args.model, config, seed=0, device=device)
    # as DDP, or a quarter of the gradients' bytes
    cap_bytes = min(25 * 2**20, shapes.parameter_count(config))
    *ways, one_process = make_ways(start, cap_bytes)
    for step, batch in enumerate(batches):
        own_batch = [tensor.chunk(world_size)[rank] for tensor in batch]
        train(one_process, *batch)
        for turn in range(len(ways)):
            # each is first in turn: a slow moment hits all alike
            train(ways[(step + turn) % len(ways)], *own_batch)

    rows = [run(way, control=ways[0], one_process=one_process.net, start=start) for way in ways]
    report.end_lesson(
        rows,
        columns=COLUMNS,
        checked=check(rows),
        args=args,
        device=device,
        dtype="fp32",
        parameters=shapes.parameter_count(config),
        steps=steps,
        tokens=steps * batch_size * args.seq_len,
        first_loss=rows[1]["losses"][0],
        last_loss=rows[1]["losses"][-1],
    )
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
