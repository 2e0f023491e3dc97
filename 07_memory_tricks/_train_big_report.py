"""The reporting side of train_big.py: the ladder, and what the steps took."""

import argparse
import statistics
import time

import torch
from _train_big_predict import RANK, qlora_flops_per_token
from torch import Tensor

from old import hardware, report, shapes
from old.metrics import MFU_CONVENTION
from old.step_cost import Memory, plot_memory

FEWEST_STEPS, FEWEST_TOKENS = 10, 16  # with fewer, chance decides whether the loss of a sequence falls
QLORA_CONVENTION = "4 FLOP per frozen weight and token, 6 per adapter's, 12·L·H·head_dim·seq_len; no recomputation"


def size_text(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


def print_ladder(tried: list[dict], memory_bytes: float) -> None:
    """Each rung with the peak that is predicted; the last one is taken."""
    rows = [["model", "tokens", "", "predicted peak, GiB", ""]]
    for row in tried:
        verdict = "fits" if row is tried[-1] else "does not fit"
        rows.append(
            [
                row["model"],
                str(row["seq_len"]),
                row["recipe"].name,
                f"{row['predicted_bytes'] / 2**30:,.2f}",
                verdict,
            ]
        )
    print(f"within {size_text(memory_bytes)}, a tenth of them left free:\n{report.table(rows)}", flush=True)


def tell(
    args: argparse.Namespace,
    tried: list[dict],
    losses: list[Tensor],
    first_batch_loss_after: Tensor,
    seconds: list[float],
    memory: Memory,
    config: shapes.Config,
    dtype: str,
    device: torch.device,
    began: float,
) -> None:
    """Say how long the steps took and how far the predicted peak was off; fail if the model has learnt nothing."""
    chosen = tried[-1]
    losses = torch.stack(losses).tolist()
    speed = None
    if seconds[1:]:  # the first step warms up
        speed = chosen["seq_len"] / statistics.median(seconds[1:])
    peak_flops = hardware.peak_flops(hardware.device_name(device), dtype)
    flops = shapes.flops_per_token(config, chosen["seq_len"])
    if args.tune == "qlora":
        flops = qlora_flops_per_token(config, RANK, chosen["seq_len"])
    error = chosen["predicted_bytes"] / memory.peak_bytes - 1
    side = "over" if error > 0 else "under"
    print(f"measured peak {memory.peak_bytes / 2**30:.2f} GiB; the predicted one is {abs(error):.1%} {side} it")
    assert memory.peak_bytes <= args.memory_bytes, "it took more than it was to stay within"
    print(f"checked: the peak is within {size_text(args.memory_bytes)}")
    before, after = losses[0], first_batch_loss_after.item()
    if len(losses) >= FEWEST_STEPS and chosen["seq_len"] >= FEWEST_TOKENS:
        assert after < before, f"the loss of the first batch has not fallen: {before}, {after}"
        print(
            f"checked: the loss of the first batch has fallen in {len(losses)} steps, from {before:.3f} to {after:.3f}"
        )
    summary = {
        "device": hardware.device_name(device),
        "world_size": 1,
        "dtype": dtype,
        "model": chosen["model"],
        "parameters": shapes.parameter_count(config),
        "steps": len(losses),
        "tokens": len(losses) * chosen["seq_len"],
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "first_batch_loss_after": after,
        "tokens_per_second": speed,
        "mfu": speed * flops / peak_flops if speed and peak_flops else None,
        "mfu_convention": QLORA_CONVENTION if args.tune == "qlora" else MFU_CONVENTION,
        "peak_memory_bytes": memory.peak_bytes,
        "seconds": time.perf_counter() - began,
        "tune": args.tune,
        "seq_len": chosen["seq_len"],
        "recipe": chosen["recipe"].name,
        "memory_bytes": round(args.memory_bytes),
        "predicted_bytes": chosen["predicted_bytes"],
        "predicted_relative_error": error,
        "ladder": [{**row, "recipe": row["recipe"].name} for row in tried],
        "plot": plot_memory({f"{chosen['model']}, {chosen['recipe'].name}": memory}, args.plot),
    }
    report.report(summary, args.json)
