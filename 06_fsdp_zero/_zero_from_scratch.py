"""Count what a stage of zero_from_scratch.py holds and sends, and compare its weights with DDP."""

import torch
import torch.distributed as dist
from _sharding import bytes_of_training, zero_formula
from torch import Tensor, nn

from common import measure, runtime
from common.torch_versions import all_gather_single

# What another order of the same sums may change, relative to the norm of a tensor. AdamW enlarges
# it: if a gradient is almost zero, rounding decides in which direction the weight moves.
TOLERANCE = 1e-3
COLUMNS = {
    "sharded": "sharded",
    "parameter_bytes_per_rank": "weights",
    "gradient_bytes_per_rank": "gradients",
    "optimizer_bytes_per_rank": "AdamW state",
    "collectives": "collectives a step",
    "sent_bytes": "sent a step",
    "weights_error": "weights' difference from DDP",
}


def row_of(stage, losses: list[Tensor], sent: measure.Traffic) -> dict:
    """Return the losses of the global batch, and what this rank holds and sends in a step.

    Every rank must call this. Assert that all ranks hold and send the same.
    """
    steps = len(losses)
    mean_losses = torch.stack(losses) / dist.get_world_size()
    dist.all_reduce(mean_losses)  # the shares of the ranks are equal

    held_weights = list(stage.net.parameters())
    for group in stage.groups:
        held_weights += [group.my_weights, group.weights]
    sent_bytes = round(sum(sent.bytes_sent.values()) / steps)
    row = bytes_of_training(held_weights, stage.optimizer)
    for kind, count in sent.calls.items():
        row[f"{kind}_per_step"] = count // steps
    row["collectives"] = ", ".join(f"{n // steps} {kind}" for kind, n in sent.calls.items())
    row["bytes_sent_per_rank_per_step"] = sent_bytes
    row["sent_bytes"] = sent_bytes  # the same number, under a name that the table shows in MiB
    row["losses"] = mean_losses.tolist()

    for other in runtime.all_gather(row):
        assert other == row, f"ranks differ: {row} and {other}"
    return row


@torch.no_grad()
def compare(stage, ddp, start: nn.Module) -> dict[str, float]:
    """Return how far a trained stage is from DDP. Both began as `start`. Every rank must call this.

    Weights alone would hide gradients that are N times too large, because AdamW divides by the size
    of the gradient. Its first moment is a mean of gradients, and would be N times too large.
    """
    for group in stage.groups:
        storage = group.weights.untyped_storage()
        if storage.nbytes() == 0:  # stage 3 has freed it, until the next forward
            storage.resize_(group.weights.nbytes)
            all_gather_single(group.weights, group.my_weights)
    errors = (
        measure.relative_error(moved(stage, start), moved(ddp, start)),
        measure.relative_error(first_moments(stage), first_moments(ddp)),
    )
    errors_of_ranks = torch.tensor(runtime.all_gather(errors))  # [ranks, 2]
    weights_error, moments_error = errors_of_ranks.amax(0).tolist()  # NaN if one is NaN
    return {"weights_error": weights_error, "first_moments_error": moments_error}


def moved(stage, start: nn.Module) -> list[Tensor]:
    """Return how far training has moved each weight."""
    pairs = zip(stage.net.parameters(), start.parameters(), strict=True)
    return [weight - before for weight, before in pairs]


def first_moments(stage) -> list[Tensor]:
    """Return the full first moments of AdamW, in the order of the model's parameters."""
    moments = {}  # by parameter
    for parameter, state in stage.optimizer.state.items():
        moments[parameter] = state["exp_avg"]
    for group in stage.groups:
        flat = torch.empty(group.weights.shape, device=group.weights.device)
        all_gather_single(flat, moments[group.my_weights])
        moments.update(zip(group.parameters, group.split(flat), strict=True))
    return [moments[parameter] for parameter in stage.net.parameters()]


def check(rows: list[dict], start: nn.Module) -> list[str]:
    """Assert that bytes and calls are those of the formulas, and that weights are those of DDP."""
    errors = []
    for row in rows:
        stage = row["stage"]
        for name, expected in zero_formula(stage, start, dist.get_world_size()).items():
            assert row.get(name, 0) == expected, (
                f"stage {stage}: {name} is {row.get(name)}, and must be {expected:,}"
            )
        for name in ("first_moments_error", "weights_error"):
            error = row[name]
            assert error <= TOLERANCE, (
                f"stage {stage}: {name} against DDP is {error:.0e}: this is not rounding"
            )
            errors.append(error)
    return [
        "on every rank, bytes held, calls and bytes sent are those of the formulas",
        "each stage ends with DDP's weights and first moments: "
        f"within {max(errors):.0e} (tolerance {TOLERANCE:g})",
    ]
