"""Pictures of one idea each, for the chapters: drawn, not measured.

They are six inches wide, and their smallest letters have ten points, to be read on a phone.
"""

from _draw import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    arrow,
    block,
    canvas,
    color,
    rounded,
    text_on,
    theme,
)
from _schemes import CELLS, GPU_COLORS, GPUS, draw_cells
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH = 6  # inches, as all sizes below


def _text(axes: Axes, x: float, y: float, text: str, **how) -> None:
    axes.text(x, y, text, **{"va": "center", "fontsize": 11} | how)


def _note(axes: Axes, y: float, text: str) -> None:
    _text(axes, 0.05, y, text, fontsize=10.5, color=theme().quiet, linespacing=1.35)


def _box(axes: Axes, left: float, top: float, width: float, number: int, text: str) -> None:
    """Draw a box of a color with text in it."""
    block(axes, left, top, width, 0.3, number)
    how = {"ha": "center", "fontsize": 10.5, "color": text_on(number)}
    _text(axes, left + width / 2, top + 0.145, text, **how)


# --- 05: two nodes


def two_nodes() -> Figure:
    """Draw the ranks of two nodes of four GPUs, the share of the batch and the GPU of each."""
    nodes = 2
    world_size = nodes * GPUS
    figure, axes = canvas(WIDTH, 4.75)
    for node in range(nodes):
        top = 0.1 + 2.02 * node
        _text(axes, 0.05, top, f"node {node}", weight="bold")
        rounded(axes, 0.05, top + 0.16, WIDTH - 0.1, 1.6)
        for local_rank in range(GPUS):
            rank = node * GPUS + local_rank
            left = 0.2 + 1.42 * local_rank
            center = left + 0.67
            _text(axes, center, top + 0.42, f"RANK {rank}", ha="center", fontsize=12, weight="bold")
            for share in range(world_size):
                x = left + 0.05 + 0.158 * share
                block(axes, x, top + 0.65, 0.13, 0.2, PURPLE, filled=share == rank)
            _text(axes, center, top + 1.14, f"LOCAL_RANK {local_rank}", ha="center", fontsize=10.5)
            _box(axes, left + 0.25, top + 1.34, 0.84, GREEN, f"cuda:{local_rank}")
    block(axes, 0.05, 4.1, 0.2, 0.16, PURPLE)
    _text(axes, 0.34, 4.18, f"RANK, of WORLD_SIZE {world_size}: its share of the batch")
    block(axes, 0.05, 4.42, 0.2, 0.16, GREEN)
    _text(axes, 0.34, 4.5, "LOCAL_RANK: its GPU on the node")
    return figure


# --- 07: the global batch


def global_batch() -> Figure:
    """Draw which sequences of a global batch each rank reads, in which micro-batch."""
    ranks = GPUS
    micro_batches = 2
    micro_batch_size = 3
    sequences = ranks * micro_batches * micro_batch_size
    figure, axes = canvas(WIDTH, 4.5)
    _text(axes, 0.05, 0.14, f"global batch: {sequences} sequences", weight="bold")
    width = (WIDTH - 0.1) / sequences
    for sequence in range(sequences):
        number = GPU_COLORS[sequence * ranks // sequences]
        block(axes, 0.05 + sequence * width, 0.34, width - 0.03, 0.3, number)

    for micro_batch in range(micro_batches):
        x = 0.8 + 1.42 * micro_batch
        _text(axes, x + 0.53, 0.98, f"micro-batch {micro_batch}", ha="center", fontsize=10.5)
    for rank in range(ranks):
        top = 1.22 + 0.6 * rank
        number = GPU_COLORS[rank]
        _text(axes, 0.05, top + 0.15, f"rank {rank}", weight="bold")
        for micro_batch in range(micro_batches):
            first = (rank * micro_batches + micro_batch) * micro_batch_size
            left = 0.8 + 1.42 * micro_batch
            for place in range(micro_batch_size):
                _box(axes, left + 0.36 * place, top, 0.33, number, str(first + place))
            if micro_batch > 0:
                _text(axes, left - 0.18, top + 0.14, "+", ha="center", fontsize=14)
        arrow(axes, (3.31, top + 0.15), (3.61, top + 0.15))
        arrow(axes, (4.78, top + 0.15), (5.08, top + 0.15))
    block(axes, 3.64, 1.16, 1.12, 0.6 * ranks - 0.18, GREY)
    middle = 1.16 + (0.6 * ranks - 0.18) / 2
    how = {"ha": "center", "linespacing": 1.4}
    _text(axes, 4.2, middle, "one\nall-reduce\nof gradients", color=text_on(GREY), **how)
    _text(axes, 5.55, middle, "the same\noptimizer\nstep\non all", **how)
    product = f"{ranks} ranks × {micro_batches} micro-batches × {micro_batch_size} sequences"
    _note(axes, 3.75, f"{product} = {sequences}")
    _note(axes, 4.03, "+: a second backward adds to the gradients.")
    return figure


# --- 05: collectives


def six_collectives() -> Figure:
    """Draw what four ranks hold before and after each collective of 05's collectives.py."""
    names = ("broadcast", "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "send/recv")
    size = 0.25
    full = GPUS * (size + 0.025)
    figure, axes = canvas(WIDTH, 5.55)
    for place, name in enumerate(names):
        left = 0.05 + 3.15 * (place % 2)
        top = 1.6 * (place // 2)
        before, after = CELLS[name]
        _text(axes, left, top + 0.12, name, fontsize=12, weight="bold")
        draw_cells(axes, left, top + 0.32, before, size)
        middle = top + 0.32 + full / 2
        arrow(axes, (left + full + 0.06, middle), (left + full + 0.44, middle))
        draw_cells(axes, left + full + 0.5, top + 0.32, after, size)
    _note(
        axes,
        5.12,
        "A column is a rank, before and after. A color is what one rank had.\n"
        "A square of four colors is the sum over the ranks.",
    )
    return figure


# --- launch: a collective that one rank does not call


def left_out_call() -> Figure:
    """Draw three ranks of which one leaves a collective out, as launch/debug_hang.py plants it."""
    calls = [("all_reduce", "gradients"), ("all_reduce", "loss"), ("all_gather", "times")]
    colors = {"gradients": ORANGE, "loss": BLUE, "times": GREEN}
    planted_step = 3
    planted_rank = 1
    calls_of_rank = [calls * (planted_step + 1) for _ in range(3)]
    left_out = (planted_step - 1) * len(calls) + 1  # the loss of that step
    del calls_of_rank[planted_rank][left_out]

    figure, axes = canvas(WIDTH, 3.4)
    for column, place in enumerate(range(left_out - 2, left_out + 1)):
        x = 0.8 + 1.3 * column
        _text(axes, x + 0.6, 0.14, f"call {place + 1}", ha="center", color=theme().quiet)
        for rank, made in enumerate(calls_of_rank):
            collective, tensor = made[place]
            number = colors[tensor]
            top = 0.36 + 0.78 * rank
            block(axes, x, top, 1.2, 0.62, number)
            how = {"ha": "center", "color": text_on(number), "fontsize": 10.5}
            _text(axes, x + 0.6, top + 0.19, collective, **how)
            _text(axes, x + 0.6, top + 0.44, tensor, **how)
    for rank in range(3):
        top = 0.36 + 0.78 * rank
        _text(axes, 0.05, top + 0.31, f"rank {rank}", weight="bold")
        arrow(axes, (4.68, top + 0.31), (5.28, top + 0.31), color=color(RED), linestyle="--")
        _text(axes, 5.35, top + 0.31, "waits", color=color(RED), weight="bold")
    _note(
        axes,
        3.0,
        f"Rank {planted_rank} left out all_reduce(loss), for example by: if loss.isfinite(): ...\n"
        "Its next call meets another collective, and all ranks wait.",
    )
    return figure
