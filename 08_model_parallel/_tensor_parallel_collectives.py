"""The collectives of tensor_parallel.py, on activations: [batch, length, hidden]."""

import torch
import torch.distributed as dist
from torch import Tensor

from old.runtime import all_gather, reduce_scatter


def identity(x: Tensor) -> Tensor:
    return x.view_as(x)  # autograd wants a new tensor


def sum_over_ranks(x: Tensor) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def gather_positions(x: Tensor) -> Tensor:
    """[batch, length / N, hidden] to [batch, length, hidden]."""
    n = dist.get_world_size()
    parts = x.new_empty(n * len(x), *x.shape[1:])  # one after the other, as they come
    all_gather(parts, x.contiguous())
    return torch.cat(parts.chunk(n), dim=1)


def sum_of_my_positions(x: Tensor) -> Tensor:
    """[batch, length, hidden] to [batch, length / N, hidden], summed over the ranks."""
    parts = torch.cat(x.chunk(dist.get_world_size(), dim=1))  # rank r gets the r-th
    mine = parts.new_empty(len(x), *parts.shape[1:])
    reduce_scatter(mine, parts)
    return mine
