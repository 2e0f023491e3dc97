"""The documents, the table and the checks of packing.py."""

import math

import numpy as np

from common.exits import UserError

PADDED_TOGETHER = 8  # documents of a padded batch
NO_MASK = "best fit, no mask"
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-2}  # relative, of gradients
COLUMNS = {
    "name": "documents",
    "useful_token_share": "useful tokens",
    "tokens_per_second": "useful tokens per second",
    "peak_bytes": "peak",
    "gradient_error": "gradients' error",
    "largest_change": "moved by another document",
}


def document_lengths(count: int, seq_len: int) -> list[int]:
    """Return log-normal lengths, as chats have: most are short, few are cut at seq_len."""
    lengths = np.random.default_rng(0).lognormal(math.log(seq_len / 8), 1, count)
    return lengths.clip(4, seq_len).astype(int).tolist()


def check_rows(rows: list[list[int]], seq_len: int, documents: int) -> None:
    """Raise UserError if no row holds two documents."""
    if max(len(row) for row in rows) < 2:
        raise UserError(
            f"no row of --seq-len {seq_len} holds two of --documents {documents}: raise either"
        )


def groups_of(count: int) -> list[range]:
    """Return the numbers of the documents that are padded together."""
    firsts = range(0, count, PADDED_TOGETHER)
    return [range(first, min(first + PADDED_TOGETHER, count)) for first in firsts]


def add_seconds(row: dict, seconds: dict) -> None:
    """Add the timing of a row, and its useful tokens per second."""
    row |= seconds
    row["tokens_per_second"] = row["useful_tokens"] / row["seconds"]
    row["min_tokens_per_second"] = row["useful_tokens"] / row["max_seconds"]
    row["max_tokens_per_second"] = row["useful_tokens"] / row["min_seconds"]


def check(rows: list[dict], shares: dict[str, float], args) -> list[str]:
    """Assert that documents are apart, and that gradients are those of one document at a time."""
    tolerance = TOLERANCE[args.dtype]
    leaking = [row["name"] for row in rows if row["documents_see_each_other"]]
    assert leaking == [NO_MASK], f"a document's logits move with another in: {leaking}"

    errors = {row["name"]: row["gradient_error"] for row in rows}
    without_mask = errors.pop(NO_MASK)
    assert without_mask > tolerance, "without a mask gradients are right"
    # not `max(...) <= tolerance`: max() may skip a NaN
    assert all(error <= tolerance for error in errors.values()), (
        f"not the gradients of one document at a time: {errors}"
    )

    useful = rows[0]["useful_tokens"]
    targets = useful - args.documents
    assert {row["targets"] for row in rows} == {targets}, "a document's last token has a target"
    share_of = {row["name"]: row["useful_token_share"] for row in rows}
    assert share_of["padded"] < share_of[NO_MASK], "packing wastes more than padding"
    return [
        "a word changes, and not a bit of another document's logits; without a mask they move",
        f"gradients are those of one document at a time, {max(errors.values()):.1g}; "
        f"without a mask off {without_mask:.1g}",
        f"{targets:,} targets in {useful:,} tokens: "
        f"the last tokens of {args.documents} documents have none",
        f"of 10,000 documents useful tokens: in order {shares['in_order']:.2%}, "
        f"best fit {shares['best_fit']:.2%}",
    ]
