"""The layouts that plan.py compares: every way to multiply to the GPUs that the model and the batch allow."""

from collections.abc import Iterator
from dataclasses import replace

from _estimate_plan import CHECKPOINTING, check, divides
from _estimate_shapes import Shape
from _plan_layout import Layout
from _plan_machine import Machine

from old.exits import UserError

MICRO_BATCH_SIZES = (1, 2, 4, 8, 16)
SHORTEST_PART = 1024  # tokens of a sequence below which context parallel does not divide it


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def meshes(shape: Shape, machine: Machine, base: Layout, fixed: dict[str, int | None]) -> Iterator[Layout]:
    """tp x pp x cp that divide the GPUs. Tensor and context parallel ranks wait for each other in every layer: together
    they stay inside a node, unless the user said otherwise."""
    node = min(machine.gpus_per_node, base.gpus)
    at_most = max(node, (fixed["tp"] or 1) * (fixed["cp"] or 1))
    choices = {
        "tp": divisors(node),
        "pp": [size for size in divisors(base.gpus) if size <= shape.layers],
        "cp": [size for size in divisors(node) if size == 1 or base.seq_len // size >= SHORTEST_PART],
    }
    choices |= {name: [size] for name, size in fixed.items() if size}
    for tp in choices["tp"]:
        for pp in choices["pp"]:
            for cp in choices["cp"]:
                if base.gpus % (tp * pp * cp):
                    continue
                if tp * cp > at_most:
                    continue
                yield replace(base, tp=tp, pp=pp, cp=cp)


def check_cuts(shape: Shape, layout: Layout) -> None:
    """UserError for what train_3d.py refuses, beyond what estimate.py does."""
    if layout.pp > 1 and shape.tied:
        raise UserError(
            f"--pp {layout.pp}: {shape.name} has tied embeddings, one matrix for the first and the last stage: "
            'use --pp 1, or a config.json with "tie_word_embeddings": false'
        )
    if layout.gpus > layout.tp * layout.pp:  # fully_shard cuts again what tensor ranks hold
        divides(layout.tp, "--tp", shape.vocab, "tokens of the vocabulary")


def expert_sizes(shape: Shape, mesh: Layout) -> list[int]:
    """Sizes of expert parallel that divide the experts and the ranks of a pipeline stage."""
    if not shape.experts:
        return [1]
    return [size for size in divisors(mesh.gpus // mesh.pp) if shape.experts.number % size == 0]


def layouts(
    shape: Shape, machine: Machine, base: Layout, *, sequences: int, fixed: dict[str, int | None]
) -> Iterator[Layout]:
    """Every layout of `sequences` per step over base.gpus; what `check` refuses is left out."""
    for mesh in meshes(shape, machine, base, fixed):
        for ep in expert_sizes(shape, mesh):
            sizes = replace(mesh, ep=ep, loss="parallel" if mesh.tp > 1 else "plain")
            try:
                check(shape, sizes)
                check_cuts(shape, sizes)
            except UserError:
                continue
            for batch in batches(sizes, sequences):
                for sharded in shardings(batch):
                    for checkpointing in CHECKPOINTING:
                        yield replace(sharded, checkpointing=checkpointing)


def batches(sizes: Layout, sequences: int) -> Iterator[Layout]:
    for micro_batch_size in MICRO_BATCH_SIZES:
        micro_batches, rest = divmod(sequences, sizes.dp * micro_batch_size)
        if not rest and micro_batches >= sizes.pp:  # 1F1B wants a micro-batch for each stage
            yield replace(sizes, micro_batch_size=micro_batch_size, micro_batches=micro_batches)


def shardings(layout: Layout) -> Iterator[Layout]:
    """fully_shard over all ranks that hold the same weights, or over parts of them with replicas between: down to
    replicas of one rank, which shards nothing."""
    for replicate in divisors(layout.dp):
        ranks_of_a_replica = layout.gpus // (layout.pp * replicate)
        if ranks_of_a_replica % layout.ep == 0:  # a replica holds every expert
            yield replace(layout, zero=3, replicate=replicate)
