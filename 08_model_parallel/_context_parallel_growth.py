"""What context_parallel.py measures as the sequence grows: memory of activations and seconds, on each rank."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from old import report, runtime, shapes
from old.step_cost import saved_for_backward, wait_for

FACTORS = (1, 2, 4)  # times --seq-len
ROUNDS = 3


def measure_growth(
    trainees: list, forward_backward: Callable, seq_len: int, config: shapes.Config, device: torch.device
) -> list[dict]:
    """A row for each length and way: the rank that holds most, and the slowest. Every rank must call it."""
    rows = []
    for length in (factor * seq_len for factor in FACTORS if factor * seq_len <= config.max_position_embeddings):
        text = torch.randint(config.vocab_size, (1, length + 1), generator=torch.Generator().manual_seed(0)).to(device)
        for trainee in trainees:
            own = measure(trainee, forward_backward, text, device)
            of_ranks = [other for other in runtime.gather(own) if other is not None]
            seconds = [max(of_round) for of_round in zip(*(other["seconds"] for other in of_ranks), strict=True)]
            rows.append(
                {
                    "seq_len": length,
                    "name": trainee.name,
                    "saved_bytes_per_rank": max(other["saved"] for other in of_ranks),
                    "seconds": report.spread(seconds),
                }
            )
    return rows


def measure(trainee, forward_backward: Callable, text: torch.Tensor, device: torch.device) -> dict | None:
    """Bytes that autograd saves for backward, weights not counted, and the seconds of each round. One process alone is
    measured on rank 0: on a CPU the others would only take its cores."""
    if trainee.order is None and not runtime.is_rank0():
        dist.barrier()
        return None

    def step() -> None:
        forward_backward(trainee, text[:, :-1], text[:, 1:], 1)

    with saved_for_backward(trainee.net) as saved:
        step()
    seconds = []
    for _ in range(ROUNDS):
        if trainee.order is not None:
            dist.barrier()
        wait_for(device)
        start = time.perf_counter()
        step()
        wait_for(device)
        seconds.append(time.perf_counter() - start)
    if trainee.order is None:
        dist.barrier()
    return {"saved": sum(saved.activations.values()), "seconds": seconds}


def growth_table(rows: list[dict]) -> str:
    lines = [["tokens", "way", "saved for backward", "of one process", "seconds (lowest to highest)"]]
    alone = {row["seq_len"]: row for row in rows if row["name"] == "one process"}
    for row in rows:
        saved = row["saved_bytes_per_rank"]
        seconds = row["seconds"]
        lines.append(
            [
                f"{row['seq_len']:,}",
                row["name"],
                f"{saved / 2**20:.1f} MiB",
                f"{saved / alone[row['seq_len']]['saved_bytes_per_rank']:.3f}",
                f"{seconds['median']:.3f} ({seconds['min']:.3f} to {seconds['max']:.3f})",
            ]
        )
    return report.table(lines)


def check_growth(rows: list[dict], world_size: int) -> None:
    """Ring attention saves 1/N of what one process does; the others save more. Scalars come on top."""
    alone = {row["seq_len"]: row["saved_bytes_per_rank"] for row in rows if row["name"] == "one process"}
    rings = [row for row in rows if row["name"].startswith("ring")]
    for row in rings:
        saved, most = row["saved_bytes_per_rank"], 1.01 * alone[row["seq_len"]] / world_size + 64
        assert saved <= most, f"{row['name']} saves {saved:,} bytes of {row['seq_len']} tokens, more than {most:,.0f}"
    if rings:
        print(f"checked: ring attention saves 1/{world_size} of what one process does")
