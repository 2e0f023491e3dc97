"""Which tokens each rank of context_parallel.py holds, and what ring attention then has to compute in which turn."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor


def chunks_of_rank(order: str, rank: int) -> list[int]:
    """Which chunks of the sequence a rank holds. Late queries see many keys, early ones few: zigzag pairs them."""
    return [rank] if order == "contiguous" else [rank, 2 * dist.get_world_size() - 1 - rank]


def positions_of_rank(order: str | None, seq_len: int) -> Tensor:
    """The places in the sequence of this rank's tokens; all of them for one process alone, which has no order."""
    if order is None:
        return torch.arange(seq_len)
    chunks = chunks_of_rank(order, dist.get_rank())
    size = seq_len // (dist.get_world_size() * len(chunks))
    return torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in chunks])


def tiles(order: str, turn: int, tokens: int) -> Iterator[tuple[slice, slice, bool]]:
    """What this rank computes in a turn: a chunk of its queries with a chunk of keys, and whether they are the same
    chunk, so that the diagonal of the mask runs through. Chunks of the future are left out."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    my_chunks = chunks_of_rank(order, rank)
    chunks_here = chunks_of_rank(order, (rank - turn) % world_size)
    size = tokens // len(my_chunks)
    for i, my_chunk in enumerate(my_chunks):
        for j, chunk in enumerate(chunks_here):
            if chunk <= my_chunk:
                yield slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size), chunk == my_chunk
