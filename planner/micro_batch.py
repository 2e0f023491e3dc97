"""Choose --micro-batch-size: the largest one whose predicted peak fits on the GPU.

07_memory_tricks/estimate.py prints it. The training scripts measure it: training/micro_batch.py.
Larger micro-batches keep a GPU busier, and the loss does not depend on them beyond rounding. The
peak of a step comes from planner/memory.py, before anything is allocated.
"""

from dataclasses import replace
from typing import NamedTuple

from planner.memory import peak
from planner.plan import Plan
from planner.shape import Shape

MEMORY_SHARE = 0.9  # of the free memory. The rest is for what the planner does not know


class Choice(NamedTuple):
    """A micro-batch size, and the bytes that a step needs with it."""

    size: int
    planned_bytes: float


def with_size(plan: Plan, size: int, share: int) -> Plan:
    """Return the plan with micro-batches of `size` of the `share` sequences of a rank."""
    return replace(plan, micro_batch_size=size, micro_batches=share // size)


def planned_bytes(shape: Shape, plan: Plan) -> float:
    """Return the bytes that a step needs of a GPU's free memory.

    A GPU's free memory does not include CUDA's context any more.
    """
    memory = peak(shape, plan)
    return memory.total_bytes() - memory.context_bytes()


def choose(shape: Shape, plan: Plan, *, share: int, free_bytes: float) -> Choice:
    """Return the largest power of two that divides `share` and fits, or 1 if none fits.

    With pipeline stages, a rank's share is at least two micro-batches per stage, if it is large
    enough: with fewer, the stages would mostly wait for each other.

    Arguments:
        share: sequences of a step on this rank
        free_bytes: free memory of the GPU that has least

    Raise ValueError if there is no such plan: see planner.plan.check.
    """
    largest = share
    if plan.pp > 1:
        largest = max(1, share // (2 * plan.pp))
    sizes = [size for size in _powers_of_two(share) if size <= largest]
    if plan.stages_per_rank > 1:  # train_3d.py requires a multiple of pp micro-batches
        sizes = [size for size in sizes if share // size % plan.pp == 0]
    for size in sizes:
        needed = planned_bytes(shape, with_size(plan, size, share))
        if needed <= MEMORY_SHARE * free_bytes:
            return Choice(size, needed)
    return Choice(1, planned_bytes(shape, with_size(plan, 1, share)))


def _powers_of_two(share: int) -> list[int]:
    """Return the powers of two that divide `share`, the largest first."""
    sizes = [1]
    while share % (2 * sizes[0]) == 0:
        sizes.insert(0, 2 * sizes[0])
    return sizes
