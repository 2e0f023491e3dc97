"""Two pictures that are drawn, not measured: what four GPUs hold, and what they send each other."""

from typing import NamedTuple

from _draw import BLUE, GREEN, ORANGE, PURPLE, arrow, block, canvas, rounded, theme
from matplotlib.axes import Axes
from matplotlib.figure import Figure

GPUS = 4
LAYERS = 4
MARGIN = 0.08  # this and all sizes below are in inches


# --- who holds what


class Method(NamedTuple):
    """A method of training on several GPUs, and what one of the GPUs has of model and batch."""

    name: str
    caption: str
    layers: str  # "all", "one"
    columns: str  # "all", "quarter"
    batch: str  # "all", "quarter"
    gathers: bool = False  # has one whole layer for a moment


METHODS = (
    Method(
        "DDP",
        "Each GPU has a copy of\neverything, and a quarter\nof the batch.",
        layers="all",
        columns="all",
        batch="quarter",
    ),
    Method(
        "FSDP",
        "Each stores a quarter of\nevery layer, and gathers\na layer to compute it.",
        layers="all",
        columns="quarter",
        batch="quarter",
        gathers=True,
    ),
    Method(
        "Tensor\nparallel",
        "Each stores a quarter\nof every matrix, and\ncomputes only with it.",
        layers="all",
        columns="quarter",
        batch="all",
    ),
    Method(
        "Pipeline\nparallel",
        "Each has some layers.\nThe batch passes from\none GPU to the next.",
        layers="one",
        columns="all",
        batch="all",
    ),
)
GATHERED_LAYER = 1

LABELS = 2.72
GPU_WIDTH = 1.52
GPU_HEIGHT = 1.02
GPU_STEP = GPU_WIDTH + 0.1
ROW = GPU_HEIGHT + 0.16
HEADER = 0.78
BAR_WIDTH = 0.41
BAR_HEIGHT = 0.11
BAR_STEP = BAR_HEIGHT + 0.035
SEQUENCES_HEIGHT = 0.15


def who_holds_what() -> Figure:
    """Draw weights, gradients, optimizer state and batch on four GPUs, under four methods."""
    figure, axes = canvas(LABELS + GPUS * GPU_STEP + MARGIN, HEADER + len(METHODS) * ROW)
    _draw_key(axes)
    for gpu in range(GPUS):
        center = LABELS + gpu * GPU_STEP + GPU_WIDTH / 2
        axes.text(center, HEADER - 0.1, f"GPU {gpu}", ha="center", fontsize=10, weight="bold")
    for row, method in enumerate(METHODS):
        top = HEADER + row * ROW
        middle = top + GPU_HEIGHT / 2
        axes.text(MARGIN, middle, method.name, va="center", fontsize=12, weight="bold")
        _quiet_text(axes, MARGIN + 0.92, middle, method.caption)
        for gpu in range(GPUS):
            left = LABELS + gpu * GPU_STEP
            rounded(axes, left, top, GPU_WIDTH, GPU_HEIGHT)
            _draw_model(axes, left + 0.08, top + 0.1, method, gpu)
            _draw_batch(axes, left + 0.08, top + GPU_HEIGHT - 0.25, method, gpu)
    return figure


def _quiet_text(axes: Axes, left: float, middle: float, text: str) -> None:
    quiet = theme().quiet
    axes.text(left, middle, text, va="center", fontsize=9, color=quiet, linespacing=1.3)


def _draw_key(axes: Axes) -> None:
    """Draw what the colors mean, in one line."""
    names = {BLUE: "weights", ORANGE: "gradients", GREEN: "optimizer state", PURPLE: "batch"}
    left = MARGIN
    for number, name in names.items():
        left = _draw_key_entry(axes, left, name, number)
    left = _draw_key_entry(axes, left, "for one layer only", BLUE, alpha=theme().pale)
    _draw_key_entry(axes, left, "on another GPU", BLUE, filled=False)
    _quiet_text(axes, MARGIN, HEADER - 0.15, "One row is one layer.")


def _draw_key_entry(axes: Axes, left: float, name: str, number: int, **how) -> float:
    block(axes, left, 0.1, 0.2, 0.14, number, **how)
    axes.text(left + 0.27, 0.17, name, va="center", fontsize=9.5)
    return left + 0.58 + 0.079 * len(name)


def _draw_model(axes: Axes, left: float, top: float, method: Method, gpu: int) -> None:
    """Draw what a GPU holds of the model: a bar is a layer, its width are the columns."""
    for place, number in enumerate((BLUE, ORANGE, GREEN)):
        x = left + place * (BAR_WIDTH + 0.065)
        for layer in range(LAYERS):
            y = top + layer * BAR_STEP
            block(axes, x, y, BAR_WIDTH, BAR_HEIGHT, number, filled=False)
            if method.gathers and layer == GATHERED_LAYER and number != GREEN:
                block(axes, x, y, BAR_WIDTH, BAR_HEIGHT, number, alpha=theme().pale)
            if method.layers == "one" and layer != gpu:
                continue
            if method.columns == "quarter":
                quarter = BAR_WIDTH / GPUS
                block(axes, x + gpu * quarter, y, quarter, BAR_HEIGHT, number)
            else:
                block(axes, x, y, BAR_WIDTH, BAR_HEIGHT, number)


def _draw_batch(axes: Axes, left: float, top: float, method: Method, gpu: int) -> None:
    """Draw which quarters of the batch a GPU computes."""
    gap = 0.04
    width = (GPU_WIDTH - 0.16 - (GPUS - 1) * gap) / GPUS
    for quarter in range(GPUS):
        x = left + quarter * (width + gap)
        has_it = method.batch == "all" or quarter == gpu
        block(axes, x, top, width, SEQUENCES_HEIGHT, PURPLE, filled=has_it)


# --- who talks to whom


class Collective(NamedTuple):
    """A collective of a step: its name, what it carries and how often."""

    name: str
    carries: str


class Traffic(NamedTuple):
    """The collectives of a step under one method."""

    name: str
    forward: tuple[Collective, ...]
    backward: tuple[Collective, ...]
    after_backward: tuple[Collective, ...] = ()


TRAFFIC = (
    Traffic(
        "DDP",
        forward=(),
        backward=(Collective("all-reduce", "gradients,\nin buckets"),),
    ),
    Traffic(
        "FSDP",
        forward=(Collective("all-gather", "weights,\neach block"),),
        backward=(
            Collective("all-gather", "weights,\neach block"),
            Collective("reduce-scatter", "gradients,\neach block"),
        ),
    ),
    Traffic(
        "Tensor\nparallel",
        forward=(Collective("all-reduce", "activations,\ntwice a block"),),
        backward=(Collective("all-reduce", "their gradients,\ntwice a block"),),
    ),
    Traffic(
        "Pipeline\nparallel",
        forward=(Collective("send to next", "activations,\neach micro-batch"),),
        backward=(Collective("send to previous", "their gradients,\neach micro-batch"),),
    ),
    Traffic(
        "Context\nparallel",
        forward=(Collective("all-gather", "keys and values,\neach block"),),
        backward=(Collective("reduce-scatter", "their gradients,\neach block"),),
        after_backward=(Collective("all-reduce", "gradients of\nall weights"),),
    ),
    Traffic(
        "Expert\nparallel",
        forward=(Collective("all-to-all", "tokens there, and\nback; each block"),),
        backward=(Collective("all-to-all", "their gradients,\nboth ways"),),
        after_backward=(Collective("all-reduce", "gradients of all\nbut the experts"),),
    ),
)
GPU_COLORS = (BLUE, ORANGE, GREEN, PURPLE)

CELL = 0.105
CELL_STEP = CELL + 0.025
GLYPH_WIDTH = 2 * GPUS * CELL_STEP + 0.28
GLYPH_HEIGHT = GPUS * CELL_STEP
TALK_LABELS = 1.12
TALK_COLUMN = 2.78
TALK_LINE = 0.72
TALK_HEADER = 0.42
TALK_FOOTER = 0.58


def who_talks_to_whom() -> Figure:
    """Draw the collectives of a training step under six methods."""
    lines = sum(_lines(traffic) for traffic in TRAFFIC)
    gaps = 0.1 * len(TRAFFIC)
    height = TALK_HEADER + lines * TALK_LINE + gaps + TALK_FOOTER
    figure, axes = canvas(TALK_LABELS + 3 * TALK_COLUMN, height)
    for column, name in enumerate(("forward", "backward", "after backward")):
        x = TALK_LABELS + column * TALK_COLUMN
        axes.text(x, 0.2, name, va="center", fontsize=11, weight="bold")
    top = TALK_HEADER
    for traffic in TRAFFIC:
        row_height = _lines(traffic) * TALK_LINE + 0.1
        axes.plot([MARGIN, TALK_LABELS + 3 * TALK_COLUMN], [top, top], color=theme().line, lw=0.6)
        middle = top + row_height / 2
        axes.text(MARGIN, middle, traffic.name, va="center", fontsize=11.5, weight="bold")
        for column, collectives in enumerate(traffic[1:]):
            x = TALK_LABELS + column * TALK_COLUMN
            for line, collective in enumerate(collectives):
                # centered where another column of the row has more lines
                offset = (_lines(traffic) - len(collectives)) / 2 + line
                _draw_collective(axes, x, top + 0.05 + offset * TALK_LINE, collective)
            if not collectives:
                axes.text(x, middle, "–", va="center", color=theme().quiet)
        top += row_height
    _quiet_text(
        axes,
        MARGIN,
        top + 0.3,
        "A column of squares is a GPU. A color is what one GPU had. "
        "A square of four colors is the sum over the GPUs.\n"
        "Not shown: a few numbers, such as the loss and the norm of the gradients.",
    )
    return figure


def _lines(traffic: Traffic) -> int:
    return max(len(collectives) for collectives in traffic[1:])


def _draw_collective(axes: Axes, left: float, top: float, collective: Collective) -> None:
    """Draw what each GPU has before and after, with the name beside it."""
    y = top + (TALK_LINE - GLYPH_HEIGHT) / 2
    before, after = CELLS[collective.name]
    draw_cells(axes, left, y, before)
    half = GPUS * CELL_STEP
    middle = y + GLYPH_HEIGHT / 2 - 0.01
    arrow(axes, (left + half + 0.01, middle), (left + half + 0.22, middle))
    draw_cells(axes, left + half + 0.26, y, after)
    x = left + GLYPH_WIDTH + 0.1
    axes.text(x, y - 0.02, collective.name, va="top", fontsize=9.5, weight="bold")
    quiet = theme().quiet
    axes.text(x, y + 0.16, collective.carries, va="top", fontsize=9, color=quiet, linespacing=1.2)


# A cell is (GPU, row, color). The color SUM stands for four colors.
SUM = -1
Cell = tuple[int, int, int]


def _own(row: int | None = None) -> list[Cell]:
    """Return one cell for each GPU, in its color: in one row, or each in the GPU's row."""
    return [(gpu, gpu if row is None else row, gpu) for gpu in range(GPUS)]


def _full(by: str) -> list[Cell]:
    """Return four cells for each GPU: each in the color of its "gpu" or of its "row"."""
    cells = []
    for gpu in range(GPUS):
        for row in range(GPUS):
            cells.append((gpu, row, gpu if by == "gpu" else row))
    return cells


CELLS: dict[str, tuple[list[Cell], list[Cell]]] = {
    "all-reduce": (_own(1), [(gpu, 1, SUM) for gpu in range(GPUS)]),
    "all-gather": (_own(), _full("row")),
    "reduce-scatter": (_full("gpu"), [(gpu, gpu, SUM) for gpu in range(GPUS)]),
    "all-to-all": (_full("gpu"), _full("row")),
    "broadcast": ([(0, 1, 0)], [(gpu, 1, 0) for gpu in range(GPUS)]),
    "send/recv": (_own(1), [((gpu + 1) % GPUS, 1, gpu) for gpu in range(GPUS)]),
    "send to next": (_own(1)[:-1], [(gpu + 1, 1, gpu) for gpu in range(GPUS - 1)]),
    "send to previous": (_own(1)[1:], [(gpu - 1, 1, gpu) for gpu in range(1, GPUS)]),
}


def draw_cells(axes: Axes, left: float, top: float, cells: list[Cell], size: float = CELL) -> None:
    """Draw what each GPU has, in its column. The other cells are outlines."""
    step = size + 0.025
    for gpu in range(GPUS):
        for row in range(GPUS):
            block(axes, left + gpu * step, top + row * step, size, size, BLUE, filled=False)
    for gpu, row, number in cells:
        x = left + gpu * step
        y = top + row * step
        if number != SUM:
            block(axes, x, y, size, size, GPU_COLORS[number])
            continue
        for part, part_color in enumerate(GPU_COLORS):
            part_x = x + (part % 2) * size / 2
            part_y = y + (part // 2) * size / 2
            block(axes, part_x, part_y, size / 2, size / 2, part_color)
