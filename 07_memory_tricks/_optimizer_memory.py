"""For optimizer_memory.py: bytes of each kind and the peak of a step, loss curves beside AdamW's, and the proof."""

import gc
import math
import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from common import measure, model, shapes

TOKENS_OF_PEAK = 32  # few, so that activations do not hide what the optimizer takes
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


def parameter_shapes(config: shapes.Config) -> list[torch.Size]:
    with torch.device("meta"):
        return [parameter.shape for parameter in model.Transformer(config).parameters()]


def held_tensors(net: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Iterator[Tensor]:
    """One by one: a list of them would keep alive the states that an update replaces."""
    yield from net.parameters()
    yield from net.buffers()
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def measure_bytes(net: nn.Module, optimizers: list[torch.optim.Optimizer], step: Callable, seq_len: int) -> dict:
    """Of a run that has trained: what it holds between backward and update, and the most that a step takes. Trains two
    steps more, on one short sequence."""
    device = next(net.parameters()).device
    inputs = torch.zeros(1, min(TOKENS_OF_PEAK, seq_len), dtype=torch.int64, device=device)
    gc.collect()  # on CUDA what is left of the runs before would count
    states = (value for one in optimizers for state in one.state.values() for value in state.values())
    state_bytes = sum(value.nbytes for value in states if isinstance(value, Tensor) and value.ndim)  # no step counts
    others_bytes = 0
    if device.type == "cuda":  # workspaces of its libraries
        held_bytes = sum(tensor.nbytes for tensor in held_tensors(net, optimizers))
        others_bytes = torch.cuda.memory_allocated(device) - held_bytes
    with measure.LiveBytes(held_tensors(net, optimizers), device) as memory:
        step(inputs, inputs)
    net(inputs, inputs).backward()
    return {
        "weight_bytes": sum(parameter.nbytes for parameter in net.parameters()),
        "gradient_bytes": sum(parameter.grad.nbytes for parameter in net.parameters() if parameter.grad is not None),
        "optimizer_bytes": state_bytes,
        "peak_bytes": memory.peak - others_bytes,
    }


def summarize(recipe: str, runs: list[dict], parameters: int) -> dict:
    """A row of the table: bytes of the first seed, losses as the mean over the seeds."""
    own = [run for run in runs if run["recipe"] == recipe]
    by_step = list(zip(*(run["losses"] for run in own), strict=True))
    baseline_by_step = list(zip(*(run["losses"] for run in runs if run["recipe"] == BASELINE), strict=True))
    curve = [statistics.fmean(losses) for losses in by_step]
    distances = [abs(a - statistics.fmean(b)) for a, b in zip(curve, baseline_by_step, strict=True)]
    farthest = max(range(len(distances)), key=distances.__getitem__)
    spread = max(baseline_by_step[farthest]) - min(baseline_by_step[farthest])
    kinds = ("weight_bytes", "gradient_bytes", "optimizer_bytes")
    return {
        **own[0],
        "formula": RECIPES[recipe],
        "bytes_per_parameter": sum(own[0][kind] for kind in kinds) / parameters,
        "first_loss": curve[0],
        "last_loss": curve[-1],
        "largest_distance": distances[farthest],
        "largest_distance_step": farthest + 1,
        "spread_over_seeds_there": spread if len(own) > 1 else None,
        "losses": [run["losses"] for run in own],
    }


def check(rows: list[dict], low: list[dict], config: shapes.Config) -> list[str]:
    """What the script teaches; fails where it does not hold."""
    by_name = {row["recipe"]: row for row in rows}
    for recipe, row in by_name.items():
        expected = expected_state_bytes(recipe, parameter_shapes(config))
        assert row["optimizer_bytes"] == expected, f"{recipe}: {row['optimizer_bytes']:,} bytes, not {expected:,}"
        gradients = 0 if recipe == INSIDE_BACKWARD else row["weight_bytes"]
        assert row["gradient_bytes"] == gradients, f"{recipe}: {row['gradient_bytes']:,} bytes of gradients"
    inside, adamw = by_name[INSIDE_BACKWARD], by_name[BASELINE]
    assert inside["losses"] == adamw["losses"], "a step inside backward trains differently"
    assert inside["peak_bytes"] <= adamw["peak_bytes"], f"a step inside backward takes {inside['peak_bytes']:,} bytes"
    saved = (adamw["peak_bytes"] - inside["peak_bytes"]) / adamw["gradient_bytes"]
    in_fp32, nearest, stochastic = low
    assert nearest["moved_share"] < stochastic["moved_share"], "rounding to the nearest loses no update here"
    losses = [loss for row in rows for of_seed in row["losses"] for loss in of_seed]
    losses += [loss for run in low for loss in run["losses"]]
    assert all(math.isfinite(loss) for loss in losses), "a loss is not finite"
    return [
        "the state of each optimizer has the bytes of its formula, and no gradient outlives its step inside",
        "a step inside backward has AdamW's losses to the bit; its peak of memory in a step of few tokens is lower by "
        f"{saved:.0%} of the gradients",
        f"at a low learning rate, of bf16 weights rounded to the nearest {nearest['moved_share']:.1%} moved in "
        f"{len(nearest['losses'])} steps (last loss {nearest['losses'][-1]:.4f}), with stochastic rounding "
        f"{stochastic['moved_share']:.1%} ({stochastic['losses'][-1]:.4f}; AdamW in fp32 {in_fp32['losses'][-1]:.4f})",
    ]
