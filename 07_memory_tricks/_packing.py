"""What packing.py is given and what it checks: documents, varlen_attn, its table."""

import argparse
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from common import runtime
from common.exits import UserError

COLUMNS = {"name": "documents", "useful_token_share": "useful tokens"}
COLUMNS |= {"tokens_per_second": "useful tokens per second", "peak_bytes": "peak"}
COLUMNS |= {"gradient_error": "gradients' error", "largest_change": "moved by another document"}


def document_lengths(count: int, seq_len: int) -> list[int]:
    """Log-normal, as chats are: most are short, few are cut at seq_len."""
    lengths = np.random.default_rng(0).lognormal(math.log(seq_len / 8), 1, count)
    return lengths.clip(4, seq_len).astype(int).tolist()


def varlen(batch: NamedTuple) -> Callable:
    """As cut, in one kernel that takes the documents' ends. CUDA and bf16 alone."""
    from torch.nn.attention.varlen import varlen_attn

    lengths = batch.owner[0].unique_consecutive(return_counts=True)[1]
    ends, longest = F.pad(lengths.cumsum(0), (1, 0)).int(), int(lengths.max())

    def attend(q: Tensor, k: Tensor, v: Tensor, *_, **__) -> Tensor:
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (q, k, v))  # [tokens, heads, head_dim]
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
        # causal; by default it is not
        out = varlen_attn(q, k, v, ends, ends, longest, longest, window_size=(-1, 0))
        return out.transpose(0, 1)[None]

    return attend


def refuse(rows: list[list[int]], args: argparse.Namespace) -> None:
    """UserError if no row holds two documents, or if the ranks do not divide a row."""
    size = args.seq_len
    ranks = runtime.ranks().world_size
    if max(map(len, rows)) < 2:
        raise UserError(
            f"no row of --seq-len {size} holds two of --documents {args.documents}: raise either"
        )
    if size % ranks:
        raise UserError(
            f"--seq-len {size} does not divide over {ranks} ranks: use {max(1, size // ranks) * ranks}"
        )


def check(rows: list[dict], shares: dict[str, float], args: argparse.Namespace) -> list[str]:
    tolerance = 1e-5 if args.dtype == "fp32" else 5e-2
    seeing = [row["name"] for row in rows if row["documents_see_each_other"]]
    assert seeing == ["best fit, no mask"], f"where a document's logits move with another: {seeing}"
    errors = {row["name"]: row["gradient_error"] for row in rows}
    without_mask = errors.pop("best fit, no mask")
    assert without_mask > tolerance, "without a mask gradients are right"
    assert all(error <= tolerance for error in errors.values()), (
        f"not the gradients of one document a time: {errors}"
    )
    useful, targets = rows[0]["useful_tokens"], rows[0]["useful_tokens"] - args.documents
    assert {row["targets"] for row in rows} == {targets}, "a document's last token has a target"
    assert rows[1]["useful_token_share"] < rows[3]["useful_token_share"], (
        "packing wastes more than padding"
    )
    return [
        "a word changes, and not a bit of another document's logits; without a mask they move",
        f"gradients are one document's at a time, {max(errors.values()):.1g}; without a mask off {without_mask:.1g}",
        f"{targets:,} targets in {useful:,} tokens: the last tokens of {args.documents} documents have none",
        f"of 10,000 documents useful tokens: in order {shares['in_order']:.2%}, best fit {shares['best_fit']:.2%}",
    ]
