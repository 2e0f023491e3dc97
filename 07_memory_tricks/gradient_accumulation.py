"""Gradient accumulation: a batch that does not fit, cut into micro-batches whose gradients add up.

backward adds to the gradients that are there. So k backwards before one optimizer step give the gradient of all k
micro-batches, in the memory of one. It is the gradient of the whole batch if each micro-batch is weighted by its share
of the batch's tokens. Three things go wrong in published loops: the mean of the micro-batches' means is taken, which is
another gradient when lengths differ; the last micro-batches of an epoch are dropped when they do not fill a group; and
under DistributedDataParallel (DDP) every backward averages over the ranks, though only the last one needs to.

    laptop    python 07_memory_tricks/gradient_accumulation.py
              torchrun --nproc_per_node=2 07_memory_tricks/gradient_accumulation.py
    one GPU   python 07_memory_tricks/gradient_accumulation.py --model llama-124m --seq-len 1024 --micro-batches 8
    one node  torchrun --nproc_per_node=8 07_memory_tricks/gradient_accumulation.py --model llama-124m --seq-len 1024
    cluster   the same on every node, with --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400

Alone, the script is a job of one rank, where DDP makes the same all-reduces. Look for: the relative error of each way
to weight; all-reduces per step; memory of a step. Before: gradient_checkpointing.py. Next: chunked_loss.py.
"""

import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # old/, with nothing installed
from _gradient_accumulation_report import Found, conclude, relative_error

from old import cli, data, exits, hardware, model, runtime, shapes
from old.exits import UserError
from old.step_cost import record_memory, time_in_turns

warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)  # torch 2.11 does not have its successor
Batch = tuple[Tensor, Tensor]  # inputs, and targets where padding is data.PADDING


def accumulate(ddp: DistributedDataParallel, micro_batches: list[Batch]) -> None:
    """The gradient of the whole batch: each micro-batch counts by its share of the tokens of all ranks."""
    tokens = torch.stack([token_count(targets) for _, targets in micro_batches])
    tokens_of_all_ranks = tokens.sum()
    dist.all_reduce(tokens_of_all_ranks)
    weights = tokens / tokens_of_all_ranks * dist.get_world_size()  # DDP divides the sum over the ranks by their number
    for i, (inputs, targets) in enumerate(micro_batches):
        # DDP decides in forward whether the backward that follows averages over the ranks: only the last one does
        sync = nullcontext() if i == len(micro_batches) - 1 else ddp.no_sync()
        with sync:
            loss = ddp(inputs, targets)  # the mean over the tokens of this micro-batch
        (loss * weights[i]).backward()  # adds to the gradients that are there, and frees the activations


def mean_of_means(ddp: DistributedDataParallel, micro_batches: list[Batch]) -> None:
    """The usual loop. A token counts for more where it has less company, so the gradient is another one if lengths
    differ. And every backward averages over the ranks."""
    for inputs, targets in micro_batches:
        loss = ddp(inputs, targets) / len(micro_batches)
        loss.backward()


def groups(micro_batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """The micro-batches of an epoch, `size` for each optimizer step; the last group is what is left.

    A loop that steps only `if (i + 1) % size == 0` never uses that group, or adds its gradients to the next epoch's.
    """
    group = []
    for micro_batch in micro_batches:
        group.append(micro_batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def usual_epoch(ddp: DistributedDataParallel, micro_batches: list[Batch], size: int) -> int:
    """Tokens of this rank that reach an optimizer step in that loop."""
    tokens = 0
    waiting = 0
    for i, (inputs, targets) in enumerate(micro_batches):
        (ddp(inputs, targets) / size).backward()
        waiting += int(token_count(targets))
        if (i + 1) % size == 0:
            tokens += waiting  # here is the optimizer's step
            waiting = 0
            ddp.zero_grad()
    return tokens


def token_count(targets: Tensor) -> Tensor:
    return (targets != data.PADDING).sum()


def gradients(net: nn.Module, backward: Callable[[], None]) -> list[Tensor]:
    net.zero_grad(set_to_none=True)
    backward()
    return [weight.grad.clone() for weight in net.parameters()]


def join(micro_batches: list[Batch]) -> Batch:
    inputs, targets = zip(*micro_batches, strict=True)
    return torch.cat(inputs), torch.cat(targets)


def split(batch: Batch, parts: int) -> list[Batch]:
    inputs, targets = batch
    return list(zip(inputs.chunk(parts), targets.chunk(parts), strict=True))


def cut_lengths(micro_batches: list[Batch]) -> list[Batch]:
    """The same texts, cut to lengths that grow from first to last, as where a sampler groups texts by length."""
    inputs, targets = join(micro_batches)
    rows, length = targets.shape
    lengths = torch.linspace(max(1, length // 8), length, rows, device=targets.device).long()
    beyond = torch.arange(length, device=targets.device) >= lengths[:, None]
    return split((inputs, targets.masked_fill(beyond, data.PADDING)), len(micro_batches))


def note_all_reduce(buckets: list[Tensor], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP calls this for each bucket of gradients that is ready, instead of its all-reduce."""
    buckets.append(bucket.buffer())
    return allreduce_hook(None, bucket)


def compare(net: nn.Module, ddp: DistributedDataParallel, epoch: list[Batch], size: int) -> Found:
    """What the ways above give. `epoch`: the micro-batches of all ranks, `size` and more of them, on every rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def relative_error_of(way: Callable, micro_batches: list[Batch]) -> float:
        """Against one forward and one backward of the whole batch of all ranks, in one process."""
        exact = gradients(net, lambda: net(*join(micro_batches)).backward())
        mine = [split(batch, world_size)[rank] for batch in micro_batches]
        return relative_error(gradients(net, lambda: way(ddp, mine)), exact)

    uneven_epoch = cut_lengths(epoch)
    *_, last_group = groups(uneven_epoch, size)
    errors = {
        "equal lengths": {way.__name__: relative_error_of(way, epoch[:size]) for way in (mean_of_means, accumulate)},
        "lengths differ": {
            way.__name__: relative_error_of(way, uneven_epoch[:size]) for way in (mean_of_means, accumulate)
        },
        "last, partial group": {"accumulate": relative_error_of(accumulate, last_group)},
    }
    of_this_rank = [split(batch, world_size)[rank] for batch in uneven_epoch]
    tokens = sum(int(token_count(targets)) for _, targets in of_this_rank)
    used_share = usual_epoch(ddp, of_this_rank, size) / tokens
    steps = [len(group) for group in groups(of_this_rank, size)]
    return Found(errors, usual_tokens_share=used_share, micro_batches_by_step=steps)


def main() -> int:
    began = time.perf_counter()
    args = parse_args()
    config = shapes.load_config(args.model, 256, args.seq_len)
    runtime.seed(0, deterministic=False)
    device = runtime.init_process_group(args.device)
    runtime.exact_fp32(device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch_text = f"{args.batch_size} sequences of {args.seq_len} tokens per rank and step"
    runtime.say(f"{args.model}, {batch_text}, fp32, {world_size} x {hardware.device_name(device)}")

    text = data.load_corpus().train
    needed = world_size * args.batch_size // args.micro_batches
    data.require_sequences(text, seq_len=args.seq_len, count=needed, asked=f"--batch-size {args.batch_size}")
    stream = data.train_batches(
        text,
        seq_len=args.seq_len,
        global_batch_size=world_size * args.batch_size // args.micro_batches,
        micro_batch_size=world_size * args.batch_size // args.micro_batches,
        seed=0,
        device=device,
    )
    in_epoch = 2 * args.micro_batches + args.micro_batches // 2  # two whole groups and a half
    epoch = [tuple(tensor.to(device) for tensor in next(stream)) for _ in range(in_epoch)]
    net = model.build(args.model, config, seed=0, device=device)
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True, broadcast_buffers=False)
    buckets: list[Tensor] = []
    ddp.register_comm_hook(buckets, note_all_reduce)
    my_batch = join([split(batch, world_size)[rank] for batch in epoch[: args.micro_batches]])
    accumulate(ddp, [my_batch])  # DDP makes its final buckets after the first backward

    found = compare(net, ddp, epoch, args.micro_batches)
    for way in (mean_of_means, accumulate):
        buckets.clear()
        way(ddp, split(my_batch, args.micro_batches))
        found.all_reduce_bytes[way.__name__] = [bucket.nbytes for bucket in buckets]
    held = (*net.parameters(), *net.buffers(), *buckets)  # of the last way: each bucket once
    counts = sorted({1, 2, args.micro_batches})
    steps = {count: partial(accumulate_anew, ddp, split(my_batch, count)) for count in counts}
    for count, step in steps.items():
        net.zero_grad(set_to_none=True)
        found.memories[count] = record_memory(step, device, held)
    found.seconds = time_in_turns(steps, device, args.rounds)
    conclude(found, args, config, device, began)
    runtime.shutdown()
    return 0


def accumulate_anew(ddp: DistributedDataParallel, micro_batches: list[Batch]) -> None:
    ddp.zero_grad(set_to_none=True)
    accumulate(ddp, micro_batches)


def parse_args():
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--model", default="nano", help="as in 04_amp/train.py")
    add("--seq-len", type=cli.positive_int, default=128)
    add("--batch-size", type=cli.positive_int, default=8, help="sequences per rank and step")
    add("--micro-batches", type=cli.positive_int, default=4, help="into which these are cut")
    add("--rounds", type=cli.positive_int, default=5, help="timed steps of each kind, in turns")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--plot", type=cli.plot_file, metavar="PNG", default="runs/gradient_accumulation.png", help="(%(default)s)")
    add("--json", type=cli.writable_file, metavar="PATH", help="write the summary as one JSON object")
    args = parser.parse_args()
    if args.micro_batches < 2:
        raise UserError(f"--micro-batches {args.micro_batches} accumulates nothing: use 2 or more")
    if args.batch_size % args.micro_batches:
        fitting = cli.nearest_multiples(args.batch_size, args.micro_batches)
        raise UserError(
            f"--batch-size {args.batch_size} does not divide into {args.micro_batches} micro-batches: use {fitting}"
        )
    if args.seq_len < 2:
        raise UserError(f"--seq-len {args.seq_len}: sequences of one token cannot differ in length, use 2 or more")
    return args


if __name__ == "__main__":
    exits.run(main)
