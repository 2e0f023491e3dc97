"""What gradient_accumulation.py checks and tells: a table for people, rows for --json, a picture."""

import argparse
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from old import hardware, report, runtime, shapes
from old.step_cost import Memory, plot_memory

TOLERANCE = {"cpu": 1e-6, "cuda": 1e-5}  # fp32: sums in another order; a GPU adds thousands one after the other


@dataclass
class Found:
    """What was measured on this rank."""

    errors: dict[str, dict[str, float]]  # of the gradient, by case and way
    usual_tokens_share: float  # of an epoch, in the loop that drops the last group
    micro_batches_by_step: list[int]
    all_reduce_bytes: dict[str, list[int]] = field(default_factory=dict)  # of each all-reduce of a step, by way
    memories: dict[int, Memory] = field(default_factory=dict)  # by the number of micro-batches
    seconds: dict[int, list[float]] = field(default_factory=dict)


def relative_error(gradients: list[Tensor], exact: list[Tensor]) -> float:
    """Of all gradients as one vector."""
    difference = torch.stack([(ours - theirs).norm() for ours, theirs in zip(gradients, exact, strict=True)]).norm()
    return (difference / torch.stack([theirs.norm() for theirs in exact]).norm()).item()


def conclude(found: Found, args: argparse.Namespace, config: shapes.Config, device: torch.device, began: float) -> None:
    """AssertionError if accumulation is not the gradient of the whole batch. Rank 0 tells."""
    largest_of_all_ranks(found.errors, device)
    rows = [describe(count, found) for count in found.memories]
    if not runtime.is_rank0():
        check(found, args.micro_batches, device.type)
        return
    print_errors(found)
    print_costs(rows)
    check(found, args.micro_batches, device.type, say=print)
    pictures = {"one batch" if count == 1 else f"{count} micro-batches": m for count, m in found.memories.items()}
    picture = plot_memory(pictures, args.plot)
    if picture is not None:
        print(f"plot: {picture}")
    summary = {
        "device": hardware.device_name(device),
        "world_size": dist.get_world_size(),
        "dtype": "fp32",
        "model": args.model,
        "parameters": shapes.parameter_count(config),
        "peak_memory_bytes": report.peak_memory_bytes(device),
        "seconds": time.perf_counter() - began,
        "seq_len": args.seq_len,
        "batch_size_per_rank": args.batch_size,
        "micro_batches": args.micro_batches,
        "gradient_relative_errors": found.errors,
        "usual_tokens_share": found.usual_tokens_share,
        "micro_batches_by_step": found.micro_batches_by_step,
        "all_reduce_bytes": found.all_reduce_bytes,
        "rows": rows,
        "plot": picture,
    }
    report.write_json(summary, args.json)


def largest_of_all_ranks(errors: dict[str, dict[str, float]], device: torch.device) -> None:
    """Each error becomes the largest of any rank: what is said holds on every rank."""
    names = [(case, way) for case, by_way in errors.items() for way in by_way]
    largest = torch.tensor([errors[case][way] for case, way in names], device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    for (case, way), error in zip(names, largest.tolist(), strict=True):
        errors[case][way] = error


def describe(count: int, found: Found) -> dict:
    """A step in so many micro-batches as --json has it."""
    ratios = [own / whole for own, whole in zip(found.seconds[count], found.seconds[1], strict=True)]
    return {
        "micro_batches": count,
        "peak_bytes": found.memories[count].peak_bytes,
        "peak_cut": 1 - found.memories[count].peak_bytes / found.memories[1].peak_bytes,
        "step_seconds": report.spread(found.seconds[count]),
        "time_ratio": report.spread(ratios),
    }


def print_errors(found: Found) -> None:
    """Relative errors of gradients."""
    rows = [["gradient of", "mean of means", "weighted by tokens"]]
    for case, errors in found.errors.items():
        mean = errors.get("mean_of_means")
        rows.append([case, "n/a" if mean is None else f"{mean:.1e}", f"{errors['accumulate']:.1e}"])
    print("\nrelative error against one forward and backward of the whole batch:\n\n" + report.table(rows))
    used, kept = found.usual_tokens_share, found.micro_batches_by_step
    print(f"\nan epoch of {sum(kept)} micro-batches, {kept[0]} a step: the usual loop uses {used:.0%} of the tokens in")
    print(f"{len(kept) - 1} steps, groups() all of them in {len(kept)} steps of {', '.join(map(str, kept))}\n")


def print_costs(rows: list[dict]) -> None:
    table = [["micro-batches", "peak of a step, MiB", "less", "time of a step, s", "time against one batch"]]
    for row in rows:
        ratio = row["time_ratio"]
        table.append(
            [
                str(row["micro_batches"]),
                f"{row['peak_bytes'] / 2**20:,.1f}",
                f"{row['peak_cut']:.1%}",
                f"{row['step_seconds']['median']:.3f}",
                f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f}, n = {ratio['n']})",
            ]
        )
    print(report.table(table) + "\n")


def check(found: Found, micro_batches: int, device_type: str, say=lambda text: None) -> None:
    largest = max(errors["accumulate"] for errors in found.errors.values())
    assert largest <= TOLERANCE[device_type], f"accumulated gradients are not those of the whole batch: {found.errors}"
    say(f"checked: weighted by tokens, gradients equal those of one batch within {largest:.0e}, on every rank")

    assert found.errors["equal lengths"]["mean_of_means"] <= TOLERANCE[device_type], found.errors
    wrong = found.errors["lengths differ"]["mean_of_means"]
    assert wrong > 1e-3, f"lengths differ, and the mean of means is right: {wrong}"
    say(f"checked: the mean of means is off by {wrong:.1%} where lengths differ")

    always, once = found.all_reduce_bytes["mean_of_means"], found.all_reduce_bytes["accumulate"]
    assert len(once) > 0
    assert always == micro_batches * once, f"all-reduces of a step: {always} without no_sync, {once} with it"
    mib = sum(once) / 2**20
    say(f"checked: {len(once)} all-reduces a step with no_sync ({mib:,.1f} MiB), {len(always)} without it")
