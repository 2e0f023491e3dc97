"""The formulas, the summary over seeds, the table and the checks of optimizer_memory.py."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim import Optimizer

BLOCK = 256  # values that share a scale
INSIDE = "step inside backward"
COLUMNS = {
    "recipe": "recipe",
    "parts": "weights + gradients + state",
    "bytes_per_parameter": "bytes per parameter",
    "moved_share": "weights that moved",
    "last_loss": "last loss",
    "largest_distance": "largest distance from AdamW",
    "spread_over_seeds_there": "spread over seeds there",
}

# --- bytes


def state_bytes_by_formula(recipe: str, shape: torch.Size) -> int:
    """Return the bytes that an optimizer keeps of a tensor of this shape."""
    numbers = shape.numel()
    if recipe in ("AdamW", INSIDE):
        return 2 * 4 * numbers
    if recipe == "moments in 8 bits":
        return 2 * (BLOCK + 4) * math.ceil(numbers / BLOCK)  # codes, and a scale per block
    if recipe == "Adafactor":
        # of a matrix a row and a column instead of the second moment
        return 4 * (sum(shape) if len(shape) > 1 else numbers)
    return 2 * 2 * numbers  # two moments in bf16


def held_bytes(net: nn.Module, optimizers: Iterable[Optimizer], gradient_bytes: int) -> dict:
    """Return the bytes of weights, gradients and optimizer state, without counts of steps."""
    state_bytes = 0
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                if getattr(value, "ndim", 0) > 0:
                    state_bytes += value.nbytes
    return {
        "weight_bytes": sum(weight.nbytes for weight in net.parameters()),
        "gradient_bytes": gradient_bytes,
        "optimizer_bytes": state_bytes,
    }


# --- losses


def summarize(runs: list[dict], baseline_runs: list[dict]) -> dict:
    """Return the row of a recipe, with losses that are means over the seeds.

    It has the largest distance of this curve from AdamW's, and how far apart the seeds of AdamW are
    at that step.
    """
    losses = torch.tensor([run["losses"] for run in runs], dtype=torch.float64)  # [seeds, steps]
    baseline_losses = torch.tensor([run["losses"] for run in baseline_runs], dtype=torch.float64)
    curve = losses.mean(0)
    distances = (curve - baseline_losses.mean(0)).abs()
    farthest = distances.argmax().item()
    seeds_there = baseline_losses[:, farthest]
    spread = None
    if len(seeds_there) > 1:
        spread = (seeds_there.max() - seeds_there.min()).item()
    return {
        **runs[0],
        "losses": losses.tolist(),
        "first_loss": curve[0].item(),
        "last_loss": curve[-1].item(),
        "largest_distance": distances[farthest].item(),
        "spread_over_seeds_there": spread,
    }


# --- checks


def check(rows: list[dict], stochastic_round: Callable) -> list[str]:
    """Assert the bytes of each recipe, and what rounding loses."""
    for row in rows:
        recipe = row["recipe"]
        state_bytes = row["optimizer_bytes"]
        expected = row["optimizer_bytes_by_formula"]
        assert state_bytes == expected, (
            f"{recipe}: state of {state_bytes:,} bytes, by formula {expected:,}"
        )
        gradient_bytes = 0 if recipe == INSIDE else row["weight_bytes"]
        assert row["gradient_bytes"] == gradient_bytes, (
            f"{recipe}: {row['gradient_bytes']:,} bytes of gradients"
        )
        if recipe == INSIDE:
            assert row["losses"] == rows[0]["losses"], f"{recipe}: losses are not AdamW's"
    mean = check_rounding(stochastic_round)
    return [
        "the state of each optimizer has the bytes of its formula",
        "a step inside backward has AdamW's losses to the bit, and leaves no byte of a gradient",
        "bf16 weights of 1 after 100 updates of 0.001: 1 if rounded to the nearest, "
        f"by chance {mean:.4f} on average",
    ]


def check_rounding(stochastic_round: Callable) -> float:
    """Assert that rounding to nearest loses small updates, and stochastic rounding does not."""
    nearest = torch.ones(10_000, dtype=torch.bfloat16)
    by_chance = nearest
    for _ in range(100):
        nearest = nearest + 0.001
        by_chance = stochastic_round(by_chance.float() + 0.001)
    mean = by_chance.float().mean().item()
    assert (nearest == 1).all(), "rounding to the nearest has lost no update"
    assert abs(mean - 1.1) < 0.01, f"rounded by chance, 100 updates of 0.001 make {mean} of 1"
    return mean
