"""Gradient accumulation: split a batch that does not fit, and add up the gradients of its parts.

backward adds to existing gradients. So k backwards before one optimizer step give the gradient of
all k micro-batches, with the activations of one. It is the gradient of the whole batch if each
micro-batch is weighted by its share of the batch's tokens. Published loops get three things wrong:

    They take the mean of the micro-batches' means: another gradient where lengths differ.
    They drop the last micro-batches of an epoch, if these do not fill a group.
    Under DistributedDataParallel (DDP) every backward averages over the ranks. Only the last one
    of a step needs to.

    laptop    python 07_memory_tricks/gradient_accumulation.py
              torchrun --standalone --nproc_per_node=2 07_memory_tricks/gradient_accumulation.py
    one GPU   python 07_memory_tricks/gradient_accumulation.py --device cuda
    one node  torchrun --standalone --nproc_per_node=8 07_memory_tricks/gradient_accumulation.py
    cluster   the same on every node, but in place of --standalone
              --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400 --rdzv-id=$JOB

Without torchrun the script is a job of one rank, where DDP calls the same all-reduces. What to look
at: the error of each method where lengths differ; all-reduces per step; the peak of a step.
Expected on one H100, where the model is wider and a step takes at least 41 ms by the data sheet's
67 TFLOP/s in fp32: a lower peak with more micro-batches, at about the same time.
Previous: gradient_checkpointing.py. Next: chunked_loss.py.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _gradient_accumulation as helper
import torch
import torch.distributed as dist
from _gradient_accumulation import Batch, join, part_of_this_rank, split
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common import lesson, measure, runtime
from common.torch_versions import KEEP_BUFFERS
from lm import shapes, stdlib_text
from lm.weights import build, load_config
from training.batches import PADDING

# --- 1. the gradient of a step


def accumulate(ddp: DistributedDataParallel, micro_batches: list[Batch]) -> None:
    """Compute the gradient of the mean over all tokens of all micro-batches of all ranks."""
    tokens = torch.stack([token_count(targets) for _, targets in micro_batches])
    tokens_of_all_ranks = tokens.sum()
    dist.all_reduce(tokens_of_all_ranks)
    # DDP divides the sum over the ranks by the world size.
    weights = tokens / tokens_of_all_ranks * dist.get_world_size()
    for i, (inputs, targets) in enumerate(micro_batches):
        # In forward DDP decides whether the backward that follows averages over the ranks.
        is_last = i == len(micro_batches) - 1
        sync = nullcontext() if is_last else ddp.no_sync()
        with sync:
            loss = ddp(inputs, targets)  # the mean over the tokens of this micro-batch
        (loss * weights[i]).backward()  # adds to the gradients, and frees the activations


def mean_of_means(ddp: DistributedDataParallel, micro_batches: list[Batch]) -> None:
    """Run the usual loop.

    A token counts for more in a micro-batch that has fewer of them. And every backward averages
    over the ranks.
    """
    for inputs, targets in micro_batches:
        loss = ddp(inputs, targets) / len(micro_batches)
        loss.backward()


def token_count(targets: Tensor) -> Tensor:
    """Return the number of targets that are not padding."""
    return (targets != PADDING).sum()


# --- 2. the steps of an epoch


def groups(micro_batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each optimizer step: `size` of them, and at last those left over.

    A loop that steps only `if (i + 1) % size == 0` never uses the last ones, or adds their
    gradients to the next epoch's.
    """
    group = []
    for micro_batch in micro_batches:
        group.append(micro_batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


# --- 3. errors, all-reduces and peaks


def gradients(net: nn.Module, backward: Callable[[], None]) -> list[Tensor]:
    """Return copies of the gradients that `backward` computes."""
    net.zero_grad(set_to_none=True)
    backward()
    return [weight.grad.clone() for weight in net.parameters()]


def error_of(method: Callable, ddp: DistributedDataParallel, micro_batches: list[Batch]) -> float:
    """Return the relative error of a method's gradients, the largest of all ranks.

    The exact ones are of one forward and backward of the whole batch of all ranks in one process.
    """

    def backward_of_the_batch() -> None:
        inputs, targets = join(micro_batches)
        ddp.module(inputs, targets).backward()

    exact = gradients(ddp.module, backward_of_the_batch)
    found = gradients(ddp.module, partial(method, ddp, part_of_this_rank(micro_batches)))
    return max(runtime.all_gather(measure.relative_error(found, exact)))


def run(
    method: Callable, ddp: DistributedDataParallel, equal: list[Batch], uneven: list[Batch]
) -> dict:
    """Return the errors, the all-reduces and the peak of one step."""
    error = error_of(method, ddp, equal)
    uneven_error = error_of(method, ddp, uneven)

    mine = part_of_this_rank(equal)
    method(ddp, mine)
    buckets = [weight.grad for weight in ddp.parameters()]  # views into DDP's buckets, which stay
    held = [*ddp.module.parameters(), *ddp.module.buffers(), *buckets]
    ddp.zero_grad(set_to_none=True)
    with measure.LiveBytes(held, equal[0][0].device) as memory:
        del held, buckets
        method(ddp, mine)

    ddp.zero_grad(set_to_none=True)
    with measure.Traffic() as sent:
        method(ddp, mine)
    return {
        "micro_batches": len(equal),
        "error": error,
        "uneven_error": uneven_error,
        "all_reduces": sent.calls["all_reduces"],
        "sent_bytes": round(sum(sent.bytes_sent.values())),
        "peak_bytes": memory.peak,
    }


def step(method: Callable, ddp: DistributedDataParallel, micro_batches: list[Batch]) -> None:
    """Compute the gradient of a step, from no gradients."""
    ddp.zero_grad(set_to_none=True)
    method(ddp, micro_batches)


def main() -> int:
    args = lesson.parse_flags(
        __doc__,
        gpu={"model": "wide", "seq_len": 1024},
        model="nano",
        seq_len=128,
        batch_size=8,
        micro_batches=4,
        rounds=3,
    )
    count = args.micro_batches
    helper.check_flags(args.batch_size, count, args.seq_len)
    config = load_config(args.model, 256, args.seq_len)
    runtime.seed_all(0)
    device = runtime.init_process_group(args.device)

    epoch_size = 2 * count + count // 2  # in micro-batches: two full groups and a half
    sequences = epoch_size * dist.get_world_size() * args.batch_size // count
    batch = stdlib_text.one_batch(sequences, args.seq_len, device)  # of all ranks, on every rank
    epoch = split(batch, epoch_size)
    uneven_epoch = split(helper.shorten(batch), epoch_size)
    net = build(args.model, config, seed=0, device=device)
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True, **KEEP_BUFFERS)
    accumulate(ddp, part_of_this_rank(epoch[:count]))  # DDP makes its final buckets after this

    methods = {"one batch": (accumulate, 1), helper.MEAN: (mean_of_means, count)}
    if count % 2 == 0:
        methods["weighted by tokens, 2"] = (accumulate, 2)
    methods[f"weighted by tokens, {count}"] = (accumulate, count)
    rows = []
    steps = {}
    for name, (method, parts) in methods.items():
        equal = split(join(epoch[:count]), parts)
        uneven = split(join(uneven_epoch[:count]), parts)
        rows.append({"name": name, **run(method, ddp, equal, uneven)})
        steps[name] = partial(step, method, ddp, part_of_this_rank(equal))
    seconds = measure.seconds_in_turns(steps, device, args.rounds)
    for row in rows:
        row |= seconds[row["name"]]

    *_, last_group = groups(uneven_epoch, count)
    last_group_error = error_of(accumulate, ddp, last_group)
    tolerance = helper.TOLERANCE.get(device.type, 1e-5)
    checked = helper.check(rows, last_group_error, tolerance)
    my_epoch = part_of_this_rank(uneven_epoch)
    token_counts = [int(token_count(targets)) for _, targets in my_epoch]
    group_sizes = [len(group) for group in groups(my_epoch, count)]
    epoch_checked, used_share = helper.check_epoch(token_counts, group_sizes, count)
    lesson.end(
        rows,
        columns=helper.COLUMNS,
        checked=checked + epoch_checked,
        args=args,
        device=device,
        dtype="fp32",
        parameters=shapes.parameter_count(config),
        usual_tokens_share=used_share,
    )
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
