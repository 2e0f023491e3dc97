"""What a script shows and leaves behind: a line per record, a plot, a summary for people and for programs."""

import contextlib
import json
import re
import resource
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SUMMARY = [
    *("script", "torch", "device", "world_size", "dtype", "model", "parameters", "steps", "tokens"),
    *("first_loss", "last_loss", "val_loss", "tokens_per_second", "mfu", "peak_memory_bytes", "seconds"),
]


_peaks_before_resets: list[int] = []  # bytes


def reset_peak_memory(device: "torch.device") -> None:
    """Have torch count a GPU's peak anew. peak_memory_bytes still knows what came before."""
    import torch

    _peaks_before_resets.append(torch.cuda.max_memory_allocated(device))
    torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: "torch.device") -> int:
    """The most this process has held: allocated by torch on a GPU, else the process's resident set."""
    if device.type == "cuda":
        import torch

        return max([*_peaks_before_resets, torch.cuda.max_memory_allocated(device)])
    with contextlib.suppress(OSError, StopIteration):  # Linux: getrusage would count what had started us, too
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def report(summary: dict, json_path: Path | None) -> None:
    """Print the summary as a table for people and, if asked, write it as JSON for programs; what every script owes and
    this one does not know is null."""
    summary = write_json(summary, json_path)
    print("\n" + "\n".join(f"{name:<22} {for_people(name, value)}" for name, value in summary.items()))


def for_people(name: str, value: object) -> str:
    """A value of a summary in the unit that its name ends with: 592 MiB, 4,538 tokens/s, 34.6 s."""
    if value is None:
        return "n/a"
    if name.endswith(("_bytes", "_bytes_per_rank")):
        sizes = [size / 2**20 for size in (value if isinstance(value, list) else [value])]
        return ", ".join(f"{size:,.1f} MiB" if size < 100 else f"{size:,.0f} MiB" for size in sizes)
    if name == "tokens_per_second":
        return f"{value:,.0f} tokens/s"
    if name.endswith("seconds"):
        return f"{value:.1f} s"
    if name == "mfu":
        return f"{value:.1%}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write_json(summary: dict, json_path: Path | None) -> dict:
    """Add what every summary has, null where this script does not know it, and write it if a path is given."""
    script = "/".join(Path(sys.argv[0]).resolve().parts[-2:])
    torch_version = getattr(sys.modules.get("torch"), "__version__", None)  # estimate.py runs without it
    summary = {**dict.fromkeys(SUMMARY), "script": script, "torch": torch_version, **summary}
    if json_path:
        json_path.write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n")
    return summary


def table(rows: list[list[str]]) -> str:
    """Markdown, and readable as it stands; the first row is the head, columns of figures are right-aligned."""
    widths = [max(3, *(len(row[i]) for row in rows)) for i in range(len(rows[0]))]
    figures = [
        all(re.match(r"[-+]?[\d.]|n/a", row[i]) for row in rows[1:]) and len(rows) > 1 for i in range(len(widths))
    ]

    def line(cells: list[str]) -> str:
        padded = [c.rjust(w) if f else c.ljust(w) for c, w, f in zip(cells, widths, figures, strict=True)]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * (w - f) + ":" * f for w, f in zip(widths, figures, strict=True)]
    return "\n".join([line(rows[0]), line(rule), *map(line, rows[1:])])


def read_records(file: Path) -> list[dict]:
    """The records of a metrics.jsonl, of which each has a step."""
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [record for record in parse_records(lines) if "step" in record]


def parse_records(lines: list[bytes]) -> list[dict]:
    """The records in lines of a metrics.jsonl; those that a kill or a power cut has damaged are left out."""
    records = []
    for line in lines:
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def describe(r: dict, steps: int) -> str:
    """A record of metrics.jsonl as one line of a log."""
    parts = [
        f"step {r['step']:>6}/{steps}",
        f"loss {r['loss']:.4f}",
        f"lr {r['lr']:.2e}",
        "norm overflow" if r["grad_norm"] is None else f"norm {r['grad_norm']:.2f}",
        f"{r['tokens_per_second']:,.0f} tokens/s",
        "MFU n/a" if r["mfu"] is None else f"MFU {r['mfu']:.1%}",
        f"data {r['data_wait_share']:.1%}",
    ]
    if r["memory_active_bytes"]:
        parts.append(
            f"active {r['memory_active_bytes'] / 2**30:.2f}, reserved {r['memory_reserved_bytes'] / 2**30:.2f} GiB"
        )
    if r["slowest_rank"] is not None:
        parts.append(f"slowest rank {r['slowest_rank']} +{r['slowest_rank_lag']:.0%}")
    if r["skipped_steps"]:
        parts.append(f"{r['skipped_steps']} skipped, scale {r['loss_scale']:g}")
    return " | ".join(parts)


def spread(values: list[float]) -> dict[str, float | int | None]:
    """median, min, max and n of measurements; None where there are none."""
    if not values:
        return {"median": None, "min": None, "max": None, "n": 0}
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def pyplot():
    """matplotlib.pyplot drawing into files only, never on a screen; None, and a line, without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        from old.runtime import say

        say("no picture (pip install matplotlib)")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot_loss(records: list[dict], file: Path, unit: str) -> str | None:
    """Draw training and held-out loss over steps; returns the file's name, None without matplotlib."""
    if (plt := pyplot()) is None:
        return None
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, style in (("loss", "-"), ("val_loss", "o")):
        points = [(r["step"], r[name]) for r in records if name in r]
        axes.plot(*zip(*points, strict=True), style, label=name) if points else None
    axes.set(xlabel="step", ylabel=unit)
    axes.legend()
    figure.savefig(file, dpi=120, bbox_inches="tight")
    plt.close(figure)
    return str(file)
