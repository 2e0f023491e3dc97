"""The reporting side of ddp_from_scratch.py: who holds which weights, how much communication is hidden, one picture."""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from _ddp_from_scratch_timing import WARMUP_STEPS, Record, of_slowest_rank
from torch import nn

from old import checkpoint, hardware, report, runtime

TOLERANCE = 1e-4  # of the distance that the weights have moved: what another order of the same sums may change


@torch.no_grad()
def relative_error(net: nn.Module, one_process: nn.Module, start: nn.Module) -> float:
    """The distance from the weights that one process reached, over the distance that those have moved."""
    ours, theirs, before = (nn.utils.parameters_to_vector(n.parameters()) for n in (net, one_process, start))
    distance = torch.linalg.vector_norm(ours - theirs)
    moved = torch.linalg.vector_norm(theirs - before)
    return (distance / moved).item()


def started_in_backward(record: Record) -> int | None:
    """How many all-reduces of the last step started before the last gradient was computed; None where none is seen."""
    timeline = record.timelines[-1]
    if not timeline["all_reduces"]:
        return None
    return sum(seen["start"] < timeline["last_gradient"] for seen in timeline["all_reduces"])


def results(variants: list, records: list[Record], one_process, start: nn.Module) -> list[dict]:
    """Each variant as --json has it, complete on rank 0. Every rank must call it.

    The first one is the control: it sends nothing.

    Exposed is what a step takes longer than the control's; hidden, the rest of what the all-reduces take alone.
    """
    world_size = dist.get_world_size()
    losses = torch.stack([torch.stack(record.losses) for record in records])
    dist.all_reduce(losses)  # a rank's loss is the mean over its part, and the parts are equal
    mean_losses = (losses / world_size).tolist()
    for record in records:
        record.step_seconds = of_slowest_rank(record.step_seconds)
        record.communication_seconds = of_slowest_rank(record.communication_seconds)
    control_seconds = records[0].step_seconds[WARMUP_STEPS:]
    rows = []
    for variant, record, variant_losses in zip(variants, records, mean_losses, strict=True):
        step_seconds = record.step_seconds[WARMUP_STEPS:]
        row = {
            "name": variant.name,
            "losses": variant_losses,
            "weights_sha256": runtime.gather(checkpoint.digest(variant.net)),
            "off_one_process": relative_error(variant.net, one_process.net, start),
            "bucket_bytes": [4 * size for size in variant.bucket_sizes],
            "started_in_backward": started_in_backward(record),
            "step_seconds": report.spread(step_seconds),
            "communication_seconds": None,
            "exposed_seconds": None,
            "hidden_share": None,
        }
        if variant.bucket_sizes and world_size > 1:
            alone = report.spread(record.communication_seconds[WARMUP_STEPS:])
            pairs = zip(step_seconds, control_seconds, strict=True)
            exposed = report.spread([seconds - control for seconds, control in pairs])
            row["communication_seconds"] = alone
            row["exposed_seconds"] = exposed
            row["hidden_share"] = 1 - exposed["median"] / alone["median"]
        rows.append(row)
    return rows


def check(rows: list[dict]) -> None:
    """What the script teaches; fails where it does not hold."""
    silent, *averaged = ([*row["weights_sha256"]] for row in rows)
    world_size = len(silent)
    if world_size == 1:
        print("one rank: an all-reduce is a sum of one term, so there is nothing to hide")
    assert all(len(set(ranks)) == 1 for ranks in averaged), f"ranks hold different weights: {averaged}"
    print(f"checked: in each variant, all {world_size} ranks hold the same weights to the bit")
    if world_size > 1:
        assert len(set(silent)) == world_size, "ranks that never talk hold the same weights: they read the same data"
        print(f"checked: without communication they do not (relative error {rows[0]['off_one_process']:.0%})")
    assert averaged[1] == averaged[2], "starting the same all-reduces earlier has changed their sums"
    same = all(ranks == averaged[0] for ranks in averaged)
    if world_size <= 2:  # a + b = b + a. With three terms the order counts, and a bucket's layout decides it.
        assert same, f"a sum of {world_size} terms came out differently: {averaged}"
    print(f"checked: (1) to (4) and every bucket size give {'the same bits' if same else 'one result, up to rounding'}")
    largest = max(row["off_one_process"] for row in rows[1:])
    assert largest <= TOLERANCE, f"weights differ from those of one process by {largest:.0e}: that is no rounding"
    print(f"checked: one process with the whole batch ends there too (relative error {largest:.0e} at most)")
    for row in rows:
        early, count = row["started_in_backward"], len(row["bucket_bytes"])
        expected = count - 1 if row["name"].startswith("(3)") else 0
        assert early in (None, expected), f"{row['name']}: {early} of {count} all-reduces started in backward"


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def no_core_for_communication(link_mbit: int | None, device: torch.device) -> str | None:
    """Why no communication can be hidden here, None where it can: gloo needs a core beside each rank's own."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    cores = available_cores()
    if link_mbit or device.type == "cuda" or cores >= 2 * ranks or dist.get_world_size() == 1:
        return None
    return f"Hidden time cannot be shown here: {ranks} ranks on {cores} cores leave no core to the all-reduces."


def table(rows: list[dict], shows_hidden: bool) -> str:
    """For people."""
    letters = list(dict.fromkeys(row["weights_sha256"][0] for row in rows))
    head = ["variant", "all-reduces", "all-reduce only, ms", "step, ms", "exposed, ms (lowest to highest)"]
    head += ["hidden", "weights (same letter = identical)"] if shows_hidden else ["weights (same letter = identical)"]
    lines = [head]
    for row in rows:
        count, early = len(row["bucket_bytes"]), row["started_in_backward"]
        alone, exposed = row["communication_seconds"], row["exposed_seconds"]
        line = [
            row["name"],
            f"{count}, {early} in backward" if early else f"{count}",
            f"{alone['median'] * 1e3:.1f}" if alone else "n/a",
            f"{row['step_seconds']['median'] * 1e3:.1f}",
            spread_in_ms(exposed) if exposed else "n/a",
        ]
        if shows_hidden:
            line.append(f"{row['hidden_share']:.0%}" if alone else "n/a")
        line.append("ABCDEFGHI"[letters.index(row["weights_sha256"][0])])
        lines.append(line)
    return report.table(lines)


def spread_in_ms(seconds: dict) -> str:
    low, median, high = (seconds[name] * 1e3 for name in ("min", "median", "max"))
    return f"{median:.1f} ({low:.1f} to {high:.1f})"


def plot(variants: list, records: list[Record], title: str, file: Path) -> bool:
    """The fastest step of (1), (2) and (3) as this rank lived through it: above what it computed, below what was sent.

    False if there is no picture: without matplotlib, and on a GPU, where the times are not those of the GPU's work.
    """
    if torch.cuda.is_initialized():
        print("no picture: it shows CPU ranks; on GPUs torch.profiler records the kernels and NCCL's")
        return False
    plt = report.pyplot()
    if plt is None:
        return False
    figure, axes = plt.subplots(figsize=(9, 4.2))
    names = []
    longest = 0.0
    for place, (variant, record) in enumerate(zip(variants[1:4], records[1:4], strict=True)):
        names.append(variant.name)
        fastest = min(record.step_seconds[WARMUP_STEPS:])
        timeline = record.timelines[record.step_seconds.index(fastest)]
        start = timeline["start"]
        forward, computed = (1e3 * (timeline[moment] - start) for moment in ("forward_end", "last_gradient"))
        end = 1e3 * fastest
        longest = max(longest, end)
        top = -place
        axes.barh(top, forward, height=0.3, color="tab:blue", alpha=0.5, label="forward")
        axes.barh(top, computed - forward, left=forward, height=0.3, color="tab:blue", label="backward")
        axes.barh(top, end - computed, left=computed, height=0.3, color="lightgrey", label="only waiting")
        axes.text(end, top, f" {end:.0f} ms, {end - computed:.0f} of them waiting", va="center")
        for number, seen in enumerate(timeline["all_reduces"]):
            sent_from, sent_until = (1e3 * (seen[moment] - start) for moment in ("start", "end"))
            color = ("tab:orange", "gold")[number % 2]
            axes.barh(top - 0.32, sent_until - sent_from, left=sent_from, height=0.22, color=color, label="all-reduce")
        axes.vlines(computed, top - 0.45, top + 0.2, color="black", linestyle=":")
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), ncols=4, loc="lower center", bbox_to_anchor=(0.5, -0.32))
    axes.set_yticks([-place - 0.1 for place in range(len(names))], names)
    axes.set(xlabel="ms since the step began, on rank 0", title=title)
    axes.set_xlim(0, 1.45 * longest)  # room for the words beside the bars
    figure.savefig(file, format="png", dpi=100, bbox_inches="tight")
    plt.close(figure)
    return True


def conclude(
    args: argparse.Namespace,
    variants: list,
    records: list[Record],
    one_process,
    start: nn.Module,
    device: torch.device,
    began: float,
) -> None:
    """Say what was measured, then whether what the script teaches holds. Every rank must call it."""
    rows = results(variants, records, one_process, start)
    if not runtime.is_rank0():
        return
    reason = no_core_for_communication(args.link_mbit, device)
    link = f", a link of {args.link_mbit:,} Mbit/s between them" if args.link_mbit else ""
    world_size = dist.get_world_size()
    print(f"Medians of {args.steps} steps, of the slowest of {world_size} ranks{link}.")
    if reason:
        print(reason)
    print(table(rows, shows_hidden=reason is None))
    parameters = list(start.parameters())
    gradient_bytes = sum(parameter.nbytes for parameter in parameters)
    if args.plot:
        title = f"{args.model}, {world_size} ranks, {gradient_bytes / 2**20:.1f} MiB of gradients{link}"
        title += f"\nthe fastest of {args.steps} steps each"
        if plot(variants, records, title, args.plot):
            print(f"picture: {args.plot}")
    steps = WARMUP_STEPS + args.steps
    summary = {
        "device": hardware.device_name(device),
        "world_size": world_size,
        "dtype": "fp32",
        "model": args.model,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "steps": steps,
        "tokens": steps * args.global_batch_size * args.seq_len,
        "first_loss": rows[1]["losses"][0],
        "last_loss": rows[1]["losses"][-1],
        "peak_memory_bytes": report.peak_memory_bytes(device),
        "seconds": time.perf_counter() - began,
        "gradient_bytes": gradient_bytes,
        "warmup_steps": WARMUP_STEPS,
        "link_mbit_per_second": args.link_mbit,
        "variants": rows,
    }
    report.write_json(summary, args.json)
    check(rows)
