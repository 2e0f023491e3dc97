"""The reporting side of optimizer_memory.py: bytes per parameter, loss curves beside AdamW's, and weights that move."""

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch
from _optimizer_memory_bytes import Bytes

from old import data, hardware, model, report, shapes

BASELINE = "AdamW"
INSIDE_BACKWARD = "step inside backward"
BF16_NEAREST = "bf16 weights"
BF16_STOCHASTIC = "bf16 weights, stochastic rounding"
RECIPES = {  # what each parameter takes: weights + gradients + optimizer state
    BASELINE: "4 + 4 + 8",
    "moments in bf16": "4 + 4 + 2 + 2",
    "moments in 8 bits": "4 + 4 + 2 (1 + 4/256)",
    "Adafactor": "4 + 4 + rows and columns",
    INSIDE_BACKWARD: "4 + 0 + 8",
    "bf16 weights, fp32 master": "2 + 2 + 4 + 8",
    BF16_NEAREST: "2 + 2 + 2 + 2",
    BF16_STOCHASTIC: "2 + 2 + 2 + 2",
}


class Run(NamedTuple):
    recipe: str
    seed: int
    losses: list[float]
    moved_share: float  # of the weights, that are not what they were at first
    memory: Bytes | None


def expected_state_bytes(recipe: str, net_shapes: list[torch.Size]) -> int:
    """The formulas, exactly: blocks of 256 are filled up, and Adafactor keeps vectors whole."""
    total = 0
    for shape in net_shapes:
        count = shape.numel()
        total += {
            BASELINE: 8 * count,
            "moments in bf16": 4 * count,
            "moments in 8 bits": 2 * math.ceil(count / 256) * (256 + 4),
            "Adafactor": 4 * (sum(shape) if len(shape) > 1 else count),
            INSIDE_BACKWARD: 8 * count,
            "bf16 weights, fp32 master": 12 * count,
            BF16_NEAREST: 4 * count,
            BF16_STOCHASTIC: 4 * count,
        }[recipe]
    return total


def load_corpus(job: argparse.Namespace) -> data.Corpus:
    """UserError if it has less than a batch."""
    corpus, asked = data.load_corpus(), f"--batch-size {job.batch_size}"
    data.require_sequences(corpus.train, seq_len=job.seq_len, count=job.batch_size, asked=asked)
    return corpus


def mean_curve(runs: list[Run], recipe: str) -> list[float]:
    curves = [run.losses for run in runs if run.recipe == recipe]
    return [statistics.fmean(losses) for losses in zip(*curves, strict=True)]


def summarize(recipe: str, runs: list[Run], parameters: int) -> dict:
    """A row of the tables, as --json has it."""
    own = [run for run in runs if run.recipe == recipe]
    of_baseline = [run for run in runs if run.recipe == BASELINE]
    curve, baseline = mean_curve(runs, recipe), mean_curve(runs, BASELINE)
    distances = [abs(a - b) for a, b in zip(curve, baseline, strict=True)]
    spreads = [max(losses) - min(losses) for losses in zip(*(run.losses for run in of_baseline), strict=True)]
    farthest = max(range(len(distances)), key=distances.__getitem__)
    memory = own[0].memory
    return {
        "recipe": recipe,
        "formula": RECIPES[recipe],
        "weight_bytes": memory.weights,
        "gradient_bytes": memory.gradients,
        "optimizer_bytes": memory.states,
        "bytes_per_parameter": (memory.weights + memory.gradients + memory.states) / parameters,
        "peak_bytes": memory.peak,
        "first_loss": curve[0],
        "last_loss": curve[-1],
        "largest_distance": distances[farthest],
        "largest_distance_step": farthest + 1,
        "spread_over_seeds_there": spreads[farthest] if len(of_baseline) > 1 else None,
        "moved_share": own[0].moved_share,
        "losses": [run.losses for run in own],
    }


def print_rows(rows: list[dict], parameters: int) -> None:
    lines = [["recipe", "bytes per parameter", "formula", "weights", "gradients", "state", "peak of a step"]]
    for row in rows:
        parts = [row[f"{part}_bytes"] / parameters for part in ("weight", "gradient", "optimizer")]
        cells = [f"{part:.3f}" for part in parts]
        peak = f"{row['peak_bytes'] / 2**20:.1f} MiB"
        lines.append([row["recipe"], f"{row['bytes_per_parameter']:.3f}", row["formula"], *cells, peak])
    print(report.table(lines))
    print(
        "bf16 weights with an fp32 master take 16 bytes with bf16 gradients as here, 18 with fp32 gradients instead, "
        "20 with both\n"
    )


def print_curves(rows: list[dict]) -> None:
    lines = [["recipe", "first loss", "last loss", "largest distance from AdamW", "spread over seeds there", "more"]]
    for row in rows:
        spread = row["spread_over_seeds_there"]
        lines.append(
            [
                row["recipe"],
                f"{row['first_loss']:.4f}",
                f"{row['last_loss']:.4f}",
                f"{row['largest_distance']:.1e} (step {row['largest_distance_step']})",
                "n/a" if spread is None else f"{spread:.4f}",
                "n/a" if spread is None else "yes" if row["largest_distance"] > spread else "no",
            ]
        )
    print(report.table(lines) + "\n")


def print_moved(low: list[Run], low_lr: float) -> None:
    lines = [[f"at a learning rate of {low_lr:g}", "weights that moved", "first loss", "last loss"]]
    for run in low:
        lines.append([run.recipe, f"{run.moved_share:.1%}", f"{run.losses[0]:.4f}", f"{run.losses[-1]:.4f}"])
    print(report.table(lines) + "\n")


def check(rows: list[dict], runs: list[Run], low: list[Run], config: shapes.Config) -> None:
    """What the script teaches; fails where it does not hold."""
    by_name = {row["recipe"]: row for row in rows}
    for recipe, row in by_name.items():
        expected = expected_state_bytes(recipe, parameter_shapes(config))
        assert row["optimizer_bytes"] == expected, f"{recipe}: {row['optimizer_bytes']:,} bytes, not {expected:,}"
        gradients = 0 if recipe == INSIDE_BACKWARD else row["weight_bytes"]
        assert row["gradient_bytes"] == gradients, f"{recipe}: {row['gradient_bytes']:,} bytes of gradients"
    print("checked: the state of each optimizer has the bytes of its formula, and no gradient outlives its step inside")

    inside, adamw = by_name[INSIDE_BACKWARD], by_name[BASELINE]
    assert inside["losses"] == adamw["losses"], "a step inside backward trains differently"
    assert inside["peak_bytes"] <= adamw["peak_bytes"], f"a step inside backward takes {inside['peak_bytes']:,} bytes"
    saved = (adamw["peak_bytes"] - inside["peak_bytes"]) / adamw["gradient_bytes"]
    print(
        f"checked: a step inside backward has AdamW's losses to the bit; its peak of memory in a step of few "
        f"tokens is lower by {saved:.0%} of the gradients"
    )
    _, nearest, stochastic = low
    assert nearest.moved_share < stochastic.moved_share, "rounding to the nearest loses no update here"
    print(
        f"checked: of bf16 weights rounded to the nearest {nearest.moved_share:.1%} moved in "
        f"{len(nearest.losses)} steps, with stochastic rounding {stochastic.moved_share:.1%}"
    )
    assert all(math.isfinite(loss) for run in (*runs, *low) for loss in run.losses), "a loss is not finite"


def parameter_shapes(config: shapes.Config) -> list[torch.Size]:
    with torch.device("meta"):
        return [parameter.shape for parameter in model.Transformer(config).parameters()]


def plot(runs: list[Run], file: Path) -> None:
    """Each recipe's mean over the seeds, and the range of AdamW's seeds."""
    if (pyplot := report.pyplot()) is None:
        return
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    steps = range(1, len(runs[0].losses) + 1)
    of_baseline = [run.losses for run in runs if run.recipe == BASELINE]
    lowest = [min(losses) for losses in zip(*of_baseline, strict=True)]
    highest = [max(losses) for losses in zip(*of_baseline, strict=True)]
    axes.fill_between(steps, lowest, highest, alpha=0.2, label="AdamW, all seeds")
    for i, recipe in enumerate(RECIPES):  # thinner and thinner: some curves lie on each other
        axes.plot(steps, mean_curve(runs, recipe), label=recipe, linewidth=0.8 * (len(RECIPES) - i))
    axes.set(xlabel="step", ylabel="training loss, nats per token, mean of the seeds")
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    print(f"plot: {file}")


def conclude(runs: list[Run], low: list[Run], low_lr: float, job: argparse.Namespace, began: float) -> None:
    """Say what was measured, then whether what the script teaches holds."""
    parameters = shapes.parameter_count(job.config)
    print(
        f"{job.model}: {parameters:,} parameters, {job.steps} steps of {job.batch_size * job.seq_len} tokens, "
        f"{job.seeds} seeds, learning rate {job.lr:g}, {hardware.device_name(job.device)}\n"
    )
    rows = [summarize(recipe, runs, parameters) for recipe in RECIPES]
    print_rows(rows, parameters)
    print_curves(rows)
    print_moved(low, low_lr)
    plot(runs, job.plot)
    summary = {
        "device": hardware.device_name(job.device),
        "world_size": 1,
        "dtype": "fp32",
        "model": job.model,
        "parameters": parameters,
        "steps": job.steps,
        "tokens": job.steps * job.batch_size * job.seq_len,
        "first_loss": rows[0]["first_loss"],
        "last_loss": rows[0]["last_loss"],
        "peak_memory_bytes": report.peak_memory_bytes(job.device),
        "seconds": time.perf_counter() - began,
        "seeds": job.seeds,
        "low_lr": low_lr,
        "low_lr_runs": [{"recipe": run.recipe, "moved_share": run.moved_share, "losses": run.losses} for run in low],
        "rows": rows,
    }
    report.write_json(summary, job.json)
    check(rows, runs, low, job.config)
