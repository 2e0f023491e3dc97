"""What torch's caching allocator on a GPU does with the memory that tensors do not take.

It asks CUDA for segments and cuts them into blocks. A freed block stays in its segment for the next tensor that fits.
Memory is fragmented when much is free, and no free block is as large as what is asked for.
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from old import exits, report

MIB = 2**20
GROWING_SIZES = [32 * MIB * i for i in range(1, 9)]  # bytes: as when each batch is longer than the one before


def record_step(step: Callable[..., None], file: Path) -> list[dict]:
    """Run a step, write the allocator's history of it to `file`, and return its segments as forward left them."""
    at_end_of_forward = []

    def note(phase: str) -> None:
        if phase == "backward":
            at_end_of_forward.extend(torch.cuda.memory_snapshot())

    torch.cuda.memory._record_memory_history(stacks="python", max_entries=100_000)
    step(enter=note)
    torch.cuda.memory._dump_snapshot(str(file))
    torch.cuda.memory._record_memory_history(enabled=None)
    return at_end_of_forward


def fragmentation(segments: list[dict]) -> dict[str, int]:
    """In bytes: what the allocator has from CUDA, what it has given out, and the largest block that it could give."""
    free = [block["size"] for segment in segments for block in segment["blocks"] if block["state"] == "inactive"]
    reserved = sum(segment["total_size"] for segment in segments)
    allocated = sum(segment["allocated_size"] for segment in segments)
    return {
        "segments": len(segments),
        "reserved_bytes": reserved,
        "allocated_bytes": allocated,
        "unused_bytes": reserved - allocated,
        "largest_free_block_bytes": max(free, default=0),
    }


def set_allocator(settings: str) -> None:
    if hasattr(torch._C, "_accelerator_setAllocatorSettings"):  # torch 2.13, where the older name warns
        torch._C._accelerator_setAllocatorSettings(settings)
    else:
        torch.cuda.memory._set_allocator_settings(settings)


def reserved_for_growing_tensors(expandable: bool) -> int:
    """Bytes that the allocator takes from CUDA for tensors of growing sizes, each freed before the next is made.

    A free segment is too small for the next tensor, so each takes a new one. An expandable segment grows instead.
    """
    set_allocator(f"expandable_segments:{expandable}")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for size in GROWING_SIZES:
        tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
        del tensor
    taken = torch.cuda.memory_reserved() - before
    torch.cuda.empty_cache()
    # as the process was started with
    started_with = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    set_allocator(started_with or "expandable_segments:False")
    return taken


def error_at_limit(device: torch.device) -> str:
    """Allow this process 64 MiB more than it has, ask for 1 GiB, and return the line that a script would end with.

    With such a limit a process cannot take the memory of others on a shared GPU.
    """
    total = torch.cuda.get_device_properties(device).total_memory
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + 64 * MIB) / total, device)
    try:
        torch.empty(2**30, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        return exits.describe_out_of_memory(error)
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
    raise AssertionError("set_per_process_memory_fraction did not limit this process")


def show_allocator(step: Callable[..., None], device: torch.device, plot: Path) -> dict:
    """Print all of it; returns it for --json."""
    history = plot.with_name(f"{plot.stem}_snapshot.pickle")
    segments = record_step(step, history)
    found = fragmentation(segments)
    sizes = {name: report.for_people(name, size) for name, size in found.items()}
    print(
        f"at the end of forward: {sizes['reserved_bytes']} in {sizes['segments']} segments, of which "
        f"{sizes['unused_bytes']} unused, the largest free block {sizes['largest_free_block_bytes']}"
    )
    print(f"history: {history} (drop it on https://pytorch.org/memory_viz)")
    picture = draw_segments(segments, plot.with_name(f"{plot.stem}_segments.png"))

    fixed = reserved_for_growing_tensors(expandable=False)
    expandable = reserved_for_growing_tensors(expandable=True)
    print(
        f"{len(GROWING_SIZES)} tensors one after the other, the largest of {max(GROWING_SIZES) / MIB:.0f} MiB: "
        f"{fixed / MIB:,.0f} MiB reserved, with expandable_segments {expandable / MIB:,.0f} MiB"
    )
    line = error_at_limit(device)
    print(f"at a limit by set_per_process_memory_fraction a script ends with: {line}")
    return {
        "history": str(history),
        "segments_plot": picture,
        "end_of_forward": found,
        "growing_tensors_reserved_bytes": fixed,
        "growing_tensors_reserved_bytes_expandable": expandable,
        "error_at_limit": line,
    }


def draw_segments(segments: list[dict], file: Path) -> str | None:
    """Each segment as a bar: what is given out, and what is free."""
    if (pyplot := report.pyplot()) is None:
        return None
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    ordered = sorted(segments, key=lambda segment: segment["total_size"])
    for row, segment in enumerate(ordered):
        start = 0.0
        for block in segment["blocks"]:
            width = block["size"] / MIB
            color = "lightgray" if block["state"] == "inactive" else "tab:blue"
            axes.broken_barh([(start, width)], (row, 0.9), facecolors=color, edgecolor="white", linewidth=0.2)
            start += width
    axes.set(xlabel="MiB from the segment's start (blue: given out, gray: free)", ylabel="segments, the smallest first")
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    print(f"plot: {file}")
    return str(file)
