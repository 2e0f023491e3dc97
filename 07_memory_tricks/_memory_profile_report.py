"""What memory_profile.py tells: pieces of memory added up, two tables, a summary, a picture."""

import re
from itertools import accumulate
from pathlib import Path

from old import report

CATEGORIES = (
    "parameters",
    "buffers",
    "optimizer state",
    "batch",
    "libraries",
    "gradients",
    "weight copies",
    "activations",
    "temporaries",
)
KEPT = {  # by category, the phase at whose beginning it is complete
    "parameters": "forward",
    "optimizer state": "forward",
    "activations": "backward",
    "gradients": "update",
}
MOMENTS = {  # what the start of a phase is the end of
    "before the step": "forward",
    "end of forward": "backward",
    "end of backward": "update",
    "end of the step": "end",
}


def timelines(profile) -> dict[str, list[int]]:
    """By category, the bytes that are alive at each moment."""
    moments = len(profile.live_bytes)
    allocated_bytes = profile.allocated_bytes or profile.live_bytes
    changes = {category: [0] * (moments + 1) for category in CATEGORIES}
    for piece in profile.pieces:
        changes[piece.category][piece.born] += piece.size
        if piece.freed is not None:
            changes[piece.category][piece.freed] -= piece.size
    found = {category: list(accumulate(of_category[:moments])) for category, of_category in changes.items()}
    # what is no tensor of ours, such as the workspace of cuBLAS
    found["libraries"] = [allocated - live for allocated, live in zip(allocated_bytes, profile.live_bytes, strict=True)]
    return found


def by_module(profile) -> list[dict]:
    """What each module holds: activations are those at the end of forward, gradients those at the end of backward."""
    moments = {category: profile.phases[phase] for category, phase in KEPT.items()}
    sizes = {}
    for piece in profile.pieces:
        moment = moments.get(piece.category)
        if moment is not None and piece.born <= moment and (piece.freed is None or moment < piece.freed):
            of_module = sizes.setdefault(piece.module, dict.fromkeys(KEPT, 0))
            of_module[piece.category] += piece.size
    return [{"module": module, **of_module} for module, of_module in sizes.items()]


def peak_moment(found: dict[str, list[int]]) -> int:
    totals = [sum(sizes) for sizes in zip(*found.values(), strict=True)]
    return totals.index(max(totals))


def phase_of(moment: int, phases: dict[str, int]) -> str:
    return [phase for phase, start in phases.items() if start <= moment][-1]


def moments_to_show(found: dict[str, list[int]], phases: dict[str, int]) -> dict[str, int]:
    """By name, in the order of time."""
    peak = peak_moment(found)
    shown = {name: phases[phase] for name, phase in MOMENTS.items()}
    shown[f"peak, in {phase_of(peak, phases)}"] = peak
    return dict(sorted(shown.items(), key=lambda item: item[1]))


def mib(size: int) -> str:
    return f"{size / 2**20:,.2f}"


def print_tables(found: dict[str, list[int]], phases: dict[str, int], modules: list[dict]) -> None:
    shown = moments_to_show(found, phases)
    rows = [["MiB", *shown]]
    for category, sizes in found.items():
        if any(sizes):
            rows.append([category, *(mib(sizes[moment]) for moment in shown.values())])
    rows.append(["all", *(mib(sum(sizes[moment] for sizes in found.values())) for moment in shown.values())])
    print(report.table(rows) + "\n")

    rows = [["module", *(f"{part}, MiB" for part in KEPT)]]
    for row in merge_layers(modules):
        rows.append([row["module"], *(mib(row[part]) for part in KEPT)])
    print(report.table(rows) + "\n")


def merge_layers(modules: list[dict]) -> list[dict]:
    """The same part of all layers in one row, and nothing deeper than a part of a layer."""
    merged = {}
    for row in modules:
        name = re.sub(r"\.\d+(\.|$)", r".*\1", row["module"])
        name = ".".join(name.split(".")[:4]) or "loss"  # the outermost module computes nothing else itself
        total = merged.setdefault(name, {"module": name, **dict.fromkeys(KEPT, 0)})
        for part in KEPT:
            total[part] += row[part]
    return list(merged.values())


def summarize(found: dict[str, list[int]], phases: dict[str, int]) -> dict:
    """Bytes, each where it is largest or complete."""
    peak = peak_moment(found)
    return {
        "weight_bytes": found["parameters"][phases["forward"]],
        "gradient_bytes": found["gradients"][phases["update"]],
        "optimizer_bytes": found["optimizer state"][phases["forward"]],
        "activation_bytes": found["activations"][phases["backward"]],
        "weight_copy_bytes": found["weight copies"][phases["backward"]],
        "largest_temporary_bytes": max(found["temporaries"]),
        "library_bytes": max(found["libraries"]),
        "total_bytes": sum(sizes[peak] for sizes in found.values()),
        "peak_phase": phase_of(peak, phases),
        "moments": {
            name: {category: sizes[moment] for category, sizes in found.items()}
            for name, moment in moments_to_show(found, phases).items()
        },
    }


def plot(found: dict[str, list[int]], phases: dict[str, int], modules: list[dict], file: Path) -> str | None:
    """The categories stacked over the step; beside it what each module keeps."""
    if (pyplot := report.pyplot()) is None:
        return None
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 4.5), layout="constrained")
    colors = dict(zip(found, pyplot.get_cmap("tab10").colors, strict=False))
    stacked = {category: [size / 2**20 for size in sizes] for category, sizes in found.items() if any(sizes)}
    moments = range(len(next(iter(stacked.values()))))
    left.stackplot(
        moments, *stacked.values(), labels=list(stacked), colors=[colors[category] for category in stacked], step="post"
    )
    for phase, start in phases.items():
        left.axvline(start, color="black", linewidth=0.8)
        left.text(start, left.get_ylim()[1], f" {phase}" if phase != "end" else "", va="top", fontsize=8)
    left.set(xlabel="operators of the step, in order", ylabel="MiB")
    left.legend(loc="upper right", fontsize=8)

    rows = merge_layers(modules)[::-1]
    names = [row["module"] for row in rows]
    begin = [0.0] * len(rows)
    for part in KEPT:
        widths = [row[part] / 2**20 for row in rows]
        right.barh(names, widths, left=begin, color=colors[part], label=part)
        begin = [start + width for start, width in zip(begin, widths, strict=True)]
    right.set(xlabel="MiB, all layers together")
    right.legend(fontsize=8)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    print(f"plot: {file}")
    return str(file)
