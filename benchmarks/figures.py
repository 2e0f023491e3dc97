"""The pictures of README.md and of chapters 05, 07, 08 in docs/images, from runs that they name.

    python benchmarks/figures.py  some minutes on 2 cores
`make figures` makes the other pictures, too.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import _measure
from _measure import REPO, Side
from matplotlib.figure import Figure

from common import cli, exits
from lm.metrics import read_records


def summary_of(script: str, flags: str = "", ranks: int = 0) -> dict:
    """Run a lesson on the CPU: what it writes with --json."""
    return Side("", script, f"{flags} --device cpu", ranks).run(timeout=600)[0]


def save(figure: Figure, name: str) -> None:
    figure.savefig(REPO / "docs/images" / name, dpi=100, bbox_inches="tight")
    print(f"picture: docs/images/{name}", flush=True)


PROCESSES = (1, 2, 3, 8)
# of every run; over which the losses agree; relatively
STEPS, CLAIMED_STEPS, TOLERANCE = 40, 20, 1e-5


def loss_curves() -> None:
    """The loss of a run on each number of processes, and of one of three that goes on from its first checkpoint on two.
    AssertionError if they differ by more than rounding, which training amplifies. Also to benchmarks/results."""
    flags = "--model nano --dtype fp32 --deterministic --device cpu --seq-len 32 --log-every 1 --global-batch-size 24"
    flags += f" --steps {STEPS} --save-every {STEPS // 3} --keep 9"

    def train(processes: int, run_dir: Path, more: str = "") -> list[float]:
        one_thread = {"OMP_NUM_THREADS": "1"}  # more would round in another order
        side = Side(
            "", "05_ddp/train.py", f"{flags} {more} --run-dir {run_dir}", processes, env=one_thread
        )
        side.run(timeout=600)
        return [
            record["loss"] for record in read_records(run_dir / "metrics.jsonl") if "loss" in record
        ]

    with tempfile.TemporaryDirectory(prefix="loss-curves-") as folder:
        runs = {count: Path(folder, str(count)) for count in PROCESSES}
        curves = {
            f"{count} process{'es' * (count > 1)}": train(count, run) for count, run in runs.items()
        }
        for saved in runs[3].glob("step-*"):
            if saved.name != f"step-{STEPS // 3}":
                shutil.rmtree(saved)  # only the first checkpoint is left
        curves["3 processes, then 2"] = train(2, runs[3], "--resume")
    alone, *others = curves.items()
    differ = {
        name: [abs(a / b - 1) for a, b in zip(losses, alone[1], strict=True)]
        for name, losses in others
    }
    largest = max(max(values[:CLAIMED_STEPS]) for values in differ.values())
    result = _measure.about("benchmarks/figures.py", "cpu")
    text = f"# The loss on {PROCESSES} processes\n\n{_measure.facts(result)}\n\n{largest:.1e} at most; {flags}"
    result |= {"losses": curves, "relative_differences": differ, "moved_after_step": STEPS // 3}
    result |= {
        "claimed_steps": CLAIMED_STEPS,
        "tolerance": TOLERANCE,
        "largest_relative_difference": largest,
    }
    _measure.write_results(result["device"], "loss-curves", result, text)

    figure = Figure(figsize=(7, 6))
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    steps = range(1, STEPS + 1)
    for i, (name, losses) in enumerate(curves.items()):
        above.plot(steps, losses, linewidth=9 - 7 * i / (len(curves) - 1), label=name)
    above.set(
        ylabel="training loss (nats per byte)", title="nano, fp32, 24 x 32 tokens a step, cpu"
    )
    above.legend(fontsize="small")
    for i, (name, values) in enumerate(differ.items(), start=1):
        below.plot(
            steps, [value or None for value in values], "o", markersize=4, color=f"C{i}", label=name
        )
    below.axhline(
        TOLERANCE, color="black", linewidth=0.8, linestyle="--", label=f"{TOLERANCE:g}: tolerance"
    )
    below.axvline(
        CLAIMED_STEPS,
        color="black",
        linewidth=0.8,
        linestyle=":",
        label=f"of steps 1 to {CLAIMED_STEPS}",
    )
    below.set(yscale="log", xlabel="step", ylabel="relative difference\nfrom 1 process")
    below.legend(
        fontsize="small",
        title="no point: equal to the bit",
        loc="upper left",
        bbox_to_anchor=(1, 1),
    )
    save(figure, "loss_curves.png")
    assert largest <= TOLERANCE, f"the losses differ by {largest:.1e} within {CLAIMED_STEPS} steps"


def overlap() -> None:
    """05: the fastest step of three ways to average gradients, over a slow link: above what rank 0 computed, below what
    it sent."""
    if os.geteuid() != 0 or not shutil.which("tc"):
        return print("skipped: docs/images/overlap.png (its two hosts need root and iproute2)")
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        flags = f"--device cpu --seq-len 64 --steps 16 --json {file.name}".split()
        command = [
            "benchmarks/slow_link.sh",
            "1000",
            sys.executable,
            "05_ddp/ddp_from_scratch.py",
            *flags,
        ]
        _measure.start(command, 600, {}, REPO)
        rows = json.load(file)["rows"][1:4]
    figure = Figure(figsize=(9, 4.2))
    axes = figure.subplots()
    for place, row in enumerate(rows):
        step = row["fastest_step"]
        forward, computed = (
            1e3 * (step[moment] - step["start"]) for moment in ("forward_end", "last_gradient")
        )
        end = 1e3 * step["seconds"]
        axes.barh(-place, forward, 0.3, color="tab:blue", alpha=0.5)
        axes.barh(-place, computed - forward, 0.3, forward, color="tab:blue")
        axes.barh(-place, end - computed, 0.3, computed, color="lightgrey")
        axes.text(end, -place, f" {end:.0f} ms, {end - computed:.0f} of them waiting", va="center")
        for _, sent_from, sent_until in step["all_reduces"]:
            left, width = 1e3 * (sent_from - step["start"]), 1e3 * (sent_until - sent_from)
            axes.barh(-place - 0.32, width, 0.22, left, color="tab:orange", edgecolor="white")
    kinds = ("forward", "backward", "only waiting", "all-reduce")
    axes.legend(
        axes.containers[:4], kinds, ncols=4, loc="lower center", bbox_to_anchor=(0.5, -0.32)
    )
    axes.set_yticks([-place - 0.1 for place in range(len(rows))], [row["name"] for row in rows])
    title = "nano, link of 1000 Mbit/s, the fastest of 16 steps each"
    axes.set(
        xlabel="ms since the step began, on rank 0",
        title=title,
        xlim=(0, 1.45 * axes.get_xlim()[1]),
    )
    save(figure, "overlap.png")


def memory_over_a_step() -> None:
    """07: what is alive after each operator, with and without checkpointing."""
    figure = Figure(figsize=(9, 3.6))
    panels = figure.subplots(1, 2, sharey=True)
    for panel, how in zip(panels, ("none", "full"), strict=True):
        lines = summary_of("07_memory_tricks/memory_profile.py", f"--checkpointing {how}")[
            "timelines"
        ]
        shown = {
            name: [size / 2**20 for size in sizes]
            for name, sizes in lines.items()
            if max(sizes) > 2**20
        }
        panel.stackplot(range(len(lines["parameters"])), shown.values(), labels=shown)
        panel.set(title=f"checkpointing: {how}", xlabel="operators of one step")
    panels[0].set_ylabel("MiB")
    panels[1].legend(fontsize="small", loc="upper right")  # where the other panel's mountain is not
    figure.suptitle("Memory over a training step: nano, fp32, 24 x 64 tokens", y=1.02)
    save(figure, "memory_over_a_step.png")


def pipeline() -> None:
    """08: what each of four ranks computes when, under three schedules."""
    flags = "--steps 1 --micro-batches-per-rank 2"
    rows = summary_of("08_model_parallel/pipeline_parallel.py", flags, ranks=4)["rows"]
    colors = {"Forward": "tab:blue", "Backward": "tab:orange"}
    shown = [row for row in rows if "timelines" in row]
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    for axes, row in zip(figure.subplots(len(shown), 1), shown, strict=True):
        unit = 1 / row["stages_per_rank"]  # a stage of half the layers takes half the time
        for rank, line in enumerate(row["timelines"]):
            for (name, micro_batch, stage), start, end in line:
                width = (end - start) * unit
                pale = 0.8 if stage == rank else 0.45
                axes.barh(
                    rank,
                    width,
                    left=start * unit,
                    color=colors[name],
                    alpha=pale,
                    edgecolor="white",
                )
                axes.text(
                    (start + end) / 2 * unit,
                    rank,
                    micro_batch,
                    ha="center",
                    va="center",
                    fontsize=6,
                )
        axes.set(
            title=f"{row['name']}: {row['idle_share']:.0%} idle",
            xlim=(0, 33),
            ylabel="rank",
            yticks=range(4),
        )
        axes.invert_yaxis()
    legend = "time in forwards of a rank; orange: backward; pale: the second stage"
    figure.supxlabel(legend, fontsize=9)
    save(figure, "pipeline.png")


def main() -> int:
    cli.Parser(__doc__).parse_args()
    for draw in (loss_curves, overlap, memory_over_a_step, pipeline):
        draw()
    return 0


if __name__ == "__main__":
    exits.run(main)
