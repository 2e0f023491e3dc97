"""What a step pays once: gradients that meet, weights that are gathered, and the optimizer."""

from collections.abc import Callable

from _estimate_frameworks import FRAMEWORKS
from _estimate_plan import DTYPES
from _estimate_sharded import gradients_stay_whole, weights_stay_whole
from _estimate_stages import Stage
from _plan_collectives import behind, gather_seconds, reduce_seconds
from _plan_habits import BUCKET, HABITS
from _plan_layer import moved_seconds
from _plan_layout import Layout
from _plan_machine import OVERLAP, Machine


def expert_ranks(layout: Layout) -> int:
    """Ranks that hold the same experts."""
    return layout.gpus // (layout.pp * layout.ep)


def data_seconds(layout: Layout, machine: Machine, stage: Stage, busy: float) -> float:
    """Seconds that data parallelism adds to a step of which a micro-batch keeps the rank busy for `busy`."""
    framework, habits = FRAMEWORKS[layout.framework], HABITS[layout.framework]
    e = DTYPES[layout.dtype]

    def send(seconds: Callable, bytes_each: float, *, pieces: float = 1, ranks: int = layout.shards, stride=layout.tp):
        """A collective of a stage's parameters; of its experts among the ranks that hold the same ones."""
        dense = seconds(machine, ranks, stride, stage.parameters * bytes_each, pieces)
        same, size = expert_ranks(layout), stage.expert_parameters * bytes_each
        return dense + (seconds(machine, same, layout.ep, size, pieces) if size else 0.0)

    if layout.zero == 3:
        layers = stage.dense_layers + stage.expert_layers + 1
        group = {"pieces": layers, "ranks": layout.sharded_over}
        gather, reduce = send(gather_seconds, e, **group), send(gather_seconds, 4, **group)
        if layout.replicate > 1:  # each shard's gradient is added to those of its replicas, once a step
            across = {"pieces": layers, "ranks": layout.replicate, "stride": layout.tp * layout.sharded_over}
            all_reduce = send(reduce_seconds, 4 / layout.sharded_over, **across)
        else:
            all_reduce = 0.0
        return fully_shard_seconds(layout, machine, stage, busy, gather, reduce, all_reduce)
    if layout.zero == 0 and habits.gradients_overlap:  # in buckets, behind the last micro-batch's backward
        buckets = max(1.0, stage.parameters * e / BUCKET)
        return behind(busy * 2 / 3, send(reduce_seconds, framework.gradient, pieces=buckets), OVERLAP)
    if layout.zero == 0:
        return send(reduce_seconds, framework.gradient)
    pieces = layout.shards if habits.one_by_one else 1
    scattered = send(gather_seconds, framework.gradient, pieces=pieces)
    gathered = send(gather_seconds, e, pieces=pieces)
    if habits.gradients_overlap and not habits.one_by_one:
        scattered = behind(busy * 2 / 3, scattered, OVERLAP)
    return scattered + gathered


def fully_shard_seconds(
    layout: Layout, machine: Machine, stage: Stage, busy: float, gather: float, reduce: float, all_reduce: float
) -> float:
    """What is not hidden of a stage's gathers, reduce-scatters and, between replicas, all-reduces, and the copies into
    and out of their buffers: 4 bytes for a number that is gathered, 12 for one that is reduced."""
    times = layout.micro_batches
    numbers = stage.all_parameters
    if weights_stay_whole(layout):  # gathered for the first micro-batch
        return moved_seconds(machine, 20 * numbers) + behind(busy, 2 * gather + reduce + all_reduce, OVERLAP)
    if gradients_stay_whole(layout):  # gathered in each forward of the warm-up and each backward, reduced at the end
        gathers = times + layout.pp - 1
        copied = moved_seconds(machine, (4 * gathers + 12) * numbers)
        return copied + behind(times * busy, gathers * gather, OVERLAP) + reduce + all_reduce
    copied = moved_seconds(machine, 20 * times * numbers)
    one = 2 * gather + reduce
    return copied + (times - 1) * behind(busy, one, OVERLAP) + behind(busy, one + all_reduce, OVERLAP)


def optimizer_seconds(layout: Layout, machine: Machine, stage: Stage) -> float:
    """AdamW reads weight, gradient and two moments and writes three of them (28 bytes) and a 16-bit copy; the gradient
    is read for its norm, and set to zero."""

    def held(since: int) -> float:
        dense = layout.sharded_over if layout.zero >= since else 1
        mixture = expert_ranks(layout) / layout.replicate if layout.zero >= since else 1
        return stage.parameters / dense + stage.expert_parameters / mixture

    return moved_seconds(machine, 30 * held(1) + 8 * held(2))
