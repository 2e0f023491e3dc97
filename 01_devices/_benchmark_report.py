"""What benchmark.py makes of its samples: figures with their shares, ratios, verdicts, tables and the roofline plot."""

from collections import defaultdict
from pathlib import Path

import torch
from _benchmark_products import LABELS

from old import hardware, report

PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "": 1.0, "m": 1e-3, "µ": 1e-6, "n": 1e-9}
TABLES = {  # kinds of figures by the title of their table
    "Matrix products, M x N x K": ["matmul"],
    "An unfriendly width and a friendly one": ["width"],
    "Memory": ["copy", "triad"],
    "Between host and GPU": ["h2d", "d2h", "h2d_call", "d2h_call"],
    "An operation on one element": ["launch", "round_trip"],
    "Forward passes of 512 tokens x hidden 512, until the result is there": [
        "encoder_layer",
        "transformer",
        "transformer_by_default",
    ],
    "Square products, until the result is there": ["square"],
}


def figure(
    kind: str,
    what: str,
    dtype: str | None,
    shape,
    values: list[float],
    unit: str,
    *,
    peak: float | None = None,
    limit: float | None = None,
    native: bool = True,
    **more,
) -> dict:
    """A measurement: median and spread of its samples, and its share of the data sheet's peak if that is known.

    `limit` is what no right measurement can exceed: the peak, or more where the clock can be higher than its sheet's.
    """
    spread = report.spread(values)
    return {
        "kind": kind,
        "what": what,
        "dtype": dtype,
        "native": native,
        "shape": list(shape),
        **spread,
        "unit": unit,
        "peak": peak,
        "limit": limit,
        "share_of_peak": spread["median"] / peak if peak else None,
        "share_of_ceiling": None,
        **more,
    }


def ceilings(measurements: list[dict]) -> dict[str, float]:
    """The best median of each type (FLOP/s) and of the memory (B/s); gives every such figure its share of it."""
    groups = defaultdict(list)
    for f in measurements:
        if f["unit"] == "FLOP/s":
            groups[f["dtype"]].append(f)
        elif f["kind"] in ("copy", "triad"):
            groups["memory"].append(f)
    best = {name: max(f["median"] for f in group) for name, group in groups.items()}
    for name, group in groups.items():
        for f in group:
            f["share_of_ceiling"] = f["median"] / best[name]
    return best


def bugs(measurements: list[dict]) -> list[str]:
    """Every figure of which a sample is above its limit: the timing is wrong then, the hardware not fast."""
    lines = []
    for f in measurements:
        if f["limit"] and f["max"] > f["limit"]:
            rates = f"{f['max']:.4g} {f['unit']}, peak {f['peak']:.4g}, at most {f['limit']:.4g}"
            lines.append(f"{f['kind']} {f['dtype']} {f['what']}: {rates}")
    return lines


def crossover(cpu: dict[int, float], gpu: dict[int, float]) -> int | None:
    """The size from which on the GPU takes less time, there and at every larger size; None if it never does."""
    smallest = None
    for size in sorted(gpu, reverse=True):
        if gpu[size] >= cpu[size]:
            break
        smallest = size
    return smallest


def conclusions(measurements: list[dict], best: dict[str, float]) -> dict[str, float | None]:
    """The ratios that tutorials quote, and the crossover. None: one side of it was not measured."""
    times: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)  # by kind and place: seconds by size
    for f in measurements:
        if "place" in f:
            times[f["kind"], f["place"]][f["shape"][-1]] = f["median"]
    widths = [f["median"] for f in measurements if f["kind"] == "width"]  # unfriendly and friendly by turns

    def over_fp32(dtype: str) -> float | None:
        return best[dtype] / best["fp32"] if dtype in best else None

    def faster(kind: str, size: int, place: str) -> float | None:
        return times[kind, "cpu"][size] / times[kind, place][size] if times[kind, place] else None

    return {
        "tf32_over_fp32": over_fp32("tf32"),
        "bf16_over_fp32": over_fp32("bf16"),
        "fp16_over_fp32": over_fp32("fp16"),
        "fp8_over_fp32": over_fp32("fp8"),
        "encoder_layer_cpu_over_gpu": faster("encoder_layer", 512, "gpu"),
        "transformer_cpu_over_gpu": faster("transformer", 512, "gpu"),
        "transformer_by_default_cpu_over_gpu": faster("transformer_by_default", 512, "gpu"),
        "square_1000_cpu_over_gpu": faster("square", 1000, "gpu"),
        "square_1000_cpu_over_gpu_with_copies": faster("square", 1000, "gpu with copies"),
        "crossover_size": crossover(times["square", "cpu"], times["square", "gpu"]),
        "crossover_size_with_copies": crossover(times["square", "cpu"], times["square", "gpu with copies"]),
        "gain_by_padded_vocabulary": widths[1] / widths[0] - 1,
        "gain_by_even_hidden_size": widths[3] / widths[2] - 1,
    }


def print_conditions(facts: dict) -> None:
    for name, value in facts.items():
        shown = f"{value / 2**20:,.0f} MiB" if name.endswith("_bytes") else value
        print(f"{name.removesuffix('_bytes').replace('_', ' '):<22} {'n/a' if value is None else shown}", flush=True)


def type_name(f: dict) -> str:
    name = LABELS.get(f["dtype"], f["dtype"] or "")
    return name if f["native"] else f"{name} (emulated)"


def print_tables(measurements: list[dict], facts: dict[str, float | None], unseen: dict[str, str]) -> None:
    """A table for each group of kinds, the conclusions, and what was not measured."""
    for title, kinds in TABLES.items():
        group = [f for f in measurements if f["kind"] in kinds]
        rows = [["what", "type", "median", "lowest", "highest", "unit", "of peak", "of best"]]
        for f in group:
            largest = max(other["median"] for other in group if other["unit"] == f["unit"])
            prefix, scale = next((p, scale) for p, scale in PREFIXES.items() if largest >= scale)
            values = [f"{f[key] / scale:.3g}" for key in ("median", "min", "max")]
            shares = ["n/a" if f[key] is None else f"{f[key]:.0%}" for key in ("share_of_peak", "share_of_ceiling")]
            rows.append([f["what"], type_name(f), *values, prefix + f["unit"], *shares])
        if group:
            print(f"\n{title}, n = {group[0]['n']}\n{report.table(rows)}")
    rows = [[name.replace("_", " "), "n/a" if value is None else f"{value:.4g}"] for name, value in facts.items()]
    print("\n" + report.table([["ratio or size", "measured"], *rows]))
    print("\n".join(f"not measured: {LABELS.get(what, what)}: {why}" for what, why in unseen.items()))


def plot_roofline(measurements: list[dict], best: dict[str, float], name: str, file: Path) -> bool:
    """Draw each figure that has FLOP per byte under the measured roof of its type and, where known, the data sheet's.
    False without matplotlib."""
    pyplot = report.pyplot()
    if pyplot is None:
        return False
    title = f"{hardware.cpu_model()}, {torch.get_num_threads()} threads" if name == "cpu" else name
    prefix = next(p for p, scale in PREFIXES.items() if max(best.values()) >= scale)
    unit = PREFIXES[prefix]
    canvas, axes = pyplot.subplots(figsize=(8, 4.5))
    lines = "lines their roof"
    for i, dtype in enumerate(dtype for dtype in best if dtype != "memory"):
        points = [f for f in measurements if f["dtype"] == dtype and f.get("flop_per_byte")]
        for f in points:
            rate = f["median"] * (f["flop_per_byte"] if f["unit"] == "B/s" else 1) / unit
            axes.plot(f["flop_per_byte"], rate, shape_of(f), color=f"C{i}")
        axes.plot([], [], "o", color=f"C{i}", label=type_name(points[0]))
        draw_roof(axes, best[dtype] / unit, best["memory"] / unit, "-", f"C{i}")
        sheet_flops = hardware.peak_flops(name, dtype.removesuffix("_fast"))
        sheet_bandwidth = hardware.memory_bandwidth(name)
        if sheet_flops and sheet_bandwidth:
            draw_roof(axes, sheet_flops / unit, sheet_bandwidth / unit, "--", f"C{i}")
            lines = "lines their roof (dashed: the data sheet's)"
    axes.plot([], [], "v", color="grey", label="32 rows")
    axes.plot([], [], "s", color="grey", label="a = b + 3c")
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte of memory traffic", ylabel=f"{prefix}FLOP/s")
    axes.set_title(f"{title}: points are measured, {lines}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    canvas.savefig(file, format="png", dpi=110, bbox_inches="tight")
    pyplot.close(canvas)
    return True


def shape_of(f: dict) -> str:
    """matplotlib's marker for a figure: a square for memory, a triangle for few rows, a dot for other products."""
    return "s" if f["unit"] == "B/s" else "v" if f["shape"][0] == 32 else "o"


def draw_roof(axes, flops: float, bandwidth: float, style: str, color: str) -> None:
    """Below the corner at flops / bandwidth the memory sets the rate, above it the arithmetic units do."""
    per_byte = [2**-4, flops / bandwidth, 2**12]
    axes.plot(per_byte, [min(flops, bandwidth * x) for x in per_byte], style, color=color, linewidth=1)
