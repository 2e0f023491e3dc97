"""What compare.py tells of its runs: a table for people, rows for --json, checks, a plot."""

import math
from pathlib import Path

import torch
from _compare_dtypes import is_native
from _compare_fp16_limits import MICRO_BATCHES, SMALLEST_KEPT
from torch import Tensor

from old import report

FIRST_LOSS_TOLERANCE = {"fp32": 0.0, "tf32": 1e-3, "bf16": 2e-3, "fp16": 1e-3, "fp16-unscaled": 1e-3, "fp8": 1e-2}
NOTES = {"fp8": "use_fast_accum=False"}  # said beside the figure: with True it would be faster and less exact


def skipped_steps(run) -> int:
    """Those that the optimizer did not count. Asked at the end: asking in a step would wait for the device in fp16."""
    first_state = next(iter(run.optimizer.state.values()))
    return len(run.losses) - int(first_state["step"])


def summarize(run, baseline, tokens_per_round: int) -> dict:
    """A run as --json has it."""
    native = is_native(run.name, run.losses[0].device)
    losses = [loss if math.isfinite(loss) else None for loss in torch.stack(run.losses).tolist()]
    baseline_losses = torch.stack(baseline.losses).tolist()
    differences = [abs(a - b) for a, b in zip(losses, baseline_losses, strict=True) if a is not None]

    kept_bytes = sum(p.nbytes for p in run.net.parameters())
    for state in run.optimizer.state.values():
        kept_bytes += sum(t.nbytes for t in state.values())

    seconds = run.round_seconds[1:]  # the first round warmed up
    baseline_seconds = baseline.round_seconds[1:]
    speeds = [tokens_per_round / one for one in seconds]
    speedups = [theirs / ours for theirs, ours in zip(baseline_seconds, seconds, strict=True)]
    return {
        "name": run.name,
        "dtype": run.name.removesuffix("-unscaled"),
        "scaler": run.scaler.is_enabled(),
        "native": native,
        "note": NOTES.get(run.name),
        "tokens_per_second": report.spread(speeds) if native else None,
        "speedup": report.spread(speedups) if native else None,
        "kept_bytes": kept_bytes,
        "peak_memory_bytes": None if run.step_bytes is None else kept_bytes + run.step_bytes,
        "saved_activation_bytes": run.saved_activation_bytes,
        "weight_copy_bytes": run.weight_copy_bytes,
        "losses": losses,
        "largest_loss_difference": max(differences, default=None),
        "skipped_steps": skipped_steps(run),
    }


def print_runs(rows: list[dict]) -> None:
    head = [
        "type",
        "tokens/s",
        "speed against fp32",
        "peak memory, MiB",
        "activations, MiB",
        "last loss",
        "largest loss difference",
        "steps skipped",
    ]
    print("\n" + report.table([head, *(cells(row) for row in rows)]) + "\n")


def cells(row: dict) -> list[str]:
    speed = row["tokens_per_second"]
    speedup = row["speedup"]
    peak = row["peak_memory_bytes"]
    last = row["losses"][-1]
    difference = row["largest_loss_difference"]
    name = row["name"]
    if not row["native"]:
        name += " (emulated)"
    if row["note"]:
        name += f", {row['note']}"
    return [
        name,
        f"{speed['median']:,.0f}" if speed else "n/a",
        f"{speedup['median']:.2f} ({speedup['min']:.2f} to {speedup['max']:.2f})" if speedup else "n/a",
        f"{peak / 2**20:,.1f}" if peak else "n/a",
        f"{row['saved_activation_bytes'] / 2**20:,.1f}",
        "NaN" if last is None else f"{last:.4f}",
        "NaN" if difference is None else f"{difference:.4f}",
        str(row["skipped_steps"]),
    ]


def checks(rows: list[dict], instabilities: list[dict]) -> list[tuple[bool, str]]:
    """What compare.py teaches, and whether it holds."""
    baseline = rows[0]
    found = []
    for row in rows[1:]:
        tolerance = FIRST_LOSS_TOLERANCE[row["name"]]
        first_loss = row["losses"][0] or 0.0  # None if it was not finite
        relative_error = abs(first_loss / baseline["losses"][0] - 1)
        share = row["saved_activation_bytes"] / baseline["saved_activation_bytes"]
        smaller = share < 0.8 or row["name"] == "tf32"  # in memory tf32 is fp32
        text = f"{row['name']}: first loss within {tolerance} of fp32's ({relative_error:.0e})"
        found.append((relative_error <= tolerance and smaller, f"{text}, {share:.0%} of its activations in bytes"))
    kept = {row["kept_bytes"] for row in rows}
    text = f"weights and optimizer state take {baseline['kept_bytes'] / 2**20:.1f} MiB in every type: AMP keeps fp32"
    found.append((len(kept) == 1, text))
    for entry in instabilities:
        found.append((entry["holds"], f"{entry['name']}: {entry['text']}"))
    return found


def check(rows: list[dict], instabilities: list[dict], required: bool) -> None:
    """Print what holds; end the script at what does not, if that is required of this model and batch."""
    for holds, text in checks(rows, instabilities):
        assert holds or not required, f"does not hold: {text}"
        print(f"{'checked' if holds else 'not seen with this model and batch'}: {text}")


def plot(rows: list[dict], gradients: Tensor, scale: float, file: Path) -> None:
    """Loss curves beside the histogram of the gradients' magnitudes and of what fp16 can hold."""
    if (pyplot := report.pyplot()) is None:
        return
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4), layout="constrained")
    for i, row in enumerate(rows):  # thinner and thinner: the curves lie on each other
        steps = range(1, len(row["losses"]) + 1)
        losses = [math.nan if loss is None else loss for loss in row["losses"]]
        left.plot(steps, losses, label=row["name"], linewidth=2 * (len(rows) - i))
    left.set(xlabel="step", ylabel="loss")
    left.legend()
    exponents = gradients[gradients != 0].abs().log2()
    factors = {f"/ {MICRO_BATCHES:,}": 1 / MICRO_BATCHES, "gradients": 1.0, f"x {scale:,.0f}": scale}
    for name, factor in factors.items():
        counts = torch.histc(exponents + math.log2(factor), bins=90, min=-60, max=30).cpu()
        right.stairs(counts, range(-60, 31), fill=True, alpha=0.5, label=name)
    lines = {math.log2(SMALLEST_KEPT): "zero below", -14: "fewer bits below", 16: "infinite above"}
    for exponent, name in lines.items():
        right.axvline(exponent, color="black", linewidth=0.8)
        right.text(exponent, right.get_ylim()[1], f"{name} ", rotation=90, va="top", ha="right", fontsize=8)
    right.set(xlabel="log2 of the magnitude; lines: what fp16 can hold", ylabel="gradient elements")
    right.legend()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    print(f"plot: {file}")
