"""What context_parallel.py sends: the calls of torch.distributed, each counted with the bytes that this rank sends."""

from collections import Counter

import torch.distributed as dist
from torch import Tensor

from old import runtime

# Calls by name, "bytes" for activations, "weight_bytes" for gradients of weights, "scores" for what ring attention
# computes. Sizes are those of ring algorithms, in which a rank passes on what is not its own.
counts: Counter[str] = Counter()


def all_gather(whole: Tensor, part: Tensor) -> None:
    counts["all_gathers"] += 1
    counts["bytes"] += whole.nbytes - part.nbytes
    runtime.all_gather(whole.flatten(0, 1), part)  # gloo wants the parts one behind the other, not stacked


def reduce_scatter(part: Tensor, whole: Tensor) -> None:
    counts["reduce_scatters"] += 1
    counts["bytes"] += whole.nbytes - part.nbytes
    runtime.reduce_scatter(part, whole.flatten(0, 1))


def all_to_all(received: Tensor, parts: Tensor) -> None:
    counts["all_to_alls"] += 1
    counts["bytes"] += parts.nbytes - parts[0].nbytes  # one part stays
    dist.all_to_all_single(received, parts)


def batch_isend_irecv(operations: list[dist.P2POp]) -> list[dist.Work]:
    counts["rounds"] += 1
    sent = [operation.tensor for operation in operations if operation.op is dist.isend]
    counts["sends"] += len(sent)
    counts["bytes"] += sum(tensor.nbytes for tensor in sent)
    return dist.batch_isend_irecv(operations)


def all_reduce(tensor: Tensor) -> None:
    counts["all_reduces"] += 1
    counts["weight_bytes"] += 2 * tensor.nbytes  # two trips; in each, N - 1 of N parts: the report divides
    dist.all_reduce(tensor)
