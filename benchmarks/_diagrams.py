"""Pictures of one idea each, for the chapters: drawn, not measured.

They are six inches wide, and their smallest letters have ten points, to be read on a phone.
"""

import sys

import _draw as draw
from _schemes import CELLS, GPU_COLORS, GPUS, draw_cells
from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path += [str(draw.REPO), str(draw.REPO / "09_inference")]  # so that `import kv_cache` works

WIDTH = 6  # inches, as all sizes below


def _text(axes: Axes, x: float, y: float, text: str, **how) -> None:
    axes.text(x, y, text, **{"va": "center", "fontsize": 11} | how)


def _note(axes: Axes, y: float, text: str) -> None:
    _text(axes, 0.05, y, text, fontsize=10.5, color=draw.theme().quiet, linespacing=1.35)


def _box(axes: Axes, left: float, top: float, width: float, number: int, text: str) -> None:
    """Draw a box of a color with text in it."""
    draw.block(axes, left, top, width, 0.3, number)
    how = {"ha": "center", "fontsize": 10.5, "color": draw.text_on(number)}
    _text(axes, left + width / 2, top + 0.145, text, **how)


def two_nodes() -> Figure:
    """Draw two nodes of four GPUs: ranks, their shares of the batch, their GPUs. For 05."""
    nodes = 2
    world_size = nodes * GPUS
    figure, axes = draw.canvas(WIDTH, 4.75)
    for node in range(nodes):
        top = 0.1 + 2.02 * node
        _text(axes, 0.05, top, f"node {node}", weight="bold")
        draw.rounded(axes, 0.05, top + 0.16, WIDTH - 0.1, 1.6)
        for local_rank in range(GPUS):
            rank = node * GPUS + local_rank
            left = 0.2 + 1.42 * local_rank
            center = left + 0.67
            _text(axes, center, top + 0.42, f"RANK {rank}", ha="center", fontsize=12, weight="bold")
            for share in range(world_size):
                x = left + 0.05 + 0.158 * share
                draw.block(axes, x, top + 0.65, 0.13, 0.2, draw.PURPLE, filled=share == rank)
            _text(axes, center, top + 1.14, f"LOCAL_RANK {local_rank}", ha="center", fontsize=10.5)
            _box(axes, left + 0.25, top + 1.34, 0.84, draw.GREEN, f"cuda:{local_rank}")
    draw.block(axes, 0.05, 4.1, 0.2, 0.16, draw.PURPLE)
    _text(axes, 0.34, 4.18, f"RANK, of WORLD_SIZE {world_size}: its share of the batch")
    draw.block(axes, 0.05, 4.42, 0.2, 0.16, draw.GREEN)
    _text(axes, 0.34, 4.5, "LOCAL_RANK: its GPU on the node")
    return figure


def global_batch() -> Figure:
    """Draw which sequences of a global batch each rank reads, in which micro-batch. For 07."""
    ranks = GPUS
    micro_batches = 2
    micro_batch_size = 3
    sequences = ranks * micro_batches * micro_batch_size
    figure, axes = draw.canvas(WIDTH, 4.5)
    _text(axes, 0.05, 0.14, f"global batch: {sequences} sequences", weight="bold")
    width = (WIDTH - 0.1) / sequences
    for sequence in range(sequences):
        number = GPU_COLORS[sequence * ranks // sequences]
        draw.block(axes, 0.05 + sequence * width, 0.34, width - 0.03, 0.3, number)

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
        draw.arrow(axes, (3.31, top + 0.15), (3.61, top + 0.15))
        draw.arrow(axes, (4.78, top + 0.15), (5.08, top + 0.15))
    draw.block(axes, 3.64, 1.16, 1.12, 0.6 * ranks - 0.18, draw.GREY)
    middle = 1.07 + 0.3 * ranks
    how = {"ha": "center", "linespacing": 1.4}
    _text(axes, 4.2, middle, "one\nall-reduce\nof gradients", color=draw.text_on(draw.GREY), **how)
    _text(axes, 5.55, middle, "the same\noptimizer\nstep\non all", **how)
    product = f"{ranks} ranks × {micro_batches} micro-batches × {micro_batch_size} sequences"
    _note(axes, 3.75, f"{product} = {sequences}")
    _note(axes, 4.03, "+: a second backward adds to the gradients.")
    return figure


def six_collectives() -> Figure:
    """Draw what four ranks hold before and after each collective of 05's collectives.py."""
    names = ("broadcast", "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "send/recv")
    size = 0.25
    full = GPUS * (size + 0.025)
    figure, axes = draw.canvas(WIDTH, 5.2)
    for place, name in enumerate(names):
        left = 0.05 + 3.15 * (place % 2)
        top = 1.6 * (place // 2)
        before, after = CELLS[name]
        _text(axes, left, top + 0.12, name, fontsize=12, weight="bold")
        draw_cells(axes, left, top + 0.32, before, size)
        middle = top + 0.32 + full / 2
        draw.arrow(axes, (left + full + 0.06, middle), (left + full + 0.44, middle))
        draw_cells(axes, left + full + 0.5, top + 0.32, after, size)
    _note(axes, 5.0, "A column is a rank, before and after. A square of four colors is the sum.")
    return figure


def left_out_call() -> Figure:
    """Draw three ranks of which one leaves a collective out, as launch/debug_hang.py plants it."""
    calls = [("all_reduce", "gradients"), ("all_reduce", "loss"), ("all_gather", "times")]
    colors = {"gradients": draw.ORANGE, "loss": draw.BLUE, "times": draw.GREEN}
    planted_step = 3
    planted_rank = 1
    calls_of_rank = [calls * (planted_step + 1) for _ in range(3)]
    left_out = (planted_step - 1) * len(calls) + 1  # the loss of that step
    del calls_of_rank[planted_rank][left_out]

    figure, axes = draw.canvas(WIDTH, 3.1)
    for column, place in enumerate(range(left_out - 2, left_out + 1)):
        x = 0.8 + 1.3 * column
        _text(axes, x + 0.6, 0.14, f"call {place + 1}", ha="center", color=draw.theme().quiet)
        for rank, made in enumerate(calls_of_rank):
            collective, tensor = made[place]
            number = colors[tensor]
            top = 0.36 + 0.78 * rank
            draw.block(axes, x, top, 1.2, 0.62, number)
            how = {"ha": "center", "color": draw.text_on(number), "fontsize": 10.5}
            _text(axes, x + 0.6, top + 0.19, collective, **how)
            _text(axes, x + 0.6, top + 0.44, tensor, **how)
    red = draw.color(draw.RED)
    for rank in range(3):
        top = 0.36 + 0.78 * rank
        _text(axes, 0.05, top + 0.31, f"rank {rank}", weight="bold")
        draw.arrow(axes, (4.68, top + 0.31), (5.28, top + 0.31), color=red, linestyle="--")
        _text(axes, 5.35, top + 0.31, "waits", color=red, weight="bold")
    call = f"Its call {left_out + 1} meets another collective."
    _note(axes, 2.9, f"Rank {planted_rank} left out all_reduce(loss). {call}")
    return figure


def ring() -> Figure:
    """Draw which block of keys and values a rank has in each turn of ring attention. For 08."""
    figure, axes = draw.canvas(WIDTH, 4.5)
    for rank in range(GPUS):
        x = 0.95 + 1.28 * rank
        draw.rounded(axes, x, 0.42, 1.02, 0.74)
        _text(axes, x + 0.51, 0.6, f"rank {rank}", ha="center", weight="bold")
        _box(axes, x + 0.11, 0.78, 0.8, GPU_COLORS[rank], f"q {rank}")
        if rank < GPUS - 1:
            draw.arrow(axes, (x + 1.03, 0.79), (x + 1.27, 0.79))
    last = 1.46 + 1.28 * (GPUS - 1)
    draw.arrow(axes, (last, 0.42), (1.46, 0.42), connectionstyle="bar,fraction=0.07")

    for turn in range(GPUS):
        top = 1.5 + 0.66 * turn
        _text(axes, 0.05, top + 0.15, f"turn {turn}", weight="bold")
        for rank in range(GPUS):
            source = (rank - turn) % GPUS
            number = GPU_COLORS[source]
            x = 0.95 + 1.28 * rank
            if source <= rank:
                _box(axes, x, top, 1.02, number, f"k, v {source}")
            else:
                draw.block(axes, x, top, 1.02, 0.3, number, alpha=draw.theme().pale)
                _text(axes, x + 0.51, top + 0.145, f"k, v {source}", ha="center", fontsize=10.5)
            if turn < GPUS - 1 and rank < GPUS - 1:
                draw.arrow(axes, (x + 0.9, top + 0.33), (x + 1.4, top + 0.63))
    _note(axes, 4.3, "Pale: all keys are later than the queries, so there is nothing to compute.")
    return figure


EXPERTS_OF_TOKENS = ((0, 2, 2, 5), (1, 2, 4, 3), (3, 0, 2, 5))  # of each rank, made up


def there_and_back() -> Figure:
    """Draw the rows that expert parallelism dispatches to experts and combines again. For 08."""
    ranks = len(EXPERTS_OF_TOKENS)
    per_rank = 2
    side = 0.25  # of a square, which is a row
    step = 0.29
    height = 1.62  # of a rank
    figure, axes = draw.canvas(WIDTH, 0.65 + ranks * height)
    for x, name in ((0.8, "tokens"), (3.0, "experts"), (5.72, "tokens")):
        _text(axes, x, 0.14, name, ha="center", weight="bold")
    for x, name in ((1.85, "dispatch"), (4.55, "combine")):
        _text(axes, x, 0.14, name, ha="center", color=draw.theme().quiet)
    for rank in range(ranks):
        top = 0.36 + rank * height
        _text(axes, 0, top + 0.74, f"rank {rank}", weight="bold")
        for left, width in ((0.6, side + 0.16), (2.33, 1.64), (5.52, side + 0.16)):
            draw.rounded(axes, left, top, width, height - 0.14)
        for place in range(per_rank):
            _text(axes, 2.4, top + 0.38 + 0.72 * place, f"E{rank * per_rank + place}")

    rows = [0] * (ranks * per_rank)  # of each expert
    for rank, experts in enumerate(EXPERTS_OF_TOKENS):
        number = GPU_COLORS[rank]
        for token, expert in enumerate(experts):
            token_y = 0.36 + rank * height + 0.18 + step * token
            owner, place = divmod(expert, per_rank)
            expert_y = 0.36 + owner * height + 0.26 + 0.72 * place
            draw.block(axes, 0.68, token_y, side, side, number)
            draw.block(axes, 2.75 + step * rows[expert], expert_y, side, side, number)
            draw.block(axes, 5.6, token_y, side, side, number)
            rows[expert] += 1
            ends = [token_y + side / 2, expert_y + side / 2]
            for x in ((0.68 + side, 2.33), (5.6, 3.97)):
                axes.plot(x, ends, color=draw.color(number), linewidth=1.2, alpha=0.8)
    rows_of_rank = [sum(rows[rank * per_rank : (rank + 1) * per_rank]) for rank in range(ranks)]
    most = max(rows_of_rank)
    text = f"Rank {rows_of_rank.index(most)} computes {most} of {sum(rows)} rows: the others wait."
    _note(axes, 0.36 + ranks * height + 0.12, text)
    return figure


LENGTHS = (40, 22, 29)  # tokens of three sequences
SHARED = 16  # tokens that all of them begin with


def cache_pages() -> Figure:
    """Draw three sequences in a static cache, and in PagedCache with its own tables. For 09."""
    from kv_cache import PAGE, PagedCache

    from lm.shapes import SIZES

    figure, axes = draw.canvas(WIDTH, 5.7)
    longest = -(-max(LENGTHS) // PAGE)  # pages, rounded up
    slots = len(LENGTHS) * longest * PAGE
    _text(axes, 0.05, 0.14, f"static cache: {slots} slots", weight="bold")
    for sequence, length in enumerate(LENGTHS):
        top = 0.36 + 0.38 * sequence
        _text(axes, 0.05, top + 0.14, f"sequence {sequence}", fontsize=10.5)
        draw.block(axes, 1.2, top, 4.7, 0.28, draw.BLUE, filled=False)
        share = 4.7 * length / (longest * PAGE)
        draw.block(axes, 1.2, top, share, 0.28, GPU_COLORS[sequence])

    for panel, shared in enumerate((0, SHARED)):
        # On meta: the tables are real, the memory is not.
        cache = PagedCache(SIZES["nano"], pages=8, dtype=None, device="meta")
        for sequence, length in enumerate(LENGTHS):
            if shared and sequence > 0:
                cache.share(sequence, 0, shared)
            cache.reserve(sequence, length)
        _draw_paged(axes, 1.86 + 1.8 * panel, cache, PAGE, shared)
    _note(axes, 5.5, "Left: page tables. Right: the pages. Grey: a page in all three tables.")
    return figure


def _draw_paged(axes: Axes, top: float, cache, page_size: int, shared: int) -> None:
    """Draw the page tables of the sequences, and the pages with the tokens in them."""
    held = len(cache.held_pages())
    name = "paged, prefix shared" if shared else "paged"
    counted = f"{name}: {held} pages of {page_size} = {held * page_size} slots"
    _text(axes, 0.05, top, counted, weight="bold")
    for sequence, table in cache.tables.items():
        y = top + 0.24 + 0.42 * sequence
        _text(axes, 0.05, y + 0.15, f"sequence {sequence}", fontsize=10.5)
        for place, number in enumerate(table):
            is_shared = place < shared // page_size
            fill = draw.GREY if is_shared else GPU_COLORS[sequence]
            _box(axes, 1.2 + 0.36 * place, y, 0.33, fill, str(number))
            x = 2.75 + 0.81 * ((number - 1) % 4)
            page_y = top + 0.24 + 0.66 * ((number - 1) // 4)
            tokens = min(page_size, LENGTHS[sequence] - place * page_size)
            draw.block(axes, x, page_y, 0.75 * tokens / page_size, 0.3, fill)
    for number in range(1, 9):
        x = 2.75 + 0.81 * ((number - 1) % 4)
        y = top + 0.24 + 0.66 * ((number - 1) // 4)
        draw.block(axes, x, y, 0.75, 0.3, draw.BLUE, filled=False)
        _text(axes, x + 0.375, y + 0.43, str(number), ha="center", fontsize=10)
