"""What compare.py counts while a step runs: each collective that is really called, and the bytes that are alive."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from old.step_cost import LiveMemory

# Every collective of torch.distributed goes through one of these operators, whoever calls it: DDP's reducer in C++,
# fully_shard or a script. With each, the name of its count, and how often a ring sends the whole tensor round.
OPERATORS = {
    "c10d::allreduce_": ("all_reduces", 2),
    "c10d::_reduce_scatter_base_": ("reduce_scatters", 1),
    "c10d::_allgather_base_": ("all_gathers", 1),
}


class Kind(NamedTuple):
    """Collectives that cost alike."""

    name: str
    ranks: int  # of the group that takes part
    ranks_per_node: int  # of these, on this rank's node


@dataclass
class Traffic:
    """The collectives of one step on one rank."""

    calls: Counter[Kind] = field(default_factory=Counter)
    bytes_round: Counter[Kind] = field(default_factory=Counter)  # bytes of the whole tensors, once for each trip

    def count(self, name: str) -> int:
        return sum(calls for kind, calls in self.calls.items() if kind.name == name)

    def bytes_sent(self, kind: Kind) -> Fraction:
        """In a ring of n ranks a tensor is cut into n parts, and in each trip a rank sends n - 1 of them."""
        return Fraction(self.bytes_round[kind] * (kind.ranks - 1), kind.ranks)

    def all_bytes_sent(self) -> int:
        return round(sum(self.bytes_sent(kind) for kind in self.calls))


@dataclass
class Counts:
    """What a method needs on one rank."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    peaks: Counter[str]  # the most bytes alive in each phase of the step
    traffic: Traffic

    @property
    def peak_bytes(self) -> int:
        return max(self.peaks.values())


class Count(LiveMemory):
    """Sees every operator that runs inside it, on real tensors and on fake ones."""

    def __init__(self, ranks_per_node: int) -> None:
        super().__init__()
        self.ranks_per_node = ranks_per_node
        self.restart()

    def restart(self) -> None:
        """Count from here on, with what is alive by now."""
        self.traffic = Traffic()
        self.peaks = Counter()
        self.phase = "forward"

    def enter(self, phase: str) -> None:
        self.phase = phase

    def after(self, operator, operands: tuple) -> None:
        if operator.namespace == "c10d":
            self._note_collective(operator.name(), operands)
        self.peaks[self.phase] = max(self.peaks[self.phase], self.bytes_now())

    def _note_collective(self, operator: str, args: tuple) -> None:
        name, trips = OPERATORS.get(operator, (operator, 0))
        group = dist.ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject)))
        here = dist.get_rank() // self.ranks_per_node
        on_this_node = [rank for rank in dist.get_process_group_ranks(group) if rank // self.ranks_per_node == here]
        kind = Kind(name, group.size(), len(on_this_node))
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        whole = max(tensor.nbytes for tensor in tensors)  # the other one, if there is one, is a rank's part
        self.traffic.calls[kind] += 1
        self.traffic.bytes_round[kind] += trips * whole


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """The memory that these tensors look into, each piece once; of a DTensor, this rank's part."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in (t.untyped_storage() for t in local)}.values())
