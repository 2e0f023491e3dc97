"""What context_parallel.py cuts and counts: the order of the tokens, a tile of ring attention, the formulas.

q, out and their gradients: [batch, key-value heads, query heads of each, queries, head_dim]; log_sum_exp and row_sums
the same without head_dim; kv and kv_gradient: [2, batch, key-value heads, keys, head_dim].
"""

import argparse
import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from common import runtime
from common.exits import UserError
from lm import shapes

# elements of each tile that ring attention has computed, of one head of one sequence
tile_scores: list[int] = []


def chunks_of_rank(order: str, rank: int) -> list[int]:
    """Which chunks of the sequence a rank holds. Late queries see many keys, early ones few: zigzag pairs them."""
    return [rank] if order == "contiguous" else [rank, 2 * dist.get_world_size() - 1 - rank]


def positions_of_rank(order: str | None, seq_len: int) -> Tensor:
    """The places in the sequence of this rank's tokens; without an order those of all tokens."""
    if order is None:
        return torch.arange(seq_len)
    chunks = chunks_of_rank(order, dist.get_rank())
    size = seq_len // (dist.get_world_size() * len(chunks))
    return torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in chunks])


def tiles(order: str, turn: int, tokens: int) -> Iterator[tuple[slice, slice, bool]]:
    """What this rank computes in a turn: a chunk of its queries, one of keys that it may see, and if they are one."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    my_chunks = chunks_of_rank(order, rank)
    chunks_here = chunks_of_rank(order, (rank - turn) % world_size)
    size = tokens // len(my_chunks)
    for i, my_chunk in enumerate(my_chunks):
        for j, chunk in enumerate(chunks_here):
            if chunk <= my_chunk:
                queries, keys = slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size)
                yield queries, keys, chunk == my_chunk


def scores_of(q: Tensor, k: Tensor, on_diagonal: bool) -> Tensor:
    """Scaled scores [..., queries, keys]; on the diagonal no query sees a key of its future."""
    scores = torch.einsum("bkgqd,bktd->bkgqt", q, k) / math.sqrt(q.shape[-1])
    tile_scores.append(scores.shape[-2] * scores.shape[-1])
    if on_diagonal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(future, -math.inf)
    return scores


def add_tile(
    tile: tuple[slice, slice, bool], q: Tensor, kv: Tensor, out: Tensor, log_sum_exp: Tensor
) -> None:
    """Online softmax: `out` is right for the keys seen so far. Their weights shrink, then the new keys' are added."""
    queries, keys, on_diagonal = tile
    q, out, log_sum_exp = q[..., queries, :], out[..., queries, :], log_sum_exp[..., queries]
    k, v = kv[..., keys, :]
    scores = scores_of(q, k, on_diagonal)
    new_log_sum_exp = torch.logaddexp(log_sum_exp, scores.logsumexp(-1))
    weights = (scores - new_log_sum_exp[..., None]).exp()
    out *= (log_sum_exp - new_log_sum_exp).exp()[..., None]
    out += torch.einsum("bkgqt,bktd->bkgqd", weights, v)
    log_sum_exp.copy_(new_log_sum_exp)


def add_tile_gradients(
    tile: tuple[slice, slice, bool], of_queries: tuple, of_rows: tuple, of_keys: tuple
) -> None:
    """The weights of a tile come from its scores and the final log-sum-exp: no other tile is needed."""
    queries, keys, on_diagonal = tile
    q, out_gradient, q_gradient = (tensor[..., queries, :] for tensor in of_queries)
    log_sum_exp, row_sums = (tensor[..., queries, None] for tensor in of_rows)
    (k, v), (k_gradient, v_gradient) = (tensor[..., keys, :] for tensor in of_keys)
    weights = (scores_of(q, k, on_diagonal) - log_sum_exp).exp()
    v_gradient += torch.einsum("bkgqt,bkgqd->bktd", weights, out_gradient)
    weight_gradient = torch.einsum("bkgqd,bktd->bkgqt", out_gradient, v)
    score_gradient = weights * (weight_gradient - row_sums) / math.sqrt(q.shape[-1])
    q_gradient += torch.einsum("bkgqt,bktd->bkgqd", score_gradient, k)
    k_gradient += torch.einsum("bkgqt,bkgqd->bktd", score_gradient, q)


def chosen_ways(args: argparse.Namespace, config: shapes.Config, ways: Iterable[str]) -> list[str]:
    """One process and what --attention names. UserError if the ranks cannot divide the sequence, or the heads."""
    n = runtime.world_size_after_relaunch(args.device)
    chunks = 2 * n  # zigzag order: two per rank
    if args.seq_len % chunks:
        use = max(args.seq_len // chunks, 1) * chunks
        raise UserError(
            f"--seq-len {args.seq_len} does not divide into {chunks} chunks, two per rank: use {use}"
        )
    chosen = [
        way
        for way in ways
        if args.attention == "all" or way.lower().startswith((args.attention, "one"))
    ]
    if "Ulysses" in chosen and config.num_key_value_heads % n:
        reason = f"{n} ranks do not divide the {config.num_key_value_heads} key-value heads of --model {args.model}"
        if args.attention == "ulysses":
            raise UserError(f"--attention ulysses: {reason}: use ring")
        runtime.print0(f"Ulysses is left out: {reason}")
        chosen.remove("Ulysses")
    return chosen


def expected(way: str, config: shapes.Config, args: argparse.Namespace) -> dict:
    """Calls and bytes of this rank in a step, and the scores of each rank, from shapes alone."""
    layers, n = config.num_hidden_layers, dist.get_world_size()
    tokens = args.batch_size * args.seq_len // n
    q = 4 * tokens * config.num_attention_heads * config.head_dim  # bytes of its queries
    kv = 2 * 4 * tokens * config.num_key_value_heads * config.head_dim  # and of its keys and values
    calls, sent, tiles_of_ranks = "none", 0, [0] * n
    if way == "all-gather":
        calls = f"{layers} all-gathers, {layers} reduce-scatters"
        sent = 2 * (n - 1) * kv
    elif way == "Ulysses":
        calls = f"{4 * layers} all-to-alls"
        sent = 2 * (n - 1) * (2 * q + kv) // n
    elif way.startswith("ring"):
        # keys and values make n - 1 hops in forward and in backward, their gradients n in backward
        if n > 1:
            calls = f"{layers * (3 * n - 2)} sends"
            sent = (3 * n - 2) * kv
        tiles_of_ranks = [
            2 * n + 1 if way == "ring, zigzag" else 4 * (rank + 1) for rank in range(n)
        ]
    # forward and backward
    scores = [2 * layers * count * (args.seq_len // (2 * n)) ** 2 for count in tiles_of_ranks]
    return {"calls": calls, "sent_bytes": layers * sent, "scores_of_each_rank": tuple(scores)}


COLUMNS = {
    "name": "way",
    "calls": "calls in a step",
    "sent_bytes": "sent per rank",
    "busiest_ratio": "scores, busiest rank / mean",
    "kept_bytes_per_rank": "kept for backward",
    "kept_share": "of one process",
    "gradient_error": "gradients' error",
}


def check(rows: list[dict], config: shapes.Config, args: argparse.Namespace) -> list[str]:
    n, kept_by_one_process = dist.get_world_size(), rows[0]["kept_bytes_per_rank"]
    losses = torch.tensor([row["losses"] for row in rows], dtype=torch.float64)
    loss_errors = (losses / losses[0] - 1).abs().amax(1).tolist()
    for row, loss_error in zip(rows, loss_errors, strict=True):
        name = row["name"]
        for key, value in expected(name, config, args).items():
            assert row[key] == value, f"{name}: {key} is {row[key]}, and must be {value}"
        for what, error in (("loss", loss_error), ("gradient", row["gradient_error"])):
            assert error <= 1e-5, f"{name}: {what} differs from that of one process by {error:.0e}"
        assert len(set(row["weights_sha256"])) == 1, f"{name}: ranks hold different weights"
        kept, most = row["kept_bytes_per_rank"], 1.02 * kept_by_one_process / n + 4096
        assert kept <= most or "ring" not in name, (
            f"{name} keeps {kept:,} bytes for backward, more than {most:,.0f}"
        )
    return [
        f"losses (to {max(loss_errors):.0e}) and gradients are those of one process; all ranks hold the same weights",
        f"calls, bytes and scores are those of the formulas; in a ring a rank keeps 1/{n} for backward",
    ]
