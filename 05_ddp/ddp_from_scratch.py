"""DistributedDataParallel rebuilt in three steps on all_reduce, then the real one: the same weights, in less time.

Data parallelism adds one thing to training: before the optimizer step, each gradient is averaged over the ranks.
(1) After backward, all-reduce one gradient after the other: right, but each call costs a latency, and nobody computes
meanwhile. (2) Flatten the gradients into a few buckets: fewer calls. (3) Start a bucket from a hook as soon as its
last gradient is there: backward goes on while the bytes travel. (4) DistributedDataParallel does (3) in C++. A
control, (0), sends nothing: what a step takes longer than the control's is communication that backward did not hide.

    laptop    python 05_ddp/ddp_from_scratch.py
              torchrun --nproc_per_node=3 05_ddp/ddp_from_scratch.py --steps 5
    one node  torchrun --nproc_per_node=8 05_ddp/ddp_from_scratch.py --model llama-124m --global-batch-size 32
    cluster   the same on every node, with --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400

Look for: the exposed time from (1) to (4); one bucket for everything, which hides nothing; letters that are equal
where weights are equal to the bit. Before: train.py. Next: collectives.py, what an all-reduce costs.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common/, with nothing installed
from _ddp_from_scratch_report import WARMUP_STEPS, conclude, time_communication, timed

from common import cli, data, exits, model, runtime


def require_gradients(net: nn.Module) -> None:
    """A gradient that one rank lacks would leave the others waiting for it in an all-reduce."""
    missing = [name for name, p in net.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing, f"no gradient for {', '.join(missing)}: forward does not use it; freeze it on all ranks"


def make_buckets(net: nn.Module, cap_bytes: float) -> list[list[nn.Parameter]]:
    """Each parameter in one bucket, last layer first: about the order in which backward yields the gradients."""
    buckets = [[]]
    for p in reversed([p for p in net.parameters() if p.requires_grad]):
        if buckets[-1] and sum(q.nbytes for q in buckets[-1]) + p.nbytes > cap_bytes:
            buckets.append([])
        buckets[-1].append(p)
    return buckets


def each_gradient(net: nn.Module, buckets: list[list[nn.Parameter]]) -> Callable[[], None]:
    """(1) When backward is over, all-reduce one gradient after the other."""

    def finish() -> None:
        require_gradients(net)
        for p in (p for bucket in buckets for p in bucket):
            p.grad.mul_(1 / dist.get_world_size())  # a mean over ranks, as the loss is a mean over the batch
            dist.all_reduce(p.grad)

    return finish


def pack(bucket: list[nn.Parameter]) -> Tensor:
    return torch.cat([p.grad.flatten() for p in bucket]).mul_(1 / dist.get_world_size())


def unpack(bucket: list[nn.Parameter], flat: Tensor) -> None:
    for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
        p.grad = part.view_as(p)  # a view: nothing is copied back


def bucketed(net: nn.Module, buckets: list[list[nn.Parameter]]) -> Callable[[], None]:
    """(2) When backward is over, all-reduce bucket after bucket."""

    def finish() -> None:
        require_gradients(net)
        for bucket in buckets:
            flat = pack(bucket)
            dist.all_reduce(flat)
            unpack(bucket, flat)

    return finish


def overlapped(net: nn.Module, buckets: list[list[nn.Parameter]]) -> Callable[[], int]:
    """(3) While backward runs, all-reduce each bucket once its last gradient is there. The function returned waits
    for them and tells how many had started before backward was over."""
    bucket_of = {p: i for i, bucket in enumerate(buckets) for p in bucket}
    missing = [len(bucket) for bucket in buckets]
    started = []

    def ready(p: nn.Parameter) -> None:
        missing[bucket_of[p]] -= 1
        # never out of turn: collectives are matched by their order, which must be the same on every rank
        while len(started) < len(buckets) and missing[len(started)] == 0:
            flat = pack(buckets[len(started)])
            started.append((dist.all_reduce(flat, async_op=True), flat, any(missing)))

    for p in bucket_of:
        p.register_post_accumulate_grad_hook(ready)

    def finish() -> int:
        require_gradients(net)  # without one of them its bucket has not started
        for bucket, (work, flat, _) in zip(buckets, started, strict=True):
            work.wait()
            unpack(bucket, flat)
        in_backward = sum(early for *_, early in started)
        missing[:] = [len(bucket) for bucket in buckets]
        started.clear()
        return in_backward

    return finish


def new_run(name: str, net: nn.Module, average: Callable | None, cap_bytes: float) -> SimpleNamespace:
    """A copy of the model to train: `module` is called, then backward, then `finish` averages the gradients."""
    net = copy.deepcopy(net)
    buckets = make_buckets(net, cap_bytes)
    run = SimpleNamespace(name=name, net=net, module=net, finish=lambda: None, early=None)
    if average is DistributedDataParallel:
        run.module = DistributedDataParallel(net, bucket_cap_mb=cap_bytes / 2**20, gradient_as_bucket_view=True)
    elif average:
        run.finish = average(net, buckets)
    # SGD moves by the gradient itself; Adam divides by its size and would hide one that is N times too large
    run.optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    run.sizes = [sum(p.numel() for p in bucket) for bucket in buckets] if average else []
    run.in_turn, run.losses, run.step_seconds, run.comm_seconds = average in (each_gradient, bucketed), [], [], []
    return run


def backward(run: SimpleNamespace, inputs: Tensor, targets: Tensor) -> None:
    loss = run.module(inputs, targets)
    loss.backward()
    run.early = run.finish()
    run.losses.append(loss.detach())


def main() -> int:
    began = time.perf_counter()
    parser = cli.Parser(__doc__)
    parser.add_argument("--model", default="nano", help="as in train.py")
    parser.add_argument("--seq-len", type=cli.positive_int, default=16, help="short: more to send than to compute")
    parser.add_argument("--global-batch-size", type=cli.positive_int, help="over all ranks (default: about 24)")
    parser.add_argument("--steps", type=cli.positive_int, default=16, help=f"timed, after {WARMUP_STEPS} to warm up")
    parser.add_argument("--bucket-mib", type=cli.positive, help="default: a quarter of the gradients, at most 25")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--seed", type=cli.seed, default=0)
    parser.add_argument("--json", type=cli.writable_file, metavar="PATH", help="write the summary as one JSON object")
    args = parser.parse_args()
    config = model.load_config(args.model, 256, args.seq_len)
    n = runtime.processes(args.device)
    args.global_batch_size = args.global_batch_size or n * max(1, 24 // n)
    cli.split_batch(args.global_batch_size, None, n)  # refuses what does not divide
    runtime.relaunch(args.device)
    device = runtime.init_process_group(args.device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    runtime.seed(args.seed, deterministic=True)  # or two backwards of one GPU need not agree to the bit

    corpus = data.load_corpus("stdlib", "bytes").train
    order = argparse.Namespace(**vars(args), data="stdlib", num_workers=0)
    batches = data.train_batches(corpus, order, args.global_batch_size, 0, 0, 1, device)
    start = model.build(args.model, config).to(device)
    gradients = torch.zeros(sum(p.numel() for p in start.parameters()), device=device)
    cap = (args.bucket_mib or min(25, gradients.nbytes / 4 / 2**20)) * 2**20
    variants = [
        ("(0) no communication", None, cap),
        ("(1) each gradient", each_gradient, 0),
        ("(2) buckets", bucketed, cap),
        ("(3) overlap", overlapped, cap),
        ("(4) DistributedDataParallel", DistributedDataParallel, cap),
        ("(3) overlap, a gradient each", overlapped, 0),
        ("(3) overlap, small buckets", overlapped, cap / 4),
        ("(3) overlap, one bucket", overlapped, float("inf")),
    ]
    runs = [new_run(name, start, average, cap_bytes) for name, average, cap_bytes in variants]
    whole = new_run("one process, whole batch", start, None, cap)

    for step in range(WARMUP_STEPS + args.steps):
        inputs, targets = (t.to(device) for t in next(batches))  # the whole batch; each rank takes its part
        mine = inputs.chunk(world_size)[rank], targets.chunk(world_size)[rank]
        if rank == 0:
            backward(whole, inputs, targets)
            whole.optimizer.step()
            whole.optimizer.zero_grad()
        for turn in range(len(runs)):  # each is first in turn: a slow moment of the machine hits all alike
            run = runs[(step + turn) % len(runs)]
            timed(run.step_seconds, backward, run, *mine)
            run.optimizer.step()
            run.optimizer.zero_grad()
            time_communication(run, gradients)

    conclude(args, runs, whole, start, device, began)
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
