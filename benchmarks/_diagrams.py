"""Pictures of one idea each, for the chapters: drawn, not measured.

They are six inches wide, and their smallest letters have ten points, to be read on a phone.
"""

from _draw import (
    GREEN,
    PURPLE,
    arrow,
    block,
    canvas,
    rounded,
    text_on,
    theme,
)
from _schemes import CELLS, GPUS, draw_cells
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
