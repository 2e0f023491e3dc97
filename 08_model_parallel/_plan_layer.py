"""Seconds of one layer's forward on one rank, for one micro-batch, by what limits them."""

from dataclasses import dataclass
from math import prod

import _estimate_shapes as shapes
from _estimate_plan import DTYPES
from _estimate_shapes import Shape
from _plan_collectives import behind, exchange_seconds, gather_seconds
from _plan_habits import HABITS, LOSS_MOVES
from _plan_layout import Layout
from _plan_machine import HALF_SIZE, MEMORY, OVERLAP, Machine


@dataclass(frozen=True)
class Layer:
    """Seconds of a forward."""

    products: float
    attention: float
    moved: float  # norms, rotations, activations, residuals
    tensor: float  # collectives for which all wait
    context: float
    expert: float


def product_seconds(machine: Machine, m: float, k: float, n: float, *, fp8: str = "") -> float:
    """(m x k) times (k x n), a roofline: arithmetic, at a rate that falls with small sizes, or moving three matrices.

    Kernels for rowwise scales reach in 8 bits what others do in 16."""
    if not m * k * n:
        return 0.0
    peak = machine.peak_flops_fp8 if fp8 == "tensorwise" else machine.peak_flops
    share = machine.efficiency.products * prod(size / (size + HALF_SIZE) for size in (m, k, n))
    return max(2 * m * k * n / (peak * share), moved_seconds(machine, 2 * (m * k + k * n + m * n)))


def moved_seconds(machine: Machine, size: float) -> float:
    """Bytes read and written in the device's own memory."""
    return size / (machine.memory_bandwidth * MEMORY)


def merge(matrices: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours with equal inputs as one matrix: q, k, v, and gate and up."""
    found = []
    for inputs, outputs in matrices:
        if found and found[-1][0] == inputs:
            found[-1] = inputs, found[-1][1] + outputs
        else:
            found.append((inputs, outputs))
    return found


def products_seconds(machine: Machine, layout: Layout, matrices: list[tuple[int, int]], tokens: float) -> float:
    """Products in a row. Tensor parallelism divides the inputs of the last and the outputs of the others."""
    *into, last = matrices
    into = merge(into) if HABITS[layout.framework].merged else into
    found = product_seconds(machine, tokens, last[0] / layout.tp, last[1], fp8=layout.fp8)
    for inputs, outputs in into:
        found += product_seconds(machine, tokens, inputs, outputs / layout.tp, fp8=layout.fp8)
    if layout.fp8:  # each operand is read twice, for its scale and its cast, and written in 8 bits
        found += moved_seconds(machine, 5 * tokens * sum(inputs for inputs, _ in matrices) / layout.tp)
    return found


def layer_seconds(shape: Shape, layout: Layout, machine: Machine, *, experts: bool) -> Layer:
    habits = HABITS[layout.framework]
    e, tp, tokens = DTYPES[layout.dtype], layout.tp, layout.tokens
    products = products_seconds(machine, layout, shapes.attention_matrices(shape), tokens)
    masked = habits.gathered_keys and layout.cp > 1
    seen = layout.seq_len if masked else layout.seq_len / 2  # causal: half of the tokens
    scores = 2 * tokens * (shape.q_width + shape.value_width) / tp * seen
    attention = scores / (machine.peak_flops * machine.efficiency.attention)
    keys_and_values = shape.q_width + shape.value_width if shape.latent else 2 * shape.kv_width
    heads = shape.q_width + keys_and_values
    hidden = tokens * shape.hidden * e
    moved = (10 * hidden + 4 * heads * tokens * e) / tp
    expert = 0.0
    if experts:
        mixture = shape.experts
        copies = tokens / tp * mixture.active * habits.imbalance  # on the busiest rank
        rows = copies * layout.ep / mixture.number
        for inputs, outputs in shapes.feed_forward_matrices(shape, mixture.ffn):
            products += mixture.number / layout.ep * product_seconds(machine, rows, inputs, outputs)
        if mixture.shared_ffn:
            shared = shapes.feed_forward_matrices(shape, mixture.shared_ffn)
            products += products_seconds(machine, layout, shared, tokens)
        moved += e * copies * (habits.permuted * shape.hidden + 4 * mixture.ffn)
        expert = 2 * exchange_seconds(machine, layout.ep, 1, copies * shape.hidden * e)
    else:
        products += products_seconds(machine, layout, shapes.feed_forward_matrices(shape, shape.ffn), tokens)
        moved += 4 * tokens * shape.ffn * e / tp
    calls = 2 if experts else 4
    gathered = 0.75 if layout.fp8 == "tensorwise" else 1.0  # half of the calls are gathers, and those send 8 bits
    tensor = calls * gather_seconds(machine, tp, 1, hidden * gathered)
    if tp > 1 and habits.shuffled and layout.micro_batch_size > 1:
        tensor += calls * moved_seconds(machine, 2 * hidden)
    if habits.all_to_all:  # q, k and v go, and the output comes back
        context = exchange_seconds(machine, layout.cp, tp, tokens * (heads + shape.value_width) * e / tp)
    elif habits.gathered_keys:
        context = gather_seconds(machine, layout.cp, tp, layout.cp * tokens * keys_and_values * e / tp, 2)
    else:
        ring = gather_seconds(machine, layout.cp, tp, layout.cp * tokens * keys_and_values * e / tp, layout.cp - 1)
        context = behind(attention, ring, OVERLAP)
    return Layer(
        products=products,
        attention=attention,
        moved=moved_seconds(machine, moved * habits.moved),
        tensor=tensor * (1 - layout.tp_hidden),
        context=context,
        expert=expert,
    )


def head_seconds(shape: Shape, layout: Layout, machine: Machine) -> float:
    """Output head and loss, forward and backward. They are not recomputed."""
    product = product_seconds(machine, layout.tokens, shape.hidden, shape.vocab / layout.tp)
    logits = layout.tokens * shape.vocab / layout.tp
    return 3 * product + moved_seconds(machine, logits * LOSS_MOVES[layout.loss])
