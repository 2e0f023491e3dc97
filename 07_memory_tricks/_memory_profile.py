"""The bytes at each moment, the table and the checks of memory_profile.py."""

from collections import defaultdict
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import torch

CATEGORIES = [
    "parameters",
    "buffers",
    "optimizer state",
    "batch",
    "gradients",
    "weight copies",
    "activations",
    "temporaries",
    "libraries",  # memory of no tensor of ours, such as the workspace of cuBLAS
]
# What is alive when a phase begins.
MOMENTS = {
    "forward": "before the step",
    "backward": "end of forward",
    "update": "end of backward",
    "end": "end",
}
SNAPSHOT = Path("runs/memory_snapshot.pickle")


def write_snapshot(step: Callable[[], None]) -> None:
    """Write the CUDA allocator's history of a step."""
    SNAPSHOT.parent.mkdir(exist_ok=True)
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=100_000)
    step()
    torch.cuda.memory._dump_snapshot(str(SNAPSHOT))
    torch.cuda.memory._record_memory_history(enabled=None)
    print(f"written: {SNAPSHOT} (drop it on https://pytorch.org/memory_viz)")


# --- bytes at each moment


def timelines(profile, name_of: Callable) -> dict[str, list[int]]:
    """Return the bytes that are alive at each moment, by the name that `name_of` gives a piece."""
    moments = len(profile.live_bytes)
    changes = defaultdict(lambda: [0] * (moments + 1))
    for piece in profile.pieces:
        changes_of_name = changes[name_of(piece)]
        changes_of_name[piece.born] += piece.size
        if piece.freed is not None:
            changes_of_name[piece.freed] -= piece.size
    return {name: list(accumulate(sizes[:moments])) for name, sizes in changes.items()}


def by_category(profile) -> dict[str, list[int]]:
    """Return the bytes of each category at each moment."""
    bytes_of = timelines(profile, lambda piece: piece.category)
    allocated = profile.allocated_bytes or profile.live_bytes
    pairs = zip(allocated, profile.live_bytes, strict=True)
    bytes_of["libraries"] = [all_bytes - live_bytes for all_bytes, live_bytes in pairs]
    nothing = [0] * len(allocated)
    return {category: bytes_of.get(category, nothing) for category in CATEGORIES}


def module_of(piece) -> str:
    """Return the module of a piece. The same part of all layers has one name.

    Modules deeper than a part of a layer count as that part.
    """
    parts = piece.module.split(".")[:4]
    parts = ["*" if part.isdecimal() else part for part in parts]
    return "in " + (".".join(parts) or "no module")


def add_up(bytes_of: dict[str, list[int]]) -> list[int]:
    """Return the bytes of all names at each moment."""
    return [sum(sizes) for sizes in zip(*bytes_of.values(), strict=True)]


def peak_of(profile, bytes_of: dict[str, list[int]]) -> tuple[int, int, str]:
    """Return the bytes of the peak, its moment, and the phase that it is in."""
    totals = add_up(bytes_of)
    peak_bytes = max(totals)
    moment = totals.index(peak_bytes)
    begun = [phase for phase, start in profile.phases.items() if start <= moment]
    return peak_bytes, moment, begun[-1]


# --- the table


def columns_of(profile, peak: int, peak_phase: str) -> dict[str, int]:
    """Return the moments that the table shows, in order, by their headings."""
    moments = {MOMENTS[phase]: moment for phase, moment in profile.phases.items()}
    moments[f"peak, in {peak_phase}"] = peak
    return dict(sorted(moments.items(), key=lambda item: item[1]))


def rows_of(profile, bytes_of: dict[str, list[int]], moments: dict[str, int]) -> list[dict]:
    """Return the rows of the table: by category, of all, and once more by module."""
    named = dict(bytes_of)
    named["all"] = add_up(bytes_of)
    named.update(timelines(profile, module_of))
    rows = []
    for name, sizes in named.items():
        if any(sizes):
            row = {"name": name}
            for heading, moment in moments.items():
                row[f"{heading} bytes"] = sizes[moment]
            rows.append(row)
    return rows


# --- checks


def check(profile, bytes_of: dict[str, list[int]]) -> list[str]:
    """Assert that the categories add up, and that each has the bytes of its formula."""
    tensor_bytes = bytes_of.copy()
    library_bytes = tensor_bytes.pop("libraries")
    added = add_up(tensor_bytes)
    assert added == profile.live_bytes, "the categories do not add up to what is alive"
    assert min(library_bytes) >= 0, "tensors take more than was allocated"

    tensors = [parameter.numel() for parameter in profile.net.parameters()]
    parameters = sum(tensors)
    expected = {
        "parameters": ("forward", 4 * parameters),
        "gradients": ("update", 4 * parameters),
        "optimizer state": ("forward", 8 * parameters + 4 * len(tensors)),
    }
    for category, (phase, size) in expected.items():
        measured = bytes_of[category][profile.phases[phase]]
        assert measured == size, f"{category}: {measured} bytes, by formula {size}"

    end_of_forward = profile.phases["backward"]
    scalar = bytes_of["temporaries"][end_of_forward]
    assert scalar == 4, (
        f"{scalar} bytes are alive at the end of forward that autograd has not saved, "
        "and the loss is 4"
    )
    saved = bytes_of["activations"][end_of_forward] + bytes_of["weight copies"][end_of_forward]
    return [
        f"at each of {len(added):,} moments the categories add up to the bytes that are alive",
        f"of {parameters:,} parameters in {len(tensors)} tensors, weights and gradients take "
        "4 bytes each, AdamW's state 8 and 4 per tensor (its step count)",
        f"forward leaves {saved:,} bytes that autograd saved for backward, 4 of the loss, "
        "and nothing else",
    ]
