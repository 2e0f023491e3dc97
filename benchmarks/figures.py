"""Draw the pictures of README.md and of chapters 05, 07 and 08 in docs/images, from runs.

    python benchmarks/figures.py    some minutes on 2 cores

Each picture says which run it shows. `make figures` draws the other pictures, too.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import _measure
from _measure import REPO, Side
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common import cli, exits
from lm.metrics import read_records

# --- the loss on several numbers of processes

PROCESSES = (1, 2, 3, 8)
STEPS = 40  # of every run
CLAIMED_STEPS = 20  # of these the losses agree, because training amplifies rounding
TOLERANCE = 1e-5  # relative
CHECKPOINT_STEP = STEPS // 3  # from which 2 processes continue the run of 3
LOSS_FLAGS = (
    "--model nano --dtype fp32 --deterministic --device cpu --seq-len 32 --log-every 1 "
    f"--global-batch-size 24 --steps {STEPS} --save-every {CHECKPOINT_STEP} --keep 9"
)


def summary_of(script: str, flags: str = "", ranks: int = 0) -> dict:
    """Run a lesson on the CPU, and return what it writes with --json."""
    return Side("", script, f"{flags} --device cpu", ranks).run(timeout=600)[0]


def save(figure: Figure, name: str) -> None:
    """Write a figure to docs/images."""
    figure.savefig(REPO / "docs/images" / name, dpi=100, bbox_inches="tight")
    print(f"picture: docs/images/{name}", flush=True)


def train(processes: int, run_dir: Path, more_flags: str = "") -> list[float]:
    """Run 05_ddp/train.py, and return its loss at each step."""
    flags = f"{LOSS_FLAGS} {more_flags} --run-dir {run_dir}"
    one_thread = {"OMP_NUM_THREADS": "1"}  # more threads would round in another order
    Side("", "05_ddp/train.py", flags, processes, env=one_thread).run(timeout=600)
    records = read_records(run_dir / "metrics.jsonl")
    return [record["loss"] for record in records if "loss" in record]


def loss_curves() -> None:
    """Draw the loss on each number of processes, and of a run that changes this number.

    Write the losses to benchmarks/results, too. Assert that they differ only by rounding.
    """
    curves = {}
    with tempfile.TemporaryDirectory(prefix="loss-curves-") as folder:
        for count in PROCESSES:
            name = "1 process" if count == 1 else f"{count} processes"
            curves[name] = train(count, Path(folder, str(count)))
        run_of_3 = Path(folder, "3")
        for checkpoint in run_of_3.glob("step-*"):
            if checkpoint.name != f"step-{CHECKPOINT_STEP}":
                shutil.rmtree(checkpoint)  # only the first checkpoint stays
        curves["3 processes, then 2"] = train(2, run_of_3, "--resume")

    alone = curves["1 process"]
    differences = {}
    for name, losses in curves.items():
        if losses is not alone:
            pairs = zip(losses, alone, strict=True)
            differences[name] = [abs(loss / loss_alone - 1) for loss, loss_alone in pairs]
    largest = max(max(values[:CLAIMED_STEPS]) for values in differences.values())
    result = _measure.about("benchmarks/figures.py", "cpu")
    title = f"# The loss on {PROCESSES} processes"
    text = f"{title}\n\n{_measure.facts(result)}\n\n{largest:.1e} at most; {LOSS_FLAGS}"
    result |= {
        "losses": curves,
        "relative_differences": differences,
        "moved_after_step": CHECKPOINT_STEP,
        "claimed_steps": CLAIMED_STEPS,
        "tolerance": TOLERANCE,
        "largest_relative_difference": largest,
    }
    _measure.write_results(result["device"], "loss-curves", result, text)

    figure = Figure(figsize=(7, 6))
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    draw_losses(above, curves)
    draw_differences(below, differences)
    save(figure, "loss_curves.png")
    assert largest <= TOLERANCE, f"the losses differ by {largest:.1e} within {CLAIMED_STEPS} steps"


def draw_losses(axes: Axes, curves: dict[str, list[float]]) -> None:
    """Draw one line over the other, each thinner than the one below it."""
    for i, (name, losses) in enumerate(curves.items()):
        width = 9 - 7 * i / (len(curves) - 1)
        axes.plot(range(1, STEPS + 1), losses, linewidth=width, label=name)
    axes.set(ylabel="training loss (nats per byte)", title="nano, fp32, 24 x 32 tokens a step, cpu")
    axes.legend(fontsize="small")


def draw_differences(axes: Axes, differences: dict[str, list[float]]) -> None:
    """Draw a point per step whose loss differs from the loss of one process."""
    for i, (name, values) in enumerate(differences.items(), start=1):
        points = [value or None for value in values]  # None draws no point
        axes.plot(range(1, STEPS + 1), points, "o", markersize=4, color=f"C{i}", label=name)
    line = {"color": "black", "linewidth": 0.8}
    axes.axhline(TOLERANCE, linestyle="--", label=f"{TOLERANCE:g}: tolerance", **line)
    axes.axvline(CLAIMED_STEPS, linestyle=":", label=f"of steps 1 to {CLAIMED_STEPS}", **line)
    axes.set(yscale="log", xlabel="step", ylabel="relative difference\nfrom 1 process")
    axes.legend(
        fontsize="small",
        title="no point: equal to the bit",
        loc="upper left",
        bbox_to_anchor=(1, 1),
    )


# --- 05: communication beside backward


def overlap() -> None:
    """Draw the fastest step of three variants of DDP over a slow link.

    Each has two bars: what rank 0 computed, and below it what it sent.
    """
    if os.geteuid() != 0 or not shutil.which("tc"):
        print("skipped: docs/images/overlap.png (its two hosts need root and iproute2)")
        return
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = ["benchmarks/slow_link.sh", "1000", sys.executable, "05_ddp/ddp_from_scratch.py"]
        command += ["--device", "cpu", "--seq-len", "64", "--steps", "16", "--json", file.name]
        _measure.start(command, 600, {}, REPO)
        rows = json.load(file)["rows"][1:4]
    figure = Figure(figsize=(9, 4.2))
    axes = figure.subplots()
    for place, row in enumerate(rows):
        draw_step(axes, -place, row["fastest_step"])
    kinds = ("forward", "backward", "only waiting", "all-reduce")
    axes.legend(
        axes.containers[:4], kinds, ncols=4, loc="lower center", bbox_to_anchor=(0.5, -0.32)
    )
    axes.set_yticks([-place - 0.1 for place in range(len(rows))], [row["name"] for row in rows])
    axes.set(
        xlabel="ms since the step began, on rank 0",
        title="nano, link of 1000 Mbit/s, the fastest of 16 steps each",
        xlim=(0, 1.45 * axes.get_xlim()[1]),
    )
    save(figure, "overlap.png")


def draw_step(axes: Axes, y: float, step: dict) -> None:
    """Draw a bar with what rank 0 computed in a step, and one with what it sent."""

    def ms(seconds: float) -> float:
        return 1e3 * (seconds - step["start"])

    forward_end = ms(step["forward_end"])
    backward_end = ms(step["last_gradient"])
    end = 1e3 * step["seconds"]
    axes.barh(y, forward_end, 0.3, color="tab:blue", alpha=0.5)
    axes.barh(y, backward_end - forward_end, 0.3, forward_end, color="tab:blue")
    axes.barh(y, end - backward_end, 0.3, backward_end, color="lightgrey")
    axes.text(end, y, f" {end:.0f} ms, {end - backward_end:.0f} of them waiting", va="center")
    for _, sent_from, sent_until in step["all_reduces"]:
        width = ms(sent_until) - ms(sent_from)
        axes.barh(y - 0.32, width, 0.22, ms(sent_from), color="tab:orange", edgecolor="white")


# --- 07: memory


def memory_over_a_step() -> None:
    """Draw what is alive after each operator of a step, with and without checkpointing."""
    figure = Figure(figsize=(9, 3.6))
    panels = figure.subplots(1, 2, sharey=True)
    for panel, method in zip(panels, ("none", "full"), strict=True):
        flags = f"--checkpointing {method}"
        timelines = summary_of("07_memory_tricks/memory_profile.py", flags)["timelines"]
        shown = {}  # MiB after each operator, by kind
        for kind, sizes in timelines.items():
            if max(sizes) > 2**20:
                shown[kind] = [size / 2**20 for size in sizes]
        panel.stackplot(range(len(timelines["parameters"])), shown.values(), labels=shown)
        panel.set(title=f"checkpointing: {method}", xlabel="operators of one step")
    panels[0].set_ylabel("MiB")
    panels[1].legend(fontsize="small", loc="upper right")  # there this panel is empty
    figure.suptitle("Memory over a training step: nano, fp32, 24 x 64 tokens", y=1.02)
    save(figure, "memory_over_a_step.png")


# --- 08: pipelines


def pipeline() -> None:
    """Draw what each of four ranks computes at each time, under three schedules."""
    flags = "--steps 1 --micro-batches-per-rank 2"
    rows = summary_of("08_model_parallel/pipeline_parallel.py", flags, ranks=4)["rows"]
    shown = [row for row in rows if "timelines" in row]
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    for axes, row in zip(figure.subplots(len(shown), 1), shown, strict=True):
        draw_schedule(axes, row)
    legend = "time in forwards of a rank; orange: backward; pale: the second stage"
    figure.supxlabel(legend, fontsize=9)
    save(figure, "pipeline.png")


def draw_schedule(axes: Axes, row: dict) -> None:
    """Draw a line per rank, with a bar and its micro-batch for each forward and backward."""
    colors = {"Forward": "tab:blue", "Backward": "tab:orange"}
    unit = 1 / row["stages_per_rank"]  # a stage of half the layers takes half the time
    for rank, timeline in enumerate(row["timelines"]):
        for name, micro_batch, chunk, start, end in timeline:
            axes.barh(
                rank,
                (end - start) * unit,
                left=start * unit,
                color=colors[name],
                alpha=0.45 if chunk else 0.8,
                edgecolor="white",
            )
            middle = (start + end) / 2 * unit
            axes.text(middle, rank, micro_batch, ha="center", va="center", fontsize=6)
    axes.set(
        title=f"{row['name']}: {row['idle_share']:.0%} idle",
        xlim=(0, 33),
        ylabel="rank",
        yticks=range(4),
    )
    axes.invert_yaxis()


def main() -> int:
    cli.Parser(__doc__).parse_args()
    for draw in (loss_curves, overlap, memory_over_a_step, pipeline):
        draw()
    return 0


if __name__ == "__main__":
    exits.run(main)
