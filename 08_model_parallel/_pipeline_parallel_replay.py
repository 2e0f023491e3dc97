"""A schedule of pipeline_parallel.py on a clock without a computer: who computes what when, and who waits."""

from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

UNITS = {"Forward": 1, "Backward": 2, "BackwardInput": 1, "BackwardWeight": 1}  # of time, for one stage


class Span(NamedTuple):
    instruction: tuple  # name, micro-batch, chunk
    start: float
    end: float


def replay(orders: list[list[tuple]]) -> list[list[Span]]:
    """The timeline of each rank, if messages take no time. AssertionError if ranks wait for each other for ever."""
    ranks = len(orders)
    last_stage = ranks * (1 + max(chunk for _, _, chunk in orders[0])) - 1
    done = {}  # when a stage was done with a micro-batch
    timelines = [[] for _ in orders]
    left = sum(map(len, orders))
    while left:
        left_before = left
        for rank, (order, timeline) in enumerate(zip(orders, timelines, strict=True)):
            while len(timeline) < len(order):
                name, micro_batch, chunk = order[len(timeline)]
                stage = chunk * ranks + rank
                ready = Fraction(0)
                if (needed := input_of(name, micro_batch, stage, last_stage)) is not None:
                    if needed not in done:
                        break
                    ready = done[needed]
                start = max(ready, timeline[-1].end if timeline else Fraction(0))
                end = start + UNITS[name]
                timeline.append(Span(order[len(timeline)], start, end))
                done[name.removesuffix("Input"), micro_batch, stage] = end
                left -= 1
        assert left < left_before, "deadlock: each rank waits for another"
    return timelines


def input_of(name: str, micro_batch: int, stage: int, last_stage: int) -> tuple | None:
    """What must be done before, as name, micro-batch and stage."""
    if name == "Forward":
        return (name, micro_batch, stage - 1) if stage > 0 else None
    if name == "BackwardWeight" or stage == last_stage:
        kept = "Backward" if name == "BackwardWeight" else "Forward"
        return kept, micro_batch, stage
    return "Backward", micro_batch, stage + 1


def in_order_of_time(orders: list[list[tuple]]) -> Iterator[tuple[int, tuple]]:
    """(rank, instruction) of all ranks, in the order in which a replay ends them."""
    ended = [(span.end, rank, span.instruction) for rank, timeline in enumerate(replay(orders)) for span in timeline]
    for _, rank, instruction in sorted(ended):
        yield rank, instruction


def idle_share(timelines: list[list[Span]]) -> Fraction | float:
    """The bubble: the share of all ranks' time in which nothing is computed, from 0 to the last end."""
    busy = sum(span.end - span.start for timeline in timelines for span in timeline)
    step = max(timeline[-1].end for timeline in timelines)
    return 1 - busy / (step * len(timelines))


def bubble_formula(name: str, ranks: int, micro_batches: int, chunks: int) -> Fraction:
    """Huang et al. 2019, Narayanan et al. 2021, section 2.2, and Qi et al. 2023: idle over all time units.

    A zero-bubble schedule fills all but one unit per rank. Its backward of two units is one for the inputs' gradients,
    which the rank before waits for, and one for the weights', which nobody waits for.
    """
    units_per_wait = 1 if "zero" in name else 3
    return Fraction(units_per_wait * (ranks - 1), 3 * chunks * micro_batches + units_per_wait * (ranks - 1))


def most_held(order: list[tuple]) -> int:
    """How many micro-batches' activations, of one stage each, wait for their backward at once."""
    held = most = 0
    splits = any(name == "BackwardWeight" for name, *_ in order)
    frees = "BackwardWeight" if splits else "Backward"
    for name, *_ in order:
        held += (name == "Forward") - (name == frees)
        most = max(most, held)
    return most
