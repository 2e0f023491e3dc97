"""The batches, the table and the checks of gradient_accumulation.py."""

import torch
import torch.distributed as dist
from torch import Tensor

from common.exits import UserError
from training.batches import PADDING

Batch = tuple[Tensor, Tensor]  # inputs, and targets where padding is PADDING
MEAN = "mean of means"
# Relative errors of gradients: sums in another order, and a GPU adds thousands of terms in a row.
TOLERANCE = {"cpu": 1e-6, "cuda": 1e-5}
COLUMNS = {
    "name": "gradient of",
    "error": "error, equal lengths",
    "uneven_error": "lengths differ",
    "all_reduces": "all-reduces",
    "peak_bytes": "peak",
    "time_ratio": "time",
}


def check_flags(batch_size: int, micro_batches: int, seq_len: int) -> None:
    """Raise UserError if the batch does not divide, or if lengths cannot differ."""
    if micro_batches < 2 or batch_size % micro_batches:
        raise UserError(
            f"--batch-size {batch_size} does not divide into --micro-batches {micro_batches}, "
            "2 or more"
        )
    if seq_len < 2:
        raise UserError(
            f"--seq-len {seq_len}: sequences of one token cannot differ in length, use 2 or more"
        )


# --- batches


def split(batch: Batch, parts: int) -> list[Batch]:
    """Split a batch into this many parts."""
    inputs, targets = batch
    return list(zip(inputs.chunk(parts), targets.chunk(parts), strict=True))


def join(batches: list[Batch]) -> Batch:
    """Join batches to one."""
    inputs = [inputs for inputs, _ in batches]
    targets = [targets for _, targets in batches]
    return torch.cat(inputs), torch.cat(targets)


def part_of_this_rank(micro_batches: list[Batch]) -> list[Batch]:
    """Return this rank's sequences of each micro-batch of all ranks."""
    return [split(batch, dist.get_world_size())[dist.get_rank()] for batch in micro_batches]


def shorten(batch: Batch) -> Batch:
    """Return the same texts with lengths that grow from first to last.

    A sampler that groups texts by length makes such batches. The end of a text becomes padding.
    """
    inputs, targets = batch
    rows, length = targets.shape
    lengths = torch.linspace(max(1, length // 8), length, rows, device=targets.device).long()
    is_beyond = torch.arange(length, device=targets.device) >= lengths[:, None]  # [rows, length]
    return inputs, targets.masked_fill(is_beyond, PADDING)


# --- checks


def check(rows: list[dict], last_group_error: float, tolerance: float) -> list[str]:
    """Assert which gradients are those of the whole batch, and how many all-reduces they take."""
    errors = [last_group_error]
    for row in rows:
        if row["name"] == MEAN:
            mean = row
        else:
            errors += [row["error"], row["uneven_error"]]
    largest = max(errors)
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
    without_no_sync = mean["all_reduces"]
    assert without_no_sync == mean["micro_batches"] * buckets, (
        f"all-reduces of a step: {without_no_sync} without no_sync, {buckets} with"
    )
    return [
        "weighted by tokens, gradients equal those of one batch on every rank: "
        f"largest relative error {largest:.1g}",
        f"the mean of means is off by {mean['uneven_error']:.1%} where lengths differ",
        f"{buckets} all-reduces of gradients a step with no_sync, {without_no_sync} without it",
    ]


def check_epoch(
    token_counts: list[int], group_sizes: list[int], size: int
) -> tuple[list[str], float]:
    """Assert that the groups of an epoch have all of its micro-batches.

    Also return the share of the tokens that a loop uses that forgets the last group.
    """
    count = len(token_counts)
    grouped = sum(group_sizes)
    assert grouped == count, f"of {count} micro-batches {grouped} are in a group"
    in_full_groups = token_counts[: count // size * size]
    used_share = sum(in_full_groups) / sum(token_counts)
    line = (
        f"groups() makes steps of {group_sizes} micro-batches; "
        f"the usual loop uses {used_share:.0%} of the tokens"
    )
    return [line], used_share
