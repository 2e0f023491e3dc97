"""The reporting side of muon.py: what the optimizers hold, send and reach, and whether that is what it must be."""

import argparse
import math
import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from old import hardware, report, runtime, shapes

TOLERANCE = 1e-5  # between the losses of the sharded run and those of one process


def describe(
    name: str,
    sharded: bool,
    net: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    losses: list[float],
    batch: list[Tensor],
) -> dict:
    """A run after its last step, as --json has it. Makes one step more, to count. Every rank must call it."""
    net(*batch).backward()
    with CommDebugMode() as said:
        for optimizer in optimizers:
            optimizer.step()
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    tensors = [t.to_local() if sharded else t for state in states for t in state.values() if t.ndim]
    return {
        "optimizer": name,
        "sharded": sharded,
        "optimizer_bytes_per_rank": runtime.gather(sum(tensor.nbytes for tensor in tensors)),
        "all_gathers_per_optimizer_step": said.get_total_counts(),
        "losses": [statistics.fmean(of_ranks) for of_ranks in zip(*runtime.gather(losses), strict=True)],
    }


def check(rows: list[dict], config: shapes.Config, world_size: int) -> None:
    """What the script teaches; fails where it does not hold."""
    one_process, sharded, adamw = rows
    matrices = 7 * config.num_hidden_layers
    gathered = matrices if world_size > 1 else 0  # one rank has all rows
    calls = [row["all_gathers_per_optimizer_step"] for row in rows]
    assert calls == [0, gathered, 0], f"all-gathers in a step of the optimizer: {calls}, for {matrices} matrices"
    difference = max(abs(a / b - 1) for a, b in zip(sharded["losses"], one_process["losses"], strict=True))
    assert difference <= TOLERANCE, f"losses differ from those of one process by {difference:.0e}: that is no rounding"
    held, whole = sum(sharded["optimizer_bytes_per_rank"]), one_process["optimizer_bytes_per_rank"][0]
    assert held == whole, f"the ranks hold {held:,} bytes of Muon's state together, of {whole:,}"
    print(f"checked: sharded Muon has the losses of one process (largest difference {difference:.1g})")
    print(f"checked: {gathered} all-gathers for {matrices} matrices, and each byte of the state on one rank alone")
    lower, higher = (max(row["optimizer_bytes_per_rank"]) for row in (sharded, adamw))
    assert lower < higher, f"Muon's state of {lower:,} bytes is no smaller than AdamW's of {higher:,}"


def conclude(
    rows: list[dict],
    args: argparse.Namespace,
    config: shapes.Config,
    sequences: int,
    device: torch.device,
    began: float,
) -> None:
    """Say what was measured, then whether what the script teaches holds."""
    if not runtime.is_rank0():
        return
    world_size = dist.get_world_size()
    parameters = shapes.parameter_count(config)
    print(f"{args.model}: {parameters:,} parameters in fp32, {args.steps} steps, {world_size} ranks\n")
    lines = [["optimizer", "weights", "state per rank", "all-gathers in its step", "first loss", "last loss"]]
    for row in rows:
        lines.append(
            [
                row["optimizer"],
                "sharded" if row["sharded"] else "whole",
                f"{max(row['optimizer_bytes_per_rank']) / 2**20:.2f} MiB",
                str(row["all_gathers_per_optimizer_step"]),
                f"{row['losses'][0]:.4f}",
                f"{row['losses'][-1]:.4f}",
            ]
        )
    print(report.table(lines) + "\n")
    _, sharded, _ = rows
    assert all(math.isfinite(loss) for row in rows for loss in row["losses"])
    summary = {
        "device": hardware.device_name(device),
        "world_size": world_size,
        "dtype": "fp32",
        "model": args.model,
        "parameters": parameters,
        "steps": args.steps,
        "tokens": args.steps * sequences * args.seq_len,
        "first_loss": sharded["losses"][0],
        "last_loss": sharded["losses"][-1],
        "peak_memory_bytes": report.peak_memory_bytes(device),
        "seconds": time.perf_counter() - began,
        "rows": rows,
    }
    report.write_json(summary, args.json)
    check(rows, config, world_size)
