"""Measure and check the optimizers of muon.py."""

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from common import measure, runtime

TOLERANCE = 1e-5  # relative, between the losses of the sharded run and those of one process
COLUMNS = {
    "optimizer": "optimizer",
    "weights": "weights",
    "most_optimizer_bytes": "state per rank",
    "all_gathers_per_optimizer_step": "all-gathers in its step",
    "optimizer_sent_bytes": "sent per rank",
    "optimizer_seconds": "its step",
    "first_loss": "first loss",
    "last_loss": "last loss",
}


def losses_of_global_batch(losses: list[float]) -> dict:
    """Return the mean over the ranks of the loss of each step. Every rank must call this."""
    losses_of_ranks = runtime.all_gather(losses)
    table = torch.tensor(losses_of_ranks, dtype=torch.float64)  # [ranks, steps]
    mean_losses = table.mean(0).tolist()  # the shares of the ranks are equal
    return {"losses": mean_losses, "first_loss": mean_losses[0], "last_loss": mean_losses[-1]}


def state_bytes(optimizers: list[torch.optim.Optimizer]) -> dict:
    """Return the bytes of the moments that each rank holds. Every rank must call this."""
    own_bytes = 0
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for tensor in state.values():
                if tensor.ndim == 0:  # the number of steps
                    continue
                own_bytes += runtime.local_shard(tensor).nbytes
    bytes_per_rank = runtime.all_gather(own_bytes)
    return {
        "optimizer_bytes_per_rank": bytes_per_rank,
        "most_optimizer_bytes": max(bytes_per_rank),
    }


class StepMeter:
    """Count the messages of the first optimizer step, and time all others.

    Counting makes a step slower, and the first step allocates the optimizer state.
    """

    def __init__(self) -> None:
        self.sent: measure.Traffic | None = None
        self.seconds: list[float] = []

    @contextmanager
    def step(self, device: torch.device) -> Iterator[None]:
        """Count or time the optimizer step in the with block."""
        if self.sent is None:
            with measure.Traffic() as self.sent:
                yield
            return
        runtime.synchronize(device)
        start = time.perf_counter()
        yield
        runtime.synchronize(device)
        self.seconds.append(time.perf_counter() - start)

    def results(self) -> dict:
        """Return the collectives of a step, the bytes this rank sends in it, and its seconds."""
        results = {
            "all_gathers_per_optimizer_step": sum(self.sent.calls.values()),
            "optimizer_sent_bytes": round(sum(self.sent.bytes_sent.values())),
            "optimizer_seconds": None,
        }
        if self.seconds:
            results["optimizer_seconds"] = statistics.median(self.seconds)
            results["min_optimizer_seconds"] = min(self.seconds)
            results["max_optimizer_seconds"] = max(self.seconds)
        return results


def check(rows: list[dict], matrices: int, world_size: int) -> list[str]:
    """Assert that sharded Muon trains as one process does, and what it sends and holds."""
    one_process, sharded, adamw = rows
    gathers = matrices
    if world_size == 1:  # the only rank has all rows
        gathers = 0
    calls = [row["all_gathers_per_optimizer_step"] for row in rows]
    assert calls == [0, gathers, 0], (
        f"all-gathers in an optimizer step: {calls}, for {matrices} matrices"
    )

    differences = []
    for loss, expected in zip(sharded["losses"], one_process["losses"], strict=True):
        assert math.isclose(loss, expected, rel_tol=TOLERANCE), (
            f"a loss is {loss}, and {expected} in one process: this is not rounding"
        )
        differences.append(abs(loss - expected))

    held = sum(sharded["optimizer_bytes_per_rank"])
    full = one_process["most_optimizer_bytes"]
    assert held == full, f"together the ranks hold {held:,} bytes of state, not {full:,}"
    muon_bytes = sharded["most_optimizer_bytes"]
    adamw_bytes = adamw["most_optimizer_bytes"]
    assert muon_bytes < adamw_bytes, (
        f"Muon's state of {muon_bytes:,} bytes is not smaller than AdamW's of {adamw_bytes:,}"
    )
    return [
        f"sharded Muon has the losses of one process (largest difference {max(differences):.1g})",
        f"{gathers} all-gathers for {matrices} matrices, and each byte of the state is on one rank",
    ]
