"""Charts of what was measured or planned. Each function gets the figures, and returns a picture."""

import sys
from collections.abc import Iterable, Sequence

import numpy as np
from _draw import BLUE, GREEN, GREY, ORANGE, PALE_BLUE, PURPLE, RED, REPO, color, text_on, theme
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

sys.path += [str(REPO), str(REPO / "01_devices")]  # so that `import _benchmark` works
from _benchmark import draw_roofline

MIB = 2**20
GIB = 2**30
WIDTH = 9  # inches
COLORS = {
    "weights": BLUE,
    "parameters": BLUE,
    "optimizer state": GREEN,
    "gradients": ORANGE,
    "activations": PURPLE,
    "logits": RED,
    "gathered weights": PALE_BLUE,
    "gradients to reduce": GREY,
    "temporaries": GREY,
}


def loss_curves(result: dict) -> Figure:
    """Draw the losses of each run, and below how far they are from those of the first."""
    first, *others = result["losses"]
    steps = range(1, len(result["losses"][first]) + 1)
    figure = Figure(figsize=(WIDTH, 5.6))
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))

    for number, name in enumerate(result["losses"]):
        width = 9 - 7 * number / len(others)  # thin curves upon thick ones
        above.plot(steps, result["losses"][name], linewidth=width, label=name)
    above.set(
        ylabel="training loss, nats per byte",
        title="nano, fp32, 24 x 32 tokens a step, CPU processes",
    )
    above.legend(fontsize=9)

    for number, name in enumerate(others, start=1):
        # equal to the bit: no point on a logarithmic axis
        values = [value or None for value in result["relative_differences"][name]]
        below.plot(steps, values, "o", markersize=4, color=color(number))
    below.axhline(result["tolerance"], color=theme().quiet, linewidth=1, linestyle="--")
    below.axvline(result["claimed_steps"], color=theme().quiet, linewidth=1, linestyle=":")
    exponent = f"{result['tolerance']:.0e}".replace("e-0", "e-")
    tolerance = f"{exponent}: the tolerance of steps 1 to {result['claimed_steps']}"
    below.text(1, 1.7 * result["tolerance"], tolerance, fontsize=9, color=theme().quiet)
    below.set_title("no point: equal to the bit", fontsize=9, loc="left", color=theme().quiet)
    below.set(yscale="log", xlabel="step", ylabel=f"relative difference\nfrom {first}")
    return figure


def memory_over_a_step(timelines: dict[str, dict[str, list[int]]], title: str) -> Figure:
    """Draw what is alive after each operator, with and without checkpointing."""
    figure = Figure(figsize=(WIDTH, 3.8), layout="constrained")
    panels = figure.subplots(1, len(timelines), sharey=True)
    for panel, (checkpointing, sizes_by_kind) in zip(panels, timelines.items(), strict=True):
        shown = {}
        for kind, sizes in sizes_by_kind.items():
            if max(sizes) > MIB:
                shown[kind] = [size / MIB for size in sizes]
        _stack(panel, range(len(sizes_by_kind["parameters"])), shown)
        panel.set(title=f"checkpointing: {checkpointing}", xlabel="operators of one step")
    panels[0].set_ylabel("MiB")
    figure.suptitle(title, fontsize=11)
    _legend(panels)
    return figure


# estimate.py's names of the moments of a step, and what is written below the axis
MOMENTS = {
    "end of forward": "forward ends",
    "loss backward": "loss",
    "head gradient": "head",
    "last block": "last block",
    "first MLP": "first MLP",
    "first attention": "first attention",
    "last gradients": "backward ends",
}
AT_THE_BOTTOM = ("weights", "gradients", "optimizer state", "activations", "logits")


def memory_planned(plans: dict[str, dict]) -> Figure:
    """Draw estimate.py's table of a step, for each kind of checkpointing."""
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    panels = figure.subplots(1, len(plans), sharey=True)
    for panel, (checkpointing, plan) in zip(panels, plans.items(), strict=True):
        _draw_plan(panel, plan)
        peak = f"peak {plan['allocated_bytes'] / GIB:.0f} GiB"
        panel.set_title(f"checkpointing: {checkpointing}\n{peak}")
    panels[0].set_ylabel("GiB on a GPU")
    settings = plan["plan"]
    tokens = settings["micro_batch_size"] * settings["seq_len"]
    figure.suptitle(
        f"Planned: {plan['model']} by FSDP on {settings['gpus']} GPUs, {tokens:,} tokens on each",
        fontsize=11,
    )
    _legend(panels)
    return figure


def _draw_plan(panel: Axes, plan: dict) -> None:
    """Draw the parts of a plan over the moments of a step."""
    others = [part for part in plan["table"] if part not in AT_THE_BOTTOM]
    shown = {}
    for part in (*AT_THE_BOTTOM, *others):
        sizes = [plan["table"][part][moment] / GIB for moment in MOMENTS]
        if part in COLORS:  # not buffers, a tenth of a GiB
            # A moment is one unit wide. Sizes between two moments are not planned.
            shown[part] = np.repeat(sizes, 2)
    edges = []
    for place in range(len(MOMENTS)):
        edges += [place - 0.5, place + 0.5]
    _stack(panel, edges, shown)
    panel.set_xticks(
        range(len(MOMENTS)),
        MOMENTS.values(),
        fontsize=9,
        rotation=45,
        ha="right",
        rotation_mode="anchor",
    )
    panel.set_xlim(-0.5, len(MOMENTS) - 0.5)


def _stack(panel: Axes, x: Iterable[float], sizes_by_kind: dict[str, list[float]]) -> None:
    """Draw areas upon each other, each kind in its color."""
    colors = [color(COLORS[kind]) for kind in sizes_by_kind]
    panel.stackplot(x, sizes_by_kind.values(), labels=sizes_by_kind, colors=colors, linewidth=0)


def _legend(panels: Sequence[Axes]) -> None:
    """Name the areas in the order in which they lie, in the last panel, which has the most room."""
    handles, kinds = panels[0].get_legend_handles_labels()
    panels[-1].legend(handles[::-1], kinds[::-1], fontsize=9, loc="upper right")


def kernels_of_a_step(result: dict) -> Figure:
    """Draw the share of the kernel time by kind of kernel, for each model that was profiled."""
    profiles = result["kernels"]
    first = next(iter(profiles.values()))
    kinds = sorted(first["groups"], key=lambda kind: -first["groups"][kind]["milliseconds"])
    figure = Figure(figsize=(WIDTH, 5.2))
    axes = figure.subplots()
    height = 0.8 / len(profiles)
    for number, (name, profile) in enumerate(profiles.items()):
        total = profile["kernel_milliseconds"]
        step = profile["step_milliseconds_mean_of_15"]
        shares = [100 * profile["groups"][kind]["milliseconds"] / total for kind in kinds]
        places = [-place - number * height for place in range(len(kinds))]
        label = f"{name} tokens: {total:.0f} of {step:.0f} ms of a step"
        bars = axes.barh(places, shares, 0.9 * height, color=color(number), label=label)
        axes.bar_label(bars, fmt="%.1f %%", padding=3, fontsize=9)
    middles = [-place - height / 2 * (len(profiles) - 1) for place in range(len(kinds))]
    axes.set_yticks(middles, kinds)
    axes.tick_params(axis="y", length=0)
    about = result["about"]
    where = f"{about['device']}, torch {about['torch']}, commit {about['commit']}"
    axes.set(xlabel=f"% of the kernel time of a training step ({where})")
    axes.margins(y=0.02)
    axes.legend(loc="lower right")
    return figure


def pipeline(rows: list[dict]) -> Figure:
    """Draw what each rank computes when, one panel for each schedule."""
    figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
    for axes, row in zip(figure.subplots(len(rows), 1, sharex=True), rows, strict=True):
        for rank, timeline in enumerate(row["timelines"]):
            for work in timeline:
                _draw_work(axes, rank, work, 1 / row["stages_per_rank"])
        idle = f"{row['idle_share']:.0%} of the time idle"
        axes.set_title(f"{row['name']}: {idle}", loc="left")
        axes.set(xlim=(0, 33), ylabel="rank", yticks=range(len(row["timelines"])))
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
    axes.set_xlabel("time, in forwards of one rank; the numbers are micro-batches")
    names = ["forward", "backward"]
    handles = [Patch(color=color(BLUE)), Patch(color=color(ORANGE))]
    if any(row["stages_per_rank"] > 1 for row in rows):
        names += ["forward of the rank's second stage", "backward of the rank's second stage"]
        for number in (BLUE, ORANGE):
            handles.append(Patch(color=color(number), alpha=theme().pale, linewidth=0))
    figure.legend(handles, names, loc="outside upper center", ncols=len(names), fontsize=9)
    return figure


def _draw_work(axes: Axes, rank: int, work: tuple, unit: float) -> None:
    """Draw a forward or backward. `unit` is the time of a stage, in forwards of a rank."""
    (name, micro_batch, stage), start, end = work
    number = BLUE if name == "Forward" else ORANGE
    is_first = stage == rank  # of the stages of this rank
    alpha = 1 if is_first else theme().pale
    gap = 0.06  # between boxes
    left = start * unit
    width = (end - start) * unit - gap
    axes.barh(rank, width, 0.8, left, align="center", color=color(number), alpha=alpha)
    middle = left + width / 2
    axes.text(
        middle,
        rank,
        micro_batch,
        ha="center",
        va="center_baseline",
        fontsize=8,
        color=text_on(number) if is_first else theme().text,
    )


def overlap(rows: list[dict], title: str) -> Figure:
    """Draw the median step of variants: above what rank 0 computed, below what it sent.

    The first row is the variant without communication. Its step is the line that the others are
    measured from.
    """
    control, *variants = rows
    figure = Figure(figsize=(WIDTH, 3.9), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(variants):
        step = row["median_step"]
        forward = 1e3 * (step["forward_end"] - step["start"])
        computed = 1e3 * (step["last_gradient"] - step["start"])
        end = 1e3 * step["seconds"]
        axes.barh(-place, forward, 0.3, color=color(PALE_BLUE))
        axes.barh(-place, computed - forward, 0.3, forward, color=color(BLUE))
        axes.barh(-place, end - computed, 0.3, computed, color=color(GREY), alpha=theme().pale)
        exposed = 1e3 * row["exposed_seconds"]
        axes.text(end, -place, f"  {end:.0f} ms, {exposed:.0f} ms exposed", va="center")
        for _, sent_from, sent_until in step["all_reduces"]:
            left = 1e3 * (sent_from - step["start"])
            width = 1e3 * (sent_until - sent_from)
            gap = min(1.5, width / 3)  # between all-reduces
            axes.barh(-place - 0.29, width - gap, 0.2, left, color=color(ORANGE), linewidth=0)

    without = 1e3 * control["step_seconds"]
    axes.axvline(without, color=theme().quiet, linewidth=1, linestyle="--")
    axes.text(
        without,
        0.3,
        f"a step without communication, {without:.0f} ms",
        ha="center",
        fontsize=9,
        color=theme().quiet,
    )
    axes.set_yticks(
        [-place - 0.1 for place in range(len(variants))], [row["name"] for row in variants]
    )
    axes.tick_params(axis="y", length=0)
    longest = max(row["median_step"]["seconds"] for row in variants)
    axes.set(xlabel="ms since the step began, on rank 0", xlim=(0, 1.33e3 * longest))
    axes.set_title(title, pad=14)
    names = ("forward", "backward", "only waiting", "all-reduce")
    handles = [
        Patch(color=color(PALE_BLUE)),
        Patch(color=color(BLUE)),
        Patch(color=color(GREY), alpha=theme().pale, linewidth=0),
        Patch(color=color(ORANGE)),
    ]
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize=9)
    return figure


def roofline(result: dict) -> Figure:
    """Draw the result of 01_devices/benchmark.py."""
    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    axes = figure.subplots()
    draw_roofline(axes, result["rows"], result["best"], theme().series, theme().quiet)
    cores = result["under_load"]["cpu_threads"]
    threads = "1 thread" if cores == 1 else f"{cores} threads"
    axes.set_title(f"{result['cpu']}, {threads}: points are measured, lines are their roof")
    return figure
