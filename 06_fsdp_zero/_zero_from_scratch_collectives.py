"""The three collectives of zero_from_scratch.py: those of torch.distributed, and each call is counted."""

from collections import Counter
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from old import runtime

counts: Counter[str] = Counter()  # calls by name, and bytes


def counted(name: str, collective: Callable, trips: int) -> Callable:
    """The collective itself. It also notes that it was called, and the bytes of the whole tensor for each trip.

    In a ring a tensor makes one trip for a reduce-scatter or an all-gather, and two for an all-reduce. In each trip a
    rank sends N - 1 of its N parts.
    """

    def call(*tensors: Tensor) -> None:
        counts[name] += 1
        counts["bytes"] += trips * max(tensor.nbytes for tensor in tensors)  # one is whole, the other a part
        collective(*tensors)

    return call


all_reduce = counted("all_reduces", dist.all_reduce, trips=2)
reduce_scatter = counted("reduce_scatters", runtime.reduce_scatter, trips=1)
all_gather = counted("all_gathers", runtime.all_gather, trips=1)
