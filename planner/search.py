"""The layouts of a model and its batch over GPUs that fit, best first."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product

from planner.machine import Machine
from planner.memory import Memory, peak
from planner.plan import CHECKPOINTING, Plan, check
from planner.shape import Shape
from planner.step import Step, step

MICRO_BATCH_SIZES = (1, 2, 4, 8, 16)
SHORTEST_PART = 1024  # tokens of a sequence below which context parallel does not divide it
MARGIN = 0.05  # of the memory stays free: the formulas miss measured peaks by 3 % in the median


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def candidates(
    shape: Shape, base: Plan, *, sequences: int, node: int, fixed: dict
) -> Iterator[Plan]:
    """Plans of `sequences` per step that 08_model_parallel/train_3d.py could run. Tensor and context parallel ranks
    wait for each other in every layer: unless fixed, they stay inside a node. 1F1B requires a micro-batch per stage."""
    choices = {
        "tp": [size for size in divisors(node) if shape.vocab % size == 0],
        "pp": [1] if shape.tied else [size for size in divisors(base.gpus) if size <= shape.layers],
        "cp": [
            size for size in divisors(node) if size == 1 or base.seq_len // size >= SHORTEST_PART
        ],
        "ep": divisors(shape.experts) if shape.experts else [1],
        "replicate": divisors(base.gpus) if base.zero == 3 else [1],
        "micro_batch_size": MICRO_BATCH_SIZES,
        "checkpointing": CHECKPOINTING,
    }
    choices |= {name: [value] for name, value in fixed.items()}
    for values in product(*choices.values()):
        plan = replace(base, **dict(zip(choices, values, strict=True)))
        micro_batches, rest = divmod(sequences, max(1, plan.dp) * plan.micro_batch_size)
        if (
            rest
            or micro_batches < plan.pp
            or plan.tp * plan.cp > max(node, fixed.get("tp", 1) * fixed.get("cp", 1))
        ):
            continue
        loss = "parallel" if plan.tp > 1 and plan.loss == "plain" else plan.loss
        plan = replace(plan, micro_batches=micro_batches, loss=loss)
        with suppress(ValueError):
            check(shape, plan)
            yield plan


def layouts(
    shape: Shape, base: Plan, machine: Machine, *, sequences: int, **fixed
) -> list[tuple[Plan, Memory, Step]]:
    """Those that fit, best first; what `fixed` gives a value is not searched. ValueError if none fits."""
    room = (machine.memory_bytes or 0) * (1 - MARGIN)
    found, needed = [], []
    for plan in candidates(
        shape, base, sequences=sequences, node=min(machine.gpus_per_node, base.gpus), fixed=fixed
    ):
        memory = peak(shape, plan, stages=sorted({0, plan.pp - 1}))
        needed.append(memory.total_bytes())
        if needed[-1] <= room:
            found.append((plan, memory, step(shape, plan, machine)))
    if not needed:
        raise ValueError(
            f"--global-batch-size {sequences} cannot be divided over --gpus {base.gpus}: try {base.gpus}"
        )
    if not found:
        least = f"the smallest layout needs {min(needed) / 2**30:.1f} GiB, and {room / 2**30:.1f} may be used"
        raise ValueError(
            f"--model {shape.name} does not fit on --gpus {base.gpus} x {machine.device}: {least}"
        )
    return sorted(found, key=lambda layout: (layout[2].seconds, layout[1].total_bytes()))
