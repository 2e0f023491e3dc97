"""The collectives of expert_parallel.py: those of torch.distributed, and each call and its bytes are counted."""

from collections import Counter

import torch.distributed as dist
from torch import Tensor

counts: Counter[str] = Counter()


def all_to_all(arrived: Tensor, rows: Tensor, received: list[int], sent: list[int]) -> None:
    """The first sent[0] rows go to rank 0, the next sent[1] to rank 1, and so on; received[r] rows come from rank r."""
    to_others = len(rows) - sent[dist.get_rank()]
    counts["all_to_alls"] += 1
    counts["all_to_all_bytes"] += to_others * rows.shape[1] * rows.element_size()
    dist.all_to_all_single(arrived, rows, received, sent)


def all_gather(rows: Tensor, row: Tensor) -> None:
    """Row r of `rows` becomes the row of rank r. Its bytes are those of the row that this rank gives."""
    counts["all_gathers"] += 1
    counts["all_gather_bytes"] += row.nbytes
    dist.all_gather(list(rows), row)


def all_reduce(tensor: Tensor) -> None:
    """The sum over the ranks, in place. Its bytes are those of the tensor."""
    counts["all_reduces"] += 1
    counts["all_reduce_bytes"] += tensor.nbytes
    dist.all_reduce(tensor)
