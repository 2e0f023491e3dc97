"""Rebuild DistributedDataParallel in three steps on all_reduce, and compare it with the real one.

Data parallelism adds one thing to training: before the optimizer step, each gradient is averaged
over the ranks. There are four ways to do it:

    (1) after backward, one gradient at a time
    (2) in a hook, as soon as backward has computed a gradient
    (3) in hooks, several gradients (a bucket) per all-reduce
    (4) DistributedDataParallel, which does (3) in C++

This file builds (1) to (3). It compares them with (4), and with variant (0), which does not
communicate. Exposed communication is communication that is not hidden behind computation. It is
measured as the time of a step minus the time of a step of (0).

    laptop    python 05_ddp/ddp_from_scratch.py
    one node  torchrun --standalone --nproc_per_node=8 05_ddp/ddp_from_scratch.py
    cluster   the same on each node, but in place of --standalone
              --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400 --rdzv-id=$JOB

What to look at: the exposed time of (1), (2), (3) and (4), and of (3) with one bucket for all
gradients, whose all-reduce cannot start before the end of backward. The table has a hash of the
weights of each variant: equal hashes mean identical weights.

With two ranks on two CPU cores, all-reduce and backward compete for the same cores, and overlap
saves no time. benchmarks/slow_link.sh connects two ranks by a slow link instead: waiting for a link
needs no core.

On GPUs the default is --model wide: 228 MB of gradients. Expected on 8 H100s from their data
sheets: the arithmetic of a step takes at least 4 ms. In a ring all-reduce, each of 8 GPUs sends
2 x 7/8 of the gradients, 399 MB. Over NVLink (450 GB/s in one direction) this takes at least
0.9 ms. (1) and the single bucket expose all of it, and (1) pays the latency of 20 calls. (2), (3)
and (4) expose little more than the last all-reduce.

Previous: train.py. Next: collectives.py.
"""

import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import torch
import torch.distributed as dist
from _ddp_from_scratch import CALLS, TIMES, WARMUP_STEPS, Variant, check, row_of, train
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common import lesson, runtime
from common.torch_versions import KEEP_BUFFERS
from lm import shapes, stdlib_text, weights

GPU_DEFAULTS = {"model": "wide", "seq_len": 256}  # nano is too small to keep a GPU busy
BATCH_SIZE = 24  # sequences of all ranks together
BUCKET_BYTES = 25 * 2**20  # DDP's default


# --- (1) after backward


def average_gradients(model: nn.Module) -> None:
    """Replace each gradient by its mean over the ranks. Call it after backward."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # in place: the sum over all ranks, on every rank
        parameter.grad /= dist.get_world_size()


# What (1) lacks: the link is idle during backward, and the processors are idle during the
# all-reduces.


# --- (2) in hooks


def average_in_hooks(model: nn.Module) -> Callable[[], None]:
    """Register hooks that start the all-reduce of a gradient as soon as it is computed.

    Return a function to call after backward. It waits for the all-reduces that still run.
    """
    running: list[tuple[dist.Work, nn.Parameter]] = []

    def on_gradient_ready(parameter: nn.Parameter) -> None:
        work = dist.all_reduce(parameter.grad, async_op=True)  # returns at once
        running.append((work, parameter))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(on_gradient_ready)

    def wait_for_all() -> None:
        for work, parameter in running:
            work.wait()  # on a GPU the stream waits, and not the CPU
            parameter.grad /= dist.get_world_size()
        running.clear()

    return wait_for_all


# What (2) lacks: it makes one call per parameter, 56 for nano, and each call pays a latency.


# --- (3) in hooks and buckets


def make_buckets(model: nn.Module, most_bytes: float) -> list[list[nn.Parameter]]:
    """Group the parameters into buckets of at most `most_bytes`.

    A parameter that is larger gets its own bucket. The last layer comes first: backward computes
    gradients in about this order.
    """
    buckets = []
    free_bytes = 0.0  # in the last bucket
    for parameter in reversed(list(model.parameters())):
        if not buckets or parameter.nbytes > free_bytes:
            buckets.append([])
            free_bytes = most_bytes
        buckets[-1].append(parameter)
        free_bytes -= parameter.nbytes
    return buckets


def average_buckets(buckets: list[list[nn.Parameter]]) -> Callable[[], None]:
    """Register hooks that start the all-reduce of a bucket when its last gradient is computed.

    Return a function to call after backward, as in (2).
    """
    bucket_of = {}
    for index, bucket in enumerate(buckets):
        for parameter in bucket:
            bucket_of[parameter] = index
    gradients_missing = [len(bucket) for bucket in buckets]
    running: list[tuple[dist.Work, Tensor]] = []

    def on_gradient_ready(parameter: nn.Parameter) -> None:
        gradients_missing[bucket_of[parameter]] -= 1
        # The n-th collective of one rank is matched with the n-th of every other rank. So all ranks
        # must start the buckets in the same order. A bucket that is complete early waits for the
        # buckets before it. The number of started buckets is the index of the next one.
        while len(running) < len(buckets) and gradients_missing[len(running)] == 0:
            start_bucket(buckets[len(running)])

    def start_bucket(bucket: list[nn.Parameter]) -> None:
        flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
        work = dist.all_reduce(flat, async_op=True)
        running.append((work, flat))

    for parameter in bucket_of:
        parameter.register_post_accumulate_grad_hook(on_gradient_ready)

    def wait_for_all() -> None:
        for index, (work, flat) in enumerate(running):
            work.wait()
            flat /= dist.get_world_size()
            parts = flat.split([parameter.numel() for parameter in buckets[index]])
            for parameter, part in zip(buckets[index], parts, strict=True):
                parameter.grad = part.view_as(parameter)  # a view: nothing is copied back
            gradients_missing[index] = len(buckets[index])
        running.clear()

    return wait_for_all


# What (3) lacks: its hooks run in Python. DistributedDataParallel has them in C++. It can also skip
# the all-reduce (no_sync), and find parameters that forward did not use (find_unused_parameters).


# --- the comparison


def make_variants(start: nn.Module, bucket_bytes: int) -> list[Variant]:
    """Return the variants, each with its own copy of the model."""
    models = [copy.deepcopy(start) for _ in range(7)]
    small_buckets = make_buckets(models[3], bucket_bytes)
    one_bucket = make_buckets(models[5], float("inf"))
    ddp = DistributedDataParallel(
        models[4],
        bucket_cap_mb=bucket_bytes / 2**20,
        gradient_as_bucket_view=True,
        **KEEP_BUFFERS,
    )
    return [
        Variant("(0) no communication", models[0]),
        Variant("(1) each gradient", models[1], partial(average_gradients, models[1])),
        Variant("(2) each, in hooks", models[2], average_in_hooks(models[2])),
        Variant("(3) buckets, in hooks", models[3], average_buckets(small_buckets)),
        Variant("(4) DistributedDataParallel", ddp),
        Variant("(3) one bucket", models[5], average_buckets(one_bucket)),
        Variant("one process, whole batch", models[6]),
    ]


def main() -> int:
    args = lesson.parse_flags(
        __doc__, gpu=GPU_DEFAULTS, relaunches=True, model="nano", seq_len=16, steps=10
    )
    # Before relaunch, a wrong flag raises one UserError. After it, every rank would raise it.
    config = shapes.load_config(args.model, 256, args.seq_len)
    # If torchrun did not start this script, restart it with a rank per GPU, or 2 ranks on a CPU.
    lesson.relaunch(args.device)
    # This sets environment variables that NCCL reads in init_process_group.
    runtime.seed_all(0, deterministic=True)
    device = runtime.init_process_group(args.device)
    rank = dist.get_rank()
    world_size = dist.get_world_size()

    # Equal shares for all ranks: round the batch up to a multiple of the number of ranks.
    batch_size = -(-BATCH_SIZE // world_size) * world_size
    steps = WARMUP_STEPS + args.steps
    all_inputs, all_targets = stdlib_text.one_batch(steps * batch_size, args.seq_len, device)
    batches = list(zip(all_inputs.split(batch_size), all_targets.split(batch_size), strict=True))

    start = weights.build(args.model, config, seed=0, device=device)
    # A bucket has at most a quarter of the gradients, so that nano has several buckets, too. A
    # gradient has 4 bytes: a quarter of the bytes is the number of parameters.
    bucket_bytes = min(BUCKET_BYTES, shapes.parameter_count(config))
    *variants, one_process = make_variants(start, bucket_bytes)
    for step, (inputs, targets) in enumerate(batches):
        train(one_process, inputs, targets)  # the reference: the full batch, no communication
        my_inputs = inputs.chunk(world_size)[rank]
        my_targets = targets.chunk(world_size)[rank]
        for i in range(len(variants)):
            # Start each step with a different variant, so that none always runs first.
            variant = variants[(step + i) % len(variants)]
            train(variant, my_inputs, my_targets)

    rows = []
    for variant in variants:
        rows.append(row_of(variant, control=variants[0], one_process=one_process.net, start=start))
    lesson.end(
        rows,
        columns=[TIMES, CALLS],
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
    runtime.print0("exposed: a step, minus that of (0). Below 0, the machine's noise is larger")
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
