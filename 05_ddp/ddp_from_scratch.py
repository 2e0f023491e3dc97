"""DistributedDataParallel rebuilt in three steps on all_reduce, then the real one: the same weights.

Data parallelism adds one thing to training: before the optimizer step, each gradient is averaged over the ranks.
(1) one by one after backward, (2) each in a hook while backward runs, (3) in hooks and buckets, (4) in C++, as (3). A
control, (0), sends nothing. What a step takes longer than the control's is exposed communication.

    laptop    python 05_ddp/ddp_from_scratch.py
              torchrun --nproc_per_node=3 05_ddp/ddp_from_scratch.py --steps 2
    one node  torchrun --nproc_per_node=8 05_ddp/ddp_from_scratch.py --model llama-124m --seq-len 512
    cluster   the same on every node, with --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400

Overlap saves time only where communication needs none of backward's cores. Two ranks on two cores share them: nothing
is hidden. As root, --link-mbit puts them on two hosts (network namespaces) with a slow link: waiting costs no core.

Look for: the exposed time from (1) to (4); one bucket for everything, which hides nothing; letters that are equal
where weights are equal to the bit. Before: train.py. Next: collectives.py.
"""

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common/, with nothing installed
from _ddp_from_scratch import WARMUP_STEPS, plot, run_on_two_hosts, summarize, train

from common import exits, lesson, model, runtime, shapes

TOLERANCE = 1e-4  # of the distance that the weights have moved: what another order of the same sums may change


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
        while (turn := len(under_way)) < len(buckets) and gradients_missing[turn] == 0:  # as many as have left
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


class Way:
    """One way to average, with a copy of the model of its own, and what was seen of it: an entry per step."""

    def __init__(self, name: str, start: nn.Module, method: Callable | None, cap_bytes: float = 0) -> None:
        self.name = name
        self.net = copy.deepcopy(start)  # whose weights are compared
        self.called = self.net  # by a step: the net itself, or DDP around it
        self.average = None  # (0) never averages, and DDP does so within backward
        if method is average_gradients:
            self.average = lambda: average_gradients(self.net)
        elif method is average_in_hooks:
            self.average = average_in_hooks(self.net)
        elif method is average_buckets:
            self.average = average_buckets(make_buckets(self.net, cap_bytes))
        elif method is DistributedDataParallel:
            size = {"bucket_cap_mb": cap_bytes / 2**20, "gradient_as_bucket_view": True}
            self.called = DistributedDataParallel(self.net, **size, broadcast_buffers=False)  # rotary tables are fixed
        # SGD moves by the gradient itself. Adam divides by its size and would hide one that is N times too large.
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)
        self.steps: list[dict] = []

    def gradients(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """What is timed: a training step without the optimizer's part, which is the same for all."""
        loss = self.called(inputs, targets)
        loss.backward()
        for name, parameter in self.net.named_parameters():  # the other ranks would wait for one that is missing
            assert parameter.grad is not None, f"no gradient for {name}: forward does not use it on this rank"
        if self.average:
            self.average()
        return loss.detach()


def check(rows: list[dict]) -> list[str]:
    silent, *averaged = (row["weights_sha256"] for row in rows)
    world_size = len(silent)
    assert all(len(set(ranks)) == 1 for ranks in averaged), f"ranks hold different weights: {averaged}"
    checked = [f"in each way that averages, all {world_size} ranks hold the same weights to the bit"]
    if world_size > 1:
        assert len(set(silent)) == world_size, "ranks that never talk hold the same weights: they read the same data"
        checked.append(f"without communication they do not (relative error {rows[0]['relative_error']:.0%})")
    assert averaged[0] == averaged[1], "starting the same all-reduces earlier has changed their sums"
    same = all(ranks == averaged[0] for ranks in averaged)
    # a + b = b + a. With three terms the order counts, and a bucket's layout decides it.
    assert same or world_size > 2, f"a sum of {world_size} terms came out differently: {averaged}"
    checked.append(f"(1) to (4) and every bucket size give {'the same bits' if same else 'one result, up to rounding'}")
    largest = max(row["relative_error"] for row in rows[1:])
    assert largest <= TOLERANCE, f"weights differ from those of one process by {largest:.0e}: that is no rounding"
    checked.append(f"one process with the whole batch ends there too (relative error {largest:.0e} at most)")
    for row in rows:
        early, count = row["started_in_backward"], len(row["bucket_bytes"])
        # the last starts when backward has no gradient left to compute
        expected = count - 1 if row["name"].startswith(("(2)", "(3)")) else 0
        assert early in (None, expected), f"{row['name']}: {early} of {count} all-reduces started in backward"
    return [*checked, "(2) and (3) start each all-reduce but the last while backward runs"]


COLUMNS = {
    "name": "way",
    "all_reduces": "all-reduces",
    "started_in_backward": "started in backward",
    "step_seconds": "step",
    "exposed_seconds": "exposed",
    "weights": "weights (same letter: identical)",
}


def main() -> int:
    args = lesson.flags(__doc__, model="nano", seq_len=16, steps=10, link_mbit=0, plot="")
    config = shapes.load_config(args.model, 256, args.seq_len)  # raises a UserError before any rank starts
    if args.link_mbit:
        args.device = "cpu"
        if runtime.ranks()[1] == 1:
            return run_on_two_hosts(args.link_mbit)
    lesson.relaunch(args.device)  # plain python becomes torchrun: a rank per GPU, 2 on a CPU
    runtime.seed_all(0, deterministic=True)  # before the group: NCCL reads variables when it starts
    device = runtime.init_process_group(args.device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch_size = -(-24 // world_size) * world_size  # 24, or the next number that the ranks divide
    sequences = lesson.one_batch((WARMUP_STEPS + args.steps) * batch_size, args.seq_len, device)  # of all ranks
    batches = zip(*(tensor.split(batch_size) for tensor in sequences), strict=True)

    start = model.build(args.model, config, seed=0, device=device)
    cap = min(25 * 2**20, shapes.parameter_count(config))  # bytes: as DDP, or a quarter of the gradients'
    ways = [
        Way("(0) no communication", start, None),
        Way("(1) each gradient", start, average_gradients),
        Way("(2) each, in hooks", start, average_in_hooks),
        Way("(3) buckets, in hooks", start, average_buckets, cap),
        Way("(4) DistributedDataParallel", start, DistributedDataParallel, cap),
        Way("(3) small buckets", start, average_buckets, cap / 4),
        Way("(3) one bucket", start, average_buckets, float("inf")),
    ]
    one_process = Way("one process, whole batch", start, None)
    for step, batch in enumerate(batches):
        own_batch = [tensor.chunk(world_size)[rank] for tensor in batch]
        train(one_process, *batch)
        for turn in range(len(ways)):
            train(ways[(step + turn) % len(ways)], *own_batch)  # each is first in turn: a slow moment hits all alike

    rows = summarize(ways, one_process.net, start)
    lesson.end(
        rows,
        columns=COLUMNS,
        checked=check(rows),
        args=args,
        device=device,
        dtype="fp32",
        parameters=shapes.parameter_count(config),
        steps=WARMUP_STEPS + args.steps,
        tokens=(WARMUP_STEPS + args.steps) * batch_size * args.seq_len,
        first_loss=rows[1]["losses"][0],
        last_loss=rows[1]["losses"][-1],
    )
    if args.plot and rank == 0:
        plot(ways[1:4], args)
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
