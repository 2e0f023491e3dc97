"""DDP, ZeRO-1, 2 and 3, FSDP and HSDP side by side: what each rank holds, what it sends, how fast it is.

All six train the same model on the same batches, and reach the same losses. They differ in what a rank keeps between
two uses, and so in what it must ask the others for. Here each is built and trains a few steps. A counter sees the
memory that is alive and every collective that is called. ZeRO-1, 2 and 3 are those of zero_from_scratch.py, by hand.
FSDP and HSDP are fully_shard, as in train_fsdp.py. HSDP keeps several copies and shards each over a part of the ranks.

    laptop    python 06_fsdp_zero/compare.py
    one node  torchrun --nproc_per_node=8 06_fsdp_zero/compare.py --model llama-124m --micro-batch-size 8
    cluster   python 06_fsdp_zero/compare.py --dry-run --world-size 64 --model llama-70b --checkpointing full

--dry-run needs no machines: one CPU process takes itself for rank 0 of --world-size, with tensors that hold no numbers.
The same program runs, and the same counter looks. It also tells the least time that a step can take: products at the
device's peak or bytes at the links' rate, whichever is longer, and then AdamW at the rate of the memory. Its peak is
that of eager kernels: torch.compile keeps fewer activations.

Bytes sent are those of a ring. For a tensor of S bytes on N ranks, an all-gather or a reduce-scatter sends S (N-1)/N
per rank, and an all-reduce twice as many. Clipping, which all-reduces one number, is left out. Look for: what shrinks
with N, and what it costs in bytes sent. Before: zero_from_scratch.py. Next: train_fsdp.py.
"""

import gc
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # old/, with nothing installed
from _compare_count import Count, Counts, held_bytes
from _compare_dry_run import bucket_mib, dry_run, mark_ends_of_backward, pretend_ddp
from _compare_flags import Job, make_job, parse
from _compare_least_time import describe_machine, least_seconds
from _compare_report import Result, conclude
from zero_from_scratch import make_stage

from common import fake_ranks
from old import data, exits, hardware, model, report, runtime, shapes

warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)  # torch 2.11 does not have its successor
warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor|Mismatch dtype between input and weight")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COUNTED_STEP = 3  # DDP makes its final buckets after the first, and tells the other ranks in the second


@dataclass
class Trainer:
    """A model under one of the methods, and what the loop calls."""

    forward: Callable[[Tensor, Tensor], Tensor]  # to the loss
    update: Callable[[], None]  # what follows backward
    optimizer: torch.optim.Optimizer
    weights: list[Tensor]  # whatever of them is kept in memory


def shard(net: nn.Module, job: Job, replicas: int) -> None:
    """FSDP and HSDP: as in train_fsdp.py. A block's weights are gathered for its forward and again for its backward."""
    cut = partial(
        fully_shard,
        mesh=runtime.sharding_mesh(job.device, replicas),
        mp_policy=MixedPrecisionPolicy(DTYPES[job.dtype], reduce_dtype=torch.float32, cast_forward_inputs=False),
    )
    blocks = list(net.model.layers.values())
    for block in blocks:
        cut(block)
    cut(net)
    for block, next_block in pairwise(blocks):
        block.set_modules_to_forward_prefetch([next_block])
        next_block.set_modules_to_backward_prefetch([block])


def prepare(method: str, net: nn.Module, job: Job) -> Trainer:
    """Give the model its memory and weights, and wrap it. AdamW is one kernel, which needs no memory of its own."""
    if job.dry:
        net.to_empty(device=job.device)
        net.tie_weights()
    else:
        model.materialize(net, job.model, seed=0, device=job.device)
    learning_rate = shapes.recipe(job.model).lr
    if method.startswith("ZeRO"):
        stage = make_stage(int(method[-1]), net, learning_rate, fused=True)
        groups = [tensor for group in stage.groups for tensor in (group.my_weights, group.weights)]
        return Trainer(stage.net, stage.step, stage.optimizer, [*stage.net.parameters(), *groups])
    optimizer = torch.optim.AdamW(net.parameters(), lr=learning_rate, fused=True)
    forward = net
    if method == "DDP":
        wrap = DistributedDataParallel if not job.dry else pretend_ddp
        forward = wrap(net, bucket_cap_mb=bucket_mib(job.config), gradient_as_bucket_view=True, broadcast_buffers=False)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(forward, update, optimizer, list(net.parameters()))


def train_step(
    method: str, trainer: Trainer, job: Job, inputs: Tensor, targets: Tensor, enter: Callable[[str], None]
) -> Tensor:
    """The same for all. The weights are kept in fp32, whatever --dtype is. `enter` is told what begins."""
    enter("forward")
    # fully_shard casts by itself, before it gathers. The others gather in fp32, and autocast makes a copy of a weight,
    # which autograd keeps until backward. (Its cache would keep it longer, and each weight is used only once.)
    casts = job.dtype != "fp32" and method not in ("FSDP", "HSDP")
    with torch.autocast(job.device.type, DTYPES[job.dtype], enabled=casts, cache_enabled=False):
        loss = trainer.forward(inputs, targets)
    enter("backward")
    loss.backward()
    enter("update")
    trainer.update()
    return loss.detach()


def count(method: str, job: Job, batches: list[list[Tensor]]) -> tuple[Trainer, Counts, Tensor]:
    """Build the model under a method and train a step per batch. What the last of them needs is counted."""
    net = model.build(job.model, job.config, seed=0, device="meta")  # shapes alone
    blocks = net.model.layers
    model.checkpoint_blocks(net, "full" if job.recompute else "none")
    if method in ("FSDP", "HSDP"):
        shard(net, job, job.replicas if method == "HSDP" else 1)
    counter = Count(job.ranks_per_node)
    held = {}
    with fake_ranks.tensors() if job.dry else nullcontext(), counter:
        trainer = prepare(method, net, job)
        if job.dry:
            mark_ends_of_backward(list(blocks.values()), counter.enter)
        hook = trainer.optimizer.register_step_post_hook(lambda *_: held.update(hold(trainer)))
        for inputs, targets in batches:
            gc.collect()  # what only a cycle holds would count, or not, by chance
            counter.restart()
            if job.device.type == "cuda":
                report.reset_peak_memory(job.device)
            # copies, because the counter knows only what was made under its eyes
            loss = train_step(method, trainer, job, inputs.clone(), targets.clone(), counter.enter)
    hook.remove()
    peaks = counter.peaks
    if job.device.type == "cuda":
        peaks = Counter({"step": torch.cuda.max_memory_allocated()})  # its allocator knows better
    return trainer, Counts(**held, peaks=peaks, traffic=counter.traffic), loss


def hold(trainer: Trainer) -> dict[str, int]:
    """What is in memory just after the update, while the gradients are still there."""
    states = trainer.optimizer.state.values()
    return {
        "parameter_bytes": held_bytes(trainer.weights),
        "gradient_bytes": held_bytes(weight.grad for weight in trainer.weights if weight.grad is not None),
        "optimizer_bytes": held_bytes(tensor for state in states for tensor in state.values()),
    }


def measure(method: str, job: Job, batches: list[list[Tensor]]) -> Result:
    """What rank 0 holds and sends, the loss of the global batch, and seconds per step of the slowest rank."""
    trainer, counts, loss = count(method, job, batches[:COUNTED_STEP])
    of_ranks = runtime.gather(counts)
    assert all(other.traffic == counts.traffic for other in of_ranks), f"{method}: ranks differ: {of_ranks}"
    for kind in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        held = [getattr(other, kind) for other in of_ranks]
        assert held[0] == max(held), f"{method}: {kind} by rank: {held}"
    seconds = []
    for inputs, targets in batches[COUNTED_STEP:]:
        dist.barrier()
        began = time.perf_counter()
        train_step(method, trainer, job, inputs, targets, enter=lambda _: None)
        if job.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    slowest = [max(of_step) for of_step in zip(*runtime.gather(seconds), strict=True)]
    mean_loss = statistics.fmean(runtime.gather(loss.item()))
    return Result(method, of_ranks[0], loss=mean_loss, seconds=statistics.median(slowest))


def main() -> int:
    began = time.perf_counter()
    args = parse(__doc__)  # raises a UserError before any rank starts
    if args.dry_run:
        device = fake_ranks.join(0, args.world_size)
    else:
        runtime.relaunch(args.device, on_cpu=4)  # four, so that HSDP has two copies, each on two ranks
        runtime.seed(0, deterministic=False)
        device = runtime.init_process_group(args.device)
        if args.dtype == "fp32":
            runtime.exact_fp32(device)
    job = make_job(args, device)
    machine = describe_machine(args.device_name or hardware.device_name(device), args.dtype, args.link, args.fits)
    if not args.dry_run:
        stream = data.train_batches(
            data.load_corpus().train,
            seq_len=args.seq_len,
            global_batch_size=args.world_size * args.micro_batch_size,
            micro_batch_size=args.micro_batch_size,
            seed=0,
            device=device,
            rank=dist.get_rank(),
            world_size=args.world_size,
        )
        batches = [[tensor.to(device) for tensor in next(stream)] for _ in range(COUNTED_STEP + args.steps)]
    found = []
    for method in args.methods:
        result = dry_run(method, job, count) if args.dry_run else measure(method, job, batches)
        result.least = least_seconds(result.counts, machine, job)
        found.append(result)
        gc.collect()  # the next one must not find this one's memory
    conclude(found, job, args, machine, began)
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
