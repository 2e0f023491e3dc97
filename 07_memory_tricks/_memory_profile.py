"""For memory_profile.py: pieces of memory added up, and torch's caching allocator on a GPU.

The allocator asks CUDA for segments and cuts them into blocks. A freed block stays in its segment for the next tensor
that fits. Memory is fragmented when much is free, and no free block is as large as what is asked for.
"""

import os
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import torch

from common import report

CATEGORIES = ["parameters", "buffers", "optimizer state", "batch", "gradients", "weight copies", "activations"]
CATEGORIES += ["temporaries", "libraries"]  # the last is what no tensor of ours takes, such as the workspace of cuBLAS
MIB = 2**20
GROWING_SIZES = [32 * MIB * i for i in range(1, 9)]  # bytes: as when each batch is longer than the one before


def timelines(profile, name_of: Callable, names: list[str]) -> dict[str, list[int]]:
    """By name, the bytes that are alive at each moment."""
    moments = len(profile.live_bytes)
    changes = {name: [0] * (moments + 1) for name in names}
    for piece in profile.pieces:
        of_name = changes.setdefault(name_of(piece), [0] * (moments + 1))
        of_name[piece.born] += piece.size
        if piece.freed is not None:
            of_name[piece.freed] -= piece.size
    return {name: list(accumulate(of_name[:moments])) for name, of_name in changes.items()}


def by_category(profile) -> dict[str, list[int]]:
    found = timelines(profile, lambda piece: piece.category, CATEGORIES)
    allocated = profile.allocated_bytes or profile.live_bytes
    found["libraries"] = [all_ - live for all_, live in zip(allocated, profile.live_bytes, strict=True)]
    return found


def by_module(profile) -> dict[str, list[int]]:
    """The same part of all layers has one name, and nothing deeper than a part of a layer has one."""

    def name_of(piece) -> str:
        parts = ["*" if part.isdecimal() else part for part in piece.module.split(".")[:4]]
        return ".".join(parts)

    found = timelines(profile, name_of, [])
    found.pop("", None)  # made by no module: the batch, and what the update makes
    return found


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
    """Allow this process 64 MiB more than it has, ask for 1 GiB, and return what torch says.

    With such a limit a process cannot take the memory of others on a shared GPU.
    """
    total = torch.cuda.get_device_properties(device).total_memory
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + 64 * MIB) / total, device)
    try:
        torch.empty(2**30, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        return str(error)
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
    raise AssertionError("set_per_process_memory_fraction did not limit this process")


def show_allocator(step: Callable[..., None], device: torch.device, history: Path) -> dict:
    """Print all of it; returns it for --json."""
    history.parent.mkdir(exist_ok=True)
    found = fragmentation(record_step(step, history))
    sizes = {name: report.for_people(name, size) for name, size in found.items()}
    print(
        f"at the end of forward: {sizes['reserved_bytes']} in {sizes['segments']} segments, of which "
        f"{sizes['unused_bytes']} unused, the largest free block {sizes['largest_free_block_bytes']}"
    )
    print(f"history: {history} (drop it on https://pytorch.org/memory_viz)")
    fixed = reserved_for_growing_tensors(expandable=False)
    expandable = reserved_for_growing_tensors(expandable=True)
    print(
        f"{len(GROWING_SIZES)} tensors one after the other, the largest of {max(GROWING_SIZES) / MIB:.0f} MiB: "
        f"{fixed / MIB:,.0f} MiB reserved, with expandable_segments {expandable / MIB:,.0f} MiB"
    )
    error = error_at_limit(device)
    print(f"at a limit by set_per_process_memory_fraction: {error.splitlines()[0]}")
    return {
        "history": str(history),
        "end_of_forward": found,
        "growing_tensors_reserved_bytes": fixed,
        "growing_tensors_reserved_bytes_expandable": expandable,
        "error_at_limit": error,
    }
