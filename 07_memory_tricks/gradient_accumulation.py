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
where lengths differ; all-reduces per step; peak of a step. Before: gradient_checkpointing.py. Next: chunked_loss.py.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits, measure, report, runtime
from common.exits import UserError
from common.torch_versions import KEEP_BUFFERS
from lm import data, shapes
from lm.data import PADDING
from lm.weights import build

Batch = tuple[Tensor, Tensor]  # inputs, and targets where padding is PADDING


def accumulate(ddp: DistributedDataParallel, micro_batches: list[Batch]) -> None:
    """The gradient of the whole batch: each micro-batch counts by its share of the tokens of all ranks."""
    tokens = torch.stack([token_count(targets) for _, targets in micro_batches])
    tokens_of_all_ranks = tokens.sum()
    dist.all_reduce(tokens_of_all_ranks)
    # DDP divides the sum over the ranks by their number
    weights = tokens / tokens_of_all_ranks * dist.get_world_size()
    for i, (inputs, targets) in enumerate(micro_batches):
        # DDP decides in forward whether the backward that follows averages over the ranks: only the last one does
        sync = nullcontext() if i == len(micro_batches) - 1 else ddp.no_sync()
        with sync:
            loss = ddp(inputs, targets)  # the mean over the tokens of this micro-batch
        # adds to the gradients that are there, and frees the activations
        (loss * weights[i]).backward()


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


def token_count(targets: Tensor) -> Tensor:
    return (targets != PADDING).sum()


def split(batch: Batch, parts: int) -> list[Batch]:
    inputs, targets = batch
    return list(zip(inputs.chunk(parts), targets.chunk(parts), strict=True))


def join(batches: list[Batch]) -> Batch:
    inputs, targets = zip(*batches, strict=True)
    return torch.cat(inputs), torch.cat(targets)


def of_this_rank(micro_batches: list[Batch]) -> list[Batch]:
    return [split(batch, dist.get_world_size())[dist.get_rank()] for batch in micro_batches]


def cut_lengths(batch: Batch) -> Batch:
    """The same texts, cut to lengths that grow from first to last, as where a sampler groups texts by length."""
    inputs, targets = batch
    rows, length = targets.shape
    lengths = torch.linspace(max(1, length // 8), length, rows, device=targets.device).long()
    beyond = torch.arange(length, device=targets.device) >= lengths[:, None]
    return inputs, targets.masked_fill(beyond, PADDING)


def gradients(net: nn.Module, backward: Callable[[], None]) -> list[Tensor]:
    net.zero_grad(set_to_none=True)
    backward()
    return [weight.grad.clone() for weight in net.parameters()]


def error_of(way: Callable, ddp: DistributedDataParallel, micro_batches: list[Batch]) -> float:
    """Against one forward and one backward of the whole batch of all ranks in one process. The largest of any rank."""
    exact = gradients(ddp.module, lambda: ddp.module(*join(micro_batches)).backward())
    found = gradients(ddp.module, lambda: way(ddp, of_this_rank(micro_batches)))
    return max(runtime.all_gather(measure.relative_error(found, exact)))


def run(
    way: Callable, ddp: DistributedDataParallel, equal: list[Batch], uneven: list[Batch]
) -> dict:
    """One step in one way: its errors, its all-reduces and its peak."""
    errors = [error_of(way, ddp, micro_batches) for micro_batches in (equal, uneven)]
    mine, device = of_this_rank(equal), equal[0][0].device
    way(ddp, mine)
    buckets = [weight.grad for weight in ddp.parameters()]  # views into DDP's buckets, which stay
    held = [*ddp.module.parameters(), *ddp.module.buffers(), *buckets]
    ddp.zero_grad(set_to_none=True)
    with measure.LiveBytes(held, device) as memory:
        del held, buckets
        way(ddp, mine)
    ddp.zero_grad(set_to_none=True)
    with measure.Traffic() as sent:
        way(ddp, mine)
    return {
        "micro_batches": len(equal),
        "error": errors[0],
        "uneven_error": errors[1],
        "all_reduces": sent.calls["all_reduces"],
        "sent_bytes": round(sum(sent.bytes_sent.values())),
        "peak_bytes": memory.peak,
    }


def check(rows: list[dict], last_group_error: float, tolerance: float) -> list[str]:
    by_tokens = [row for row in rows if row["name"] != "mean of means"]
    (mean,) = (row for row in rows if row["name"] == "mean of means")
    largest = max(
        last_group_error, *(row[key] for row in by_tokens for key in ("error", "uneven_error"))
    )
    assert largest <= tolerance, (
        f"accumulated gradients are not those of the whole batch: off by {largest:.1e}"
    )
    assert mean["error"] <= tolerance, (
        f"the mean of means is off by {mean['error']:.1e} where lengths are equal"
    )
    assert mean["uneven_error"] > 1e-3, (
        f"lengths differ, and the mean of means is right: {mean['uneven_error']}"
    )
    buckets = rows[-1]["all_reduces"] - 1  # one is of the token counts
    assert buckets > 0, "no gradient was averaged"
    always = mean["all_reduces"]
    assert always == mean["micro_batches"] * buckets, (
        f"all-reduces of a step: {always} without no_sync, {buckets} with"
    )
    return [
        f"weighted by tokens, gradients equal those of one batch on every rank: largest relative error {largest:.1g}",
        f"the mean of means is off by {mean['uneven_error']:.1%} where lengths differ",
        f"{buckets} all-reduces of gradients a step with no_sync, {always} without it",
    ]


def check_epoch(epoch: list[Batch], size: int) -> tuple[str, float]:
    """groups() leaves nothing out; the usual loop uses this share of the tokens."""
    tokens = [int(token_count(targets)) for _, targets in epoch]
    grouped = [len(group) for group in groups(epoch, size)]
    assert sum(grouped) == len(epoch), (
        f"of {len(epoch)} micro-batches {sum(grouped)} are in a group"
    )
    used = sum(tokens[: len(epoch) // size * size]) / sum(tokens)
    return (
        f"groups() makes steps of {grouped} micro-batches; the usual loop uses {used:.0%} of the tokens",
        used,
    )


def main() -> int:
    args = report.lesson_flags(
        __doc__, model="nano", seq_len=128, batch_size=8, micro_batches=4, rounds=3
    )
    count = args.micro_batches
    if count < 2 or args.batch_size % count:
        raise UserError(
            f"--batch-size {args.batch_size} does not divide into --micro-batches {count}, 2 or more"
        )
    if args.seq_len < 2:
        raise UserError(
            f"--seq-len {args.seq_len}: sequences of one token cannot differ in length, use 2 or more"
        )
    config = shapes.load_config(args.model, 256, args.seq_len)
    runtime.seed_all(0)
    device = runtime.init_process_group(args.device)
    in_epoch = 2 * count + count // 2  # micro-batches: two whole groups and a half
    sequences = in_epoch * dist.get_world_size() * args.batch_size // count
    batch = data.one_batch(sequences, args.seq_len, device)  # of all ranks, on every rank
    epoch, uneven_epoch = split(batch, in_epoch), split(cut_lengths(batch), in_epoch)
    net = build(args.model, config, seed=0, device=device)
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True, **KEEP_BUFFERS)
    # DDP makes its final buckets after the first backward
    accumulate(ddp, of_this_rank(epoch[:count]))

    ways = {"one batch": (accumulate, 1), "mean of means": (mean_of_means, count)}
    ways |= {
        f"weighted by tokens, {parts}": (accumulate, parts)
        for parts in ((2, count) if count % 2 == 0 else (count,))
    }
    rows, steps = [], {}
    for name, (way, parts) in ways.items():
        equal, uneven = (split(join(batches[:count]), parts) for batches in (epoch, uneven_epoch))
        rows.append({"name": name, **run(way, ddp, equal, uneven)})
        mine = of_this_rank(equal)
        steps[name] = lambda way=way, mine=mine: (ddp.zero_grad(set_to_none=True), way(ddp, mine))
    seconds = measure.seconds_in_turns(steps, device, args.rounds)
    rows = [{**row, **seconds[row["name"]]} for row in rows]
    *_, last_group = groups(uneven_epoch, count)
    # sums in another order; a GPU adds thousands in a row
    tolerance = 1e-6 if device.type == "cpu" else 1e-5
    checked = check(rows, error_of(accumulate, ddp, last_group), tolerance)
    of_epoch, used_share = check_epoch(of_this_rank(uneven_epoch), count)
    columns = {
        "name": "gradient of",
        "error": "error, equal lengths",
        "uneven_error": "lengths differ",
    }
    columns |= {"all_reduces": "all-reduces", "peak_bytes": "peak", "time_ratio": "time"}
    own = {
        "dtype": "fp32",
        "parameters": shapes.parameter_count(config),
        "usual_tokens_share": used_share,
    }
    report.end_lesson(
        rows, columns=columns, checked=[*checked, of_epoch], args=args, device=device, **own
    )
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
