"""One tile of ring attention in context_parallel.py: some queries with some keys, as a fused kernel computes it.

q, out, out_gradient: [batch, key-value heads, query heads of each, queries, head_dim]; log_sum_exp and row_sums: the
same without head_dim; kv and kv_gradient: [2, batch, key-value heads, keys,
head_dim]. What is added to is a view.
"""

import math

import torch
from _context_parallel_collectives import counts
from torch import Tensor


def scores_of(q: Tensor, k: Tensor, on_diagonal: bool) -> Tensor:
    """Scaled scores [..., queries, keys]; on the diagonal no query sees a key of its future."""
    scores = torch.einsum("bkgqd,bktd->bkgqt", q, k) / math.sqrt(q.shape[-1])
    counts["scores"] += scores.shape[-2] * scores.shape[-1]  # of one head of one sequence
    if on_diagonal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(future, -math.inf)
    return scores


def add_tile(q: Tensor, kv: Tensor, on_diagonal: bool, out: Tensor, log_sum_exp: Tensor) -> None:
    """Online softmax. `out` is right for the keys seen so far. With more keys their weights shrink, then those of the
    new ones are added."""
    k, v = kv
    scores = scores_of(q, k, on_diagonal)
    new_log_sum_exp = torch.logaddexp(log_sum_exp, scores.logsumexp(-1))
    weights = (scores - new_log_sum_exp[..., None]).exp()
    out *= (log_sum_exp - new_log_sum_exp).exp()[..., None]
    out += torch.einsum("bkgqt,bktd->bkgqd", weights, v)
    log_sum_exp.copy_(new_log_sum_exp)


def add_tile_gradients(
    q: Tensor,
    out_gradient: Tensor,
    q_gradient: Tensor,
    log_sum_exp: Tensor,
    row_sums: Tensor,
    kv: Tensor,
    kv_gradient: Tensor,
    on_diagonal: bool,
) -> None:
    """The weights of a tile come from its scores and the final log-sum-exp: no other tile is needed."""
    k, v = kv
    k_gradient, v_gradient = kv_gradient
    weights = (scores_of(q, k, on_diagonal) - log_sum_exp[..., None]).exp()
    v_gradient += torch.einsum("bkgqt,bkgqd->bktd", weights, out_gradient)
    weight_gradient = torch.einsum("bkgqd,bktd->bkgqt", out_gradient, v)
    score_gradient = weights * (weight_gradient - row_sums[..., None]) / math.sqrt(q.shape[-1])
    q_gradient += torch.einsum("bkgqt,bktd->bkgqd", score_gradient, k)
    k_gradient += torch.einsum("bkgqt,bkgqd->bktd", score_gradient, q)
