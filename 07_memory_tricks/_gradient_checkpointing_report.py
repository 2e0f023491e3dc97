"""What gradient_checkpointing.py checks and tells: a table for people, rows for --json, a picture."""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from old import hardware, report, shapes
from old.step_cost import Memory, draw_memory

TOLERANCE = {
    "cpu": {"fp32": 1e-6, "bf16": 2e-2},
    "cuda": {"fp32": 1e-5, "bf16": 2e-2},  # its attention may add up in another order each time
}
DRAWN = ("none", "every 2nd block", "selective", "full")  # four lines can be told apart


@dataclass
class Measured:
    """One way to keep activations, and what a step takes with it."""

    kept_bytes: int
    memory: Memory
    forward_calls: list[int]  # of each block
    flops: int
    gradient_relative_error: float  # the largest of a weight, against everything kept


def conclude(
    measured: dict[str, Measured],
    seconds: dict[str, list[float]],
    extra_flops: dict[str, int],
    args: argparse.Namespace,
    config: shapes.Config,
    device: torch.device,
    began: float,
) -> None:
    """AssertionError if gradients differ, or if anything else was computed again than should be."""
    rows = [describe(name, measured, seconds) for name in measured]
    print_table(rows)
    check(rows, extra_flops, args.dtype, device.type)
    print_verdict({row["name"]: row for row in rows})
    picture = plot(measured, rows, args.plot)
    summary = {
        "device": hardware.device_name(device),
        "world_size": 1,
        "dtype": args.dtype,
        "model": args.model,
        "parameters": shapes.parameter_count(config),
        "peak_memory_bytes": report.peak_memory_bytes(device),
        "seconds": time.perf_counter() - began,
        "seq_len": args.seq_len,
        "batch_size": args.batch_size,
        "rows": rows,
        "plot": picture,
    }
    report.write_json(summary, args.json)


def describe(name: str, measured: dict[str, Measured], seconds: dict[str, list[float]]) -> dict:
    """A variant as --json has it, beside the one that recomputes nothing."""
    one, none = measured[name], measured["none"]
    ratios = [own / stored for own, stored in zip(seconds[name], seconds["none"], strict=True)]
    return {
        "name": name,
        "kept_for_backward_bytes": one.kept_bytes,
        "kept_for_backward_cut": 1 - one.kept_bytes / none.kept_bytes,
        "peak_bytes": one.memory.peak_bytes,
        "peak_cut": 1 - one.memory.peak_bytes / none.memory.peak_bytes,
        "step_seconds": report.spread(seconds[name]),
        "time_ratio": report.spread(ratios),
        "forward_calls_by_block": one.forward_calls,
        "flops": one.flops,
        "extra_flops": one.flops - none.flops,
        "gradient_relative_error": one.gradient_relative_error,
    }


def largest_relative_error(gradients: list[Tensor], exact: list[Tensor]) -> float:
    """Over the weights. 0 is equality to the bit."""
    return max(((ours - theirs).norm() / theirs.norm()).item() for ours, theirs in zip(gradients, exact, strict=True))


def print_table(rows: list[dict]) -> None:
    head = [
        "recomputed",
        "kept for backward, MiB",
        "less",
        "peak of a step, MiB",
        "less",
        "time of a step, s",
        "time against none",
        "FLOP against none",
    ]
    print("\n" + report.table([head, *(cells(row, rows[0]) for row in rows)]) + "\n")


def cells(row: dict, none: dict) -> list[str]:
    ratio = row["time_ratio"]
    return [
        row["name"],
        f"{row['kept_for_backward_bytes'] / 2**20:,.1f}",
        f"{row['kept_for_backward_cut']:.1%}",
        f"{row['peak_bytes'] / 2**20:,.1f}",
        f"{row['peak_cut']:.1%}",
        f"{row['step_seconds']['median']:.3f}",
        f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})",
        f"{row['flops'] / none['flops']:.4f}",
    ]


def check(rows: list[dict], extra_flops: dict[str, int], dtype: str, device_type: str) -> None:
    errors = {row["name"]: row["gradient_relative_error"] for row in rows[1:]}
    wrong = {name: error for name, error in errors.items() if not error <= TOLERANCE[device_type][dtype]}
    assert not wrong, f"gradients differ from those with everything kept: {wrong}"
    largest = max(errors.values())
    told = "to the bit" if largest == 0 else f"within {largest:.0e} (relative)"
    print(f"checked: all gradients of all variants equal those with everything kept, {told}")

    layers = len(rows[0]["forward_calls_by_block"])
    for row in rows:
        calls = [1 + (i % every_nth(row["name"]) == 0) for i in range(1, layers + 1)]
        assert row["forward_calls_by_block"] == calls, f"{row['name']}: forward calls {row['forward_calls_by_block']}"
    print("checked: forward ran twice in every block that is recomputed, once in every other")

    for row in rows:
        due = extra_flops[row["name"]]
        assert row["extra_flops"] == due, f"{row['name']}: {row['extra_flops']} FLOP more than none, not {due}"
    print("checked: the FLOP of the products that are computed again, counted, are those of the formula")


def every_nth(name: str) -> int:
    """Which blocks this variant recomputes; none of a model's for a number above its layers."""
    return {"none": 10**9, "every 3rd block": 3, "every 2nd block": 2}.get(name, 1)


def print_verdict(rows: dict[str, dict]) -> None:
    print("\nclaimed for gradient checkpointing: more than 60 % of memory less for about 30 % more time. Measured:")
    for name in ("full", "selective"):
        row = rows[name]
        ratio = row["time_ratio"]
        memory = f"{row['kept_for_backward_cut']:.0%} less kept for backward, {row['peak_cut']:.0%} off a step's peak"
        spread = f"{ratio['min'] - 1:+.0%} to {ratio['max'] - 1:+.0%}, n = {ratio['n']}"
        print(f"{name}: {memory}, for {ratio['median'] - 1:+.0%} time ({spread}); the optimizer's step is not in it")


def plot(measured: dict[str, Measured], rows: list[dict], file: Path) -> str | None:
    """Memory over a step, beside what each variant keeps and costs."""
    if (pyplot := report.pyplot()) is None:
        return None
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 4.5), layout="constrained")
    draw_memory({name: measured[name].memory for name in DRAWN}, left)
    left.set_title("weights, gradients and activations over a step")
    for row in rows:
        ratio, kept = row["time_ratio"], row["kept_for_backward_bytes"] / 2**20
        right.plot([ratio["min"], ratio["max"]], [kept, kept], color="lightgray")
        right.plot(ratio["median"], kept, "o", label=row["name"])
    right.set(xlabel="time of a step against none: median, and lowest to highest", ylabel="MiB kept for backward")
    right.set_ylim(0, None)
    right.set_title("what is kept, and what it costs")
    right.legend()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    print(f"plot: {file}")
    return str(file)
