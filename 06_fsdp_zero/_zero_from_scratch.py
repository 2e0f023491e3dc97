"""How zero_from_scratch.py compares a stage with DDP and with the formulas of _shared.py."""

import torch
import torch.distributed as dist
from _shared import of_zero, unflatten
from torch import Tensor, nn

from common import measure, runtime
from common.torch_versions import all_gather_single as all_gather

# What another order of the same sums may change, relative to the norm of a tensor. AdamW enlarges it: where a gradient
# is almost zero, rounding decides which way the weight goes.
TOLERANCE = 1e-3


@torch.no_grad()
def compare(stage, ddp, start: nn.Module) -> dict[str, float]:
    """How far a trained stage is from DDP, both of which began as `start`. Every rank must call it.

    AdamW divides by the gradients' size. With gradients N times too large it would reach almost the same weights, but
    its first moment, their running mean, would be N times too large.
    """
    for group in stage.groups:
        if group.weights.untyped_storage().nbytes() == 0:  # (3): forward would gather it
            group.weights.untyped_storage().resize_(group.weights.nbytes)
            all_gather(group.weights, group.my_weights)
    moved, ddp_moved = (
        [
            weight - before
            for weight, before in zip(trained.net.parameters(), start.parameters(), strict=True)
        ]
        for trained in (stage, ddp)
    )
    weights_error = measure.relative_error(moved, ddp_moved)
    moments_error = measure.relative_error(first_moments(stage), first_moments(ddp))
    of_ranks = torch.tensor(runtime.all_gather((weights_error, moments_error)))
    weights_error, moments_error = of_ranks.amax(0).tolist()  # NaN if one is
    return {"weights_error": weights_error, "first_moments_error": moments_error}


def first_moments(stage) -> list[Tensor]:
    """AdamW's, whole, in the order of net.parameters()."""
    found = {parameter: state["exp_avg"] for parameter, state in stage.optimizer.state.items()}
    for group in stage.groups:
        flat = torch.empty(group.weights.shape, device=group.weights.device)
        all_gather(flat, found[group.my_weights])
        found |= dict(zip(group.parameters, unflatten(flat, group.parameters), strict=True))
    return [found[parameter] for parameter in stage.net.parameters()]


def check(rows: list[dict], start: nn.Module) -> list[str]:
    for number, row in enumerate(rows):
        for name, expected in of_zero(number, start, dist.get_world_size()).items():
            assert row.get(name, 0) == expected, (
                f"stage {number}: {name} is {row.get(name)}, and must be {expected:,}"
            )
        for name in ("first_moments_error", "weights_error"):
            assert row[name] <= TOLERANCE, (
                f"stage {number}: {name} against DDP is {row[name]:.0e}: that is no rounding"
            )
    largest = max(max(row["weights_error"], row["first_moments_error"]) for row in rows)
    return [
        "bytes held, calls and bytes sent are those of the formulas, padding included, on every rank",
        f"each stage ends with DDP's weights and first moments: within {largest:.0e} (tolerance {TOLERANCE:g})",
    ]
