"""What offload.py measures of each version, tells and checks."""

import time
from argparse import Namespace
from collections.abc import Callable

import torch
from _offload_flags import DTYPES
from _offload_link import PCIE5_BYTES_PER_SECOND, describe_block, link_speed, show_break_even
from _offload_optimizer import digest
from torch import Tensor, nn

from old import hardware, report
from old.step_cost import LiveMemory, Memory, plot_memory, record_memory, time_in_turns

ROUNDS = 5
TORCHS_OWN = "torch's save_on_cpu"  # keeps a contiguous copy: other strides may give other last bits


def live_after_forward(forward: Callable[[], Tensor], held: list[Tensor], level) -> int:
    """Bytes in tensors on the device between forward and backward."""
    live = LiveMemory(held)
    with live:
        loss = forward()
        level.leave_ram()
        if loss.is_cuda:
            torch.cuda.synchronize()
            size = torch.cuda.memory_stats()["requested_bytes.all.current"]  # without the allocator's rounding
        else:
            size = live.bytes_now()
        loss.backward()
    return size


def compare_versions(
    net: nn.Module, held: list[Tensor], versions: list, forward: Callable, level
) -> tuple[list[dict], dict[str, Memory]]:
    """Memory, gradients and time of each; and memory over the step, by name."""
    device = held[0].device
    rows, memories, steps = [], {}, {}

    def step(version) -> None:
        net.zero_grad()
        forward(version).backward()

    for version in versions:
        step(version)  # libraries take their workspaces in the first
        net.zero_grad()
        level.written_bytes = 0
        memory = record_memory(lambda version=version: step(version), device, held)
        offloaded_bytes = level.written_bytes
        net.zero_grad()
        after_forward_bytes = live_after_forward(lambda version=version: forward(version), held, level)
        row = {
            "name": version.name,
            "peak_bytes": memory.peak_bytes,
            "offloaded_bytes": None if version.name == TORCHS_OWN else offloaded_bytes,  # torch does not tell
            "after_forward_bytes": after_forward_bytes,
            "gradients_sha256": digest([parameter.grad for parameter in net.parameters()]),
        }
        rows.append(row)
        memories[version.name] = memory
        steps[version.name] = lambda version=version: step(version)
    torch.use_deterministic_algorithms(False)
    seconds = time_in_turns(steps, device, ROUNDS)
    baseline = seconds[versions[0].name]
    for row in rows:
        row["step_seconds"] = report.spread(seconds[row["name"]])
        ratios = [theirs / ours for theirs, ours in zip(seconds[row["name"]], baseline, strict=True)]
        row["time_ratio"] = report.spread(ratios)
    net.zero_grad()
    return rows, memories


def mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"


def print_results(rows: list[dict], updates: list[dict]) -> None:
    cells = [["activations", "after forward, MiB", "peak, MiB", "copied out, MiB", "time against the first"]]
    for row in rows:
        ratio = row["time_ratio"]
        cells.append(
            [
                row["name"],
                mib(row["after_forward_bytes"]),
                mib(row["peak_bytes"]),
                "n/a" if row["offloaded_bytes"] is None else mib(row["offloaded_bytes"]),
                f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})",
            ]
        )
    print(report.table(cells) + "\n")

    cells = [["AdamW's state", "peak of the update, MiB", "offloaded, MiB", "update, ms"]]
    for row in updates:
        seconds = row["update_seconds"]
        cells.append(
            [
                row["name"],
                mib(row["update_peak_bytes"]),
                mib(row["offloaded_bytes"]),
                f"{seconds['median'] * 1e3:,.1f} ({seconds['min'] * 1e3:,.1f} to {seconds['max'] * 1e3:,.1f})",
            ]
        )
    print(report.table(cells) + "\n")


def check(rows: list[dict], updates: list[dict]) -> None:
    """Nothing is lost on the way, and what was copied out has left the device."""
    by_name = {row["name"]: row for row in rows}
    baseline = rows[0]
    for row in rows[1:]:
        same = row["gradients_sha256"] == baseline["gradients_sha256"]
        assert same or row["name"] == TORCHS_OWN, f"{row['name']}: other gradients"
    print("checked: offloaded and recomputed, the gradients are those of the first version to the bit")

    for without, offloaded in (
        ("on the device", "offloaded, overlapped"),
        ("recomputed", "recomputed, inputs offloaded"),
    ):
        copied = by_name[offloaded]["offloaded_bytes"]
        freed = by_name[without]["after_forward_bytes"] - by_name[offloaded]["after_forward_bytes"]
        assert freed == copied, f"{offloaded}: {copied} bytes were copied out, {freed} have left the device"
        print(f"checked: {offloaded}: all {copied:,} bytes that were copied out have left the device after forward")

    plain, streamed = updates
    assert plain["weights_sha256"] == streamed["weights_sha256"], "other weights with the state streamed"
    print("checked: with AdamW's state streamed the weights are the same to the bit after 6 updates")


def conclude(
    net: nn.Module,
    batch: list[Tensor],
    args: Namespace,
    rows: list[dict],
    memories: dict[str, Memory],
    updates: list[dict],
    level,
    began: float,
) -> None:
    """Print the tables and the proof, measure the link, and write the picture and --json."""
    device = batch[0].device
    print_results(rows, updates)
    check(rows, updates)
    speed = link_speed(level, device)
    block = describe_block(net, batch[0], DTYPES[args.dtype], speed)
    left_out = None
    link, link_from = PCIE5_BYTES_PER_SECOND, "PCIe 5.0 x16 by its specification"
    if args.link:
        link, link_from = args.link * 1e9, "--link"
    elif device.type == "cuda":
        link, link_from = speed["out"]["median"], "measured here"
    break_even = show_break_even(args.device_name, link, link_from)
    if device.type != "cuda":
        left_out = "pinned memory, streams, torch's save_on_cpu and the speed of a GPU's link: these need a CUDA GPU"
        print(f"left out: {left_out}")
    summary = {
        "device": hardware.device_name(device),
        "world_size": 1,
        "dtype": args.dtype,
        "model": args.model,
        "parameters": sum(parameter.numel() for parameter in net.parameters()),
        "peak_memory_bytes": report.peak_memory_bytes(device),
        "versions": rows,
        "updates": updates,
        "link_bytes_per_second": speed,
        "block": block,
        "break_even": break_even,
        "left_out": left_out,
        "plot": plot_memory(memories, args.plot),
        "seconds": time.perf_counter() - began,
    }
    print(f"plot: {summary['plot']}")
    report.write_json(summary, args.json)
