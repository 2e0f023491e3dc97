"""The layouts of a model and its batch over GPUs that fit, best first."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from planner.machine import Machine
from planner.memory import Memory, peak
from planner.plan import CHECKPOINTING, Plan, check
from planner.rank import layers_of_rank
from planner.shape import Shape
from planner.step import Step, step

MICRO_BATCH_SIZES = (1, 2, 4, 8, 16)
SHORTEST_PART = 1024  # tokens of a sequence below which context parallelism does not shard it
MARGIN = 0.05  # share of the memory that stays free: what is reserved is only estimated
SEARCHED = ("tp", "pp", "cp", "ep", "replicate", "micro_batch_size", "checkpointing")


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, in order."""
    return [size for size in range(1, number + 1) if number % size == 0]


def choices(shape: Shape, base: Plan, node: int, fixed: dict) -> dict[str, list]:
    """Return the values to try of each field in SEARCHED. Fields in `fixed` have one value.

    Tensor- and context-parallel ranks wait for each other in every layer, so they stay in a node of
    `node` GPUs. train_3d.py does not split a tied model or experts into stages, and does not
    compile --ep. Experts that it does not train, beside latent attention, have no such limits.
    """
    values: dict[str, list] = {name: [1] for name in SEARCHED}
    values["tp"] = [size for size in divisors(node) if shape.vocab % size == 0]
    trains_experts = shape.experts > 0 and not shape.kv_rank
    if not shape.tied and not trains_experts:
        values["pp"] = [size for size in divisors(base.gpus) if size <= shape.layers]
    for size in divisors(node)[1:]:
        if base.seq_len // size >= SHORTEST_PART:
            values["cp"].append(size)
    if shape.experts and not (trains_experts and base.compile):
        values["ep"] = divisors(shape.experts)
    if base.zero == 3:
        values["replicate"] = divisors(base.gpus)
    values["micro_batch_size"] = list(MICRO_BATCH_SIZES)
    values["checkpointing"] = list(CHECKPOINTING)
    for name, value in fixed.items():
        values[name] = [value]
    return values


def candidates(
    shape: Shape, base: Plan, *, sequences: int, node: int, fixed: dict
) -> Iterator[Plan]:
    """Yield the plans for `sequences` per step that 08_model_parallel/train_3d.py could run.

    1F1B requires a micro-batch per stage.
    """
    most_connected = max(node, fixed.get("tp", 1) * fixed.get("cp", 1))
    for values in product(*choices(shape, base, node, fixed).values()):
        plan = replace(base, **dict(zip(SEARCHED, values, strict=True)))
        at_once = max(1, plan.dp) * plan.micro_batch_size
        micro_batches, rest = divmod(sequences, at_once)
        if rest or micro_batches < plan.pp or plan.tp * plan.cp > most_connected:
            continue
        plan = replace(plan, micro_batches=micro_batches)
        try:
            check(shape, plan)
        except ValueError:
            continue
        yield plan


def layouts(
    shape: Shape, base: Plan, machine: Machine, *, sequences: int, **fixed
) -> list[tuple[Plan, Memory, Step]]:
    """Return the layouts that fit, best first. Fields in `fixed` are not searched.

    Raise ValueError if none fits.
    """
    room = (machine.memory_bytes or 0) * (1 - MARGIN)
    node = min(machine.gpus_per_node, base.gpus)
    fitting = []
    least = None
    for plan in candidates(shape, base, sequences=sequences, node=node, fixed=fixed):
        # The first stage has the most micro-batches in flight, the last one the logits, and one the
        # most layers.
        counts = [len(layers_of_rank(shape, plan, stage)) for stage in range(plan.pp)]
        stages = sorted({0, counts.index(max(counts)), plan.pp - 1})
        memory = peak(shape, plan, stages=stages)
        needed = memory.total_bytes()
        least = needed if least is None else min(least, needed)
        if needed <= room:
            fitting.append((plan, memory, step(shape, plan, machine)))

    if least is None:
        raise ValueError(
            f"--global-batch-size {sequences} cannot be divided over --gpus {base.gpus}: "
            f"try {base.gpus}"
        )
    if not fitting:
        raise ValueError(
            f"--model {shape.name} does not fit on --gpus {base.gpus} x {machine.device}: "
            f"the smallest layout needs {least / 2**30:.1f} GiB, and {room / 2**30:.1f} may be used"
        )
    return sorted(fitting, key=lambda layout: (layout[2].seconds, layout[1].total_bytes()))
