"""DistributedDataParallel rebuilt in three steps on all_reduce, then the real one: the same weights.

Data parallelism adds one thing to training: before the optimizer step, each gradient is averaged over the ranks.
(1) one after the other, (2) in a few buckets, (3) in buckets while backward runs, (4) as DistributedDataParallel, which
does (3) in C++. A control, (0), sends nothing. What a step takes longer than the control's is exposed communication.

    laptop    python 05_ddp/ddp_from_scratch.py
              torchrun --nproc_per_node=3 05_ddp/ddp_from_scratch.py --steps 5
    one node  torchrun --nproc_per_node=8 05_ddp/ddp_from_scratch.py --model llama-124m --global-batch-size 32
    cluster   the same on every node, with --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400

It takes less time where communication does not need the cores of backward. Two ranks on two cores share them: nothing
is hidden. As root, --link-mbit puts them on two hosts (network namespaces) with a slow link: waiting costs no core.

Look for: the exposed time from (1) to (4); one bucket for everything, which hides nothing; letters that are equal
where weights are equal to the bit. Before: train.py. Next: collectives.py, what an all-reduce costs.
"""

import copy
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # old/, with nothing installed
from _ddp_from_scratch_link import run_on_two_hosts
from _ddp_from_scratch_report import conclude
from _ddp_from_scratch_timing import WARMUP_STEPS, Record, measure_communication, measure_step

from old import cli, data, exits, model, runtime, shapes


def average_gradients(net: nn.Module) -> None:
    """(1) Data parallelism in four lines: after backward, every rank ends with the mean gradient."""
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


# What (1) lacks: it makes a call per parameter, 56 for nano, and each call costs a latency. Fewer, larger calls help.


def make_buckets(net: nn.Module, cap_bytes: float) -> list[list[nn.Parameter]]:
    """Each trained parameter in one bucket, last layer first: about the order in which backward computes gradients."""
    buckets: list[list[nn.Parameter]] = [[]]
    bucket_bytes = 0
    for parameter in reversed([p for p in net.parameters() if p.requires_grad]):
        if buckets[-1] and bucket_bytes + parameter.nbytes > cap_bytes:
            buckets.append([])
            bucket_bytes = 0
        buckets[-1].append(parameter)
        bucket_bytes += parameter.nbytes
    return buckets


def flatten(bucket: list[nn.Parameter]) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in bucket])


def unflatten(flat: Tensor, bucket: list[nn.Parameter]) -> None:
    """Divide the sum by the number of ranks, and give each parameter its part as its gradient."""
    flat /= dist.get_world_size()
    parts = flat.split([parameter.numel() for parameter in bucket])
    for parameter, part in zip(bucket, parts, strict=True):
        parameter.grad = part.view_as(parameter)  # a view: nothing is copied back


def average_buckets(buckets: list[list[nn.Parameter]]) -> None:
    """(2) After backward, one all-reduce per bucket."""
    for bucket in buckets:
        flat = flatten(bucket)
        dist.all_reduce(flat)
        unflatten(flat, bucket)


# What (2) lacks: nothing travels while backward computes, and nothing is computed while the gradients travel.


def average_during_backward(buckets: list[list[nn.Parameter]]) -> Callable[[], None]:
    """(3) While backward runs, start the all-reduce of a bucket as soon as its last gradient is there.

    Registers hooks that do so. Returns a function to call after backward: it waits for what is still under way.
    """
    bucket_of = {parameter: index for index, bucket in enumerate(buckets) for parameter in bucket}
    gradients_missing = [len(bucket) for bucket in buckets]
    under_way: list[tuple[dist.Work, Tensor]] = []

    def gradient_is_ready(parameter: nn.Parameter) -> None:
        gradients_missing[bucket_of[parameter]] -= 1
        # Ranks match collectives by their order alone. So a bucket that is ready waits for its turn.
        while len(under_way) < len(buckets) and gradients_missing[len(under_way)] == 0:
            flat = flatten(buckets[len(under_way)])
            work = dist.all_reduce(flat, async_op=True)
            under_way.append((work, flat))

    for parameter in bucket_of:
        parameter.register_post_accumulate_grad_hook(gradient_is_ready)

    def wait_for_all() -> None:
        for index, (work, flat) in enumerate(under_way):
            work.wait()
            unflatten(flat, buckets[index])
            gradients_missing[index] = len(buckets[index])
        under_way.clear()

    return wait_for_all


# What (3) lacks: the hooks run in Python. (4), DistributedDataParallel, has them in C++ and can also skip them
# (no_sync) and search for parameters that forward did not use (find_unused_parameters).


@dataclass
class Variant:
    """One way to average, with a model of its own: forward, backward, then `average` makes a step."""

    name: str
    net: nn.Module
    forward: Callable[[Tensor, Tensor], Tensor]
    average: Callable[[], None] | None
    optimizer: torch.optim.Optimizer
    bucket_sizes: list[int]  # elements in each all-reduce
    overlaps: bool  # all-reduces start while backward runs


def make_variant(name: str, start: nn.Module, method: Callable | None, cap_bytes: float) -> Variant:
    """A copy of the model at the start, and the method that averages its gradients; None sends nothing."""
    net = copy.deepcopy(start)
    buckets = make_buckets(net, cap_bytes)
    forward = net
    average = None
    if method is average_gradients:
        average = partial(average_gradients, net)
    elif method is average_buckets:
        average = partial(average_buckets, buckets)
    elif method is average_during_backward:
        average = average_during_backward(buckets)
    elif method is DistributedDataParallel:
        forward = DistributedDataParallel(
            net,
            bucket_cap_mb=cap_bytes / 2**20,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # the rotary tables never change
        )
    # SGD moves by the gradient itself. Adam divides by its size and would hide one that is N times too large.
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    bucket_sizes = [sum(parameter.numel() for parameter in bucket) for bucket in buckets] if method else []
    overlaps = method in (average_during_backward, DistributedDataParallel)
    return Variant(name, net, forward, average, optimizer, bucket_sizes, overlaps)


def require_gradients(net: nn.Module) -> None:
    """A gradient that one rank lacks would leave the others waiting for it in an all-reduce."""
    missing = [name for name, p in net.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing, f"no gradient for {', '.join(missing)}: forward does not use it; freeze it on all ranks"


def forward_backward_average(variant: Variant, inputs: Tensor, targets: Tensor) -> Tensor:
    """What is timed: a training step without the optimizer's part, which is the same for all."""
    loss = variant.forward(inputs, targets)
    loss.backward()
    require_gradients(variant.net)
    if variant.average:  # else there is nothing to do: (0) never averages, and DDP has done so within backward
        variant.average()
    return loss.detach()


def main() -> int:
    began = time.perf_counter()
    parser = cli.Parser(__doc__)
    parser.add_argument("--model", default="nano", help="as in train.py")
    parser.add_argument("--seq-len", type=cli.positive_int, default=16, help="short: more to send than to compute")
    parser.add_argument("--global-batch-size", type=cli.positive_int, help="over all ranks (default: about 24)")
    parser.add_argument("--steps", type=cli.positive_int, default=16, help=f"timed, after {WARMUP_STEPS} to warm up")
    parser.add_argument("--bucket-mib", type=cli.positive, help="default: a quarter of the gradients, at most 25")
    parser.add_argument("--link-mbit", type=cli.positive_int, help="as root: two hosts with a link of so many Mbit/s")
    parser.add_argument("--plot", type=cli.plot_file, metavar="PATH", help="a PNG: one step of (1), (2) and (3)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--seed", type=cli.natural, default=0)
    parser.add_argument("--json", type=cli.writable_file, metavar="PATH", help="write the summary as one JSON object")
    args = parser.parse_args()
    if args.link_mbit:
        args.device = "cpu"
    config = shapes.load_config(args.model, 256, args.seq_len)
    n = runtime.processes(args.device)
    args.global_batch_size = args.global_batch_size or n * max(1, 24 // n)
    cli.split_batch(args.global_batch_size, None, n)  # raises a UserError if it does not divide
    if args.link_mbit and "RANK" not in os.environ:
        return run_on_two_hosts(args.link_mbit)
    runtime.relaunch(args.device)
    runtime.seed(args.seed, deterministic=True)  # before the group: NCCL reads variables when it starts
    device = runtime.init_process_group(args.device)
    runtime.exact_fp32(device)  # or some containers would multiply in tf32
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = data.train_batches(
        data.load_corpus().train,
        seq_len=args.seq_len,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.global_batch_size,  # every rank reads the whole batch and takes its part below
        seed=args.seed,
        device=device,
    )
    start = model.build(args.model, config, seed=args.seed, device=device)
    gradient_bytes = sum(parameter.nbytes for parameter in start.parameters())
    cap = min(args.bucket_mib * 2**20, gradient_bytes) if args.bucket_mib else min(25 * 2**20, gradient_bytes / 4)
    variants = [
        make_variant("(0) no communication", start, None, cap),
        make_variant("(1) each gradient", start, average_gradients, 0),
        make_variant("(2) buckets", start, average_buckets, cap),
        make_variant("(3) overlap", start, average_during_backward, cap),
        make_variant("(4) DistributedDataParallel", start, DistributedDataParallel, cap),
        make_variant("(3) overlap, a gradient each", start, average_during_backward, 0),
        make_variant("(3) overlap, small buckets", start, average_during_backward, cap / 4),
        make_variant("(3) overlap, one bucket", start, average_during_backward, float("inf")),
    ]
    one_process = make_variant("one process, whole batch", start, None, cap)
    records = [Record() for _ in variants]
    gradients = torch.zeros(gradient_bytes // 4, device=device)  # something to send when only sending is timed

    for step in range(WARMUP_STEPS + args.steps):
        inputs, targets = (tensor.to(device) for tensor in next(batches))
        my_inputs = inputs.chunk(world_size)[rank]
        my_targets = targets.chunk(world_size)[rank]
        if rank == 0:
            forward_backward_average(one_process, inputs, targets)
            one_process.optimizer.step()
            one_process.optimizer.zero_grad()
        for turn in range(len(variants)):
            index = (step + turn) % len(variants)  # each is first in turn: a slow moment hits all alike
            variant, record = variants[index], records[index]
            measure_step(forward_backward_average, variant, record, my_inputs, my_targets)
            variant.optimizer.step()
            variant.optimizer.zero_grad()
            measure_communication(variant, record, gradients)

    conclude(args, variants, records, one_process, start, device, began)
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
