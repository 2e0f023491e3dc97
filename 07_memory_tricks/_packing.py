"""What packing.py is given and what it checks: documents, a stage of a pipeline, its table."""

import argparse
import copy
import math
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from common import data
from common.exits import UserError

COLUMNS = {
    "name": "documents",
    "useful_token_share": "useful tokens",
    "tokens_per_second": "useful tokens per second",
    "peak_bytes": "peak",
    "gradient_error": "gradients' error",
    "largest_change": "moved by another document",
}


def document_lengths(count: int, seq_len: int) -> list[int]:
    """Log-normal, as chats are: most are short, few are cut at seq_len."""
    lengths = np.random.default_rng(0).lognormal(math.log(seq_len / 8), 1, count)
    return lengths.clip(4, seq_len).astype(int).tolist()


def checked_rows(rows: list[list[int]], size: int) -> list[list[int]]:
    """UserError if no row holds two documents, or if the ranks do not divide a row."""
    if max(map(len, rows)) < 2:
        raise UserError(f"no row of --seq-len {size} holds two of --documents {sum(map(len, rows))}: raise either")
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if size % ranks:
        raise UserError(f"--seq-len {size} does not divide over {ranks} ranks: use {max(1, size // ranks) * ranks}")
    return rows


def read_documents(lengths: list[int], device: torch.device) -> list[Tensor]:
    """Pieces of the default corpus, as bytes."""
    text = data.load_corpus("stdlib").train
    if len(text) < sum(lengths):
        raise UserError(f"--documents {len(lengths)} take {sum(lengths)} tokens, the text has {len(text)}: use fewer")
    return [*torch.from_numpy(text[: sum(lengths)].astype(np.int64)).to(device).split(lengths)]


def stage_of(net: nn.Module) -> nn.Module:
    """The layers of this rank, with the weights of `net` itself, so that gradients arrive there."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    names = np.array_split([*net.model.layers], last + 1)[rank]
    stage = copy.deepcopy(net)
    stage.model.layers = nn.ModuleDict({name: net.model.layers[name] for name in names.tolist()})
    stage.model.embed_tokens = net.model.embed_tokens if rank == 0 else None
    stage.model.norm = net.model.norm if rank == last else None
    stage.lm_head = net.lm_head if rank == last else None
    return stage


def check(rows: list[dict], shares: dict[str, float], args: argparse.Namespace) -> list[str]:
    tolerance = 1e-5 if args.dtype == "fp32" else 5e-2
    leaking = [row for row in rows if row["name"] == "best fit, no mask"]
    apart = [row for row in rows if row not in leaking]
    assert {row["targets"] for row in rows} == {rows[0]["useful_tokens"] - args.documents}, "a last token has a target"
    for row in apart:
        name, error = row["name"], row["gradient_error"]
        assert not row["documents_see_each_other"], f"{name}: logits of another document moved"
        assert error <= tolerance, f"{name}: gradients are off by {error:.1e} from those of one document at a time"
    for row in leaking:
        assert row["largest_change"] > 1e-3, "without a mask no document sees another"
        assert row["gradient_error"] > tolerance, "without a mask gradients are right"
    share_of = {row["name"]: row["useful_token_share"] for row in rows}
    assert share_of["best fit, cut"] > share_of["padded"], f"packing wastes more than padding: {share_of}"
    assert shares["best_fit"] > shares["in_order"], f"best fit is no better than packing in order: {shares}"
    error = max(row["gradient_error"] for row in apart)
    return [
        f"one word changed, not a bit of another document's logits moves; without a mask "
        f"{leaking[0]['largest_change']:.2f} at the most",
        f"gradients equal those of one document at a time, {error:.1g}; without a mask off by "
        f"{leaking[0]['gradient_error']:.0%}",
        f"a document's last token has no target: {rows[0]['targets']:,} targets in {rows[0]['useful_tokens']:,} tokens",
        f"of 10,000 such documents, in order {shares['in_order']:.1%} of the tokens are useful, by best fit "
        f"{shares['best_fit']:.2%}",
    ]
