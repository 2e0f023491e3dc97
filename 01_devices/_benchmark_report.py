"""What benchmark.py makes of its samples: figures with their shares, ratios, verdicts, tables and the roofline plot."""

import statistics
from collections import defaultdict
from pathlib import Path

from common import hardware
from common.report import table

PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "": 1.0, "m": 1e-3, "µ": 1e-6, "n": 1e-9}
TABLES = {  # kinds of figures by the title of their table
    "Matrix products, M x N x K": ["matmul"],
    "An unfriendly width and a friendly one": ["width"],
    "Memory": ["copy", "triad"],
    "Between host and GPU": ["h2d", "d2h", "h2d_call", "d2h_call"],
    "An operation on one element": ["launch", "round_trip"],
    "Forward passes, 512 tokens x hidden 512, until the result is there": ["encoder_layer", "transformer"],
    "Square products, until the result is there": ["square"],
}


def figure(kind: str, what: str, dtype: str | None, shape, values: list[float], unit: str, peak=None, **more) -> dict:
    """A measurement: median and spread of its samples, and its share of the data sheet's peak if that is known."""
    median = statistics.median(values)
    spread = {"median": median, "min": min(values), "max": max(values), "n": len(values), "unit": unit}
    shares = {"peak": peak, "share_of_peak": median / peak if peak else None, "share_of_ceiling": None}
    return {"kind": kind, "what": what, "dtype": dtype, "shape": list(shape), **spread, **shares, **more}


def ceilings(figures: list[dict]) -> dict[str, float]:
    """The best median of each type (FLOP/s) and of the memory (B/s); gives every such figure its share of it."""
    groups = defaultdict(list)
    for f in figures:
        if f["unit"] == "FLOP/s" or f["kind"] in ("copy", "triad"):
            groups[f["dtype"] if f["unit"] == "FLOP/s" else "memory"].append(f)
    best = {name: max(f["median"] for f in group) for name, group in groups.items()}
    for name, group in groups.items():
        for f in group:
            f["share_of_ceiling"] = f["median"] / best[name]
    return best


def bugs(figures: list[dict], slack: float = 1.0) -> list[str]:
    """Every figure of which a sample is above the data sheet's peak times `slack`."""
    above = [f for f in figures if f["peak"] and f["max"] > f["peak"] * slack]
    return [f"{f['kind']} {f['dtype']} {f['what']}: {f['max']:.4g} {f['unit']}, peak {f['peak']:.4g}" for f in above]


def crossover(cpu: dict[int, float], gpu: dict[int, float]) -> int | None:
    """The size from which on the GPU takes less time, there and at every larger size; None if it never does."""
    smallest = None
    for size in sorted(gpu, reverse=True):
        if gpu[size] >= cpu[size]:
            break
        smallest = size
    return smallest


def conclusions(figures: list[dict], best: dict[str, float]) -> dict[str, float | None]:
    """The ratios that tutorials quote, and the crossover. None: one side of it was not measured."""
    times: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)  # by kind and place: seconds by size
    for f in figures:
        if "place" in f:
            times[f["kind"], f["place"]][f["shape"][-1]] = f["median"]
    widths = [f["median"] for f in figures if f["kind"] == "width"]  # unfriendly and friendly by turns

    def faster(kind: str, size: int, place: str) -> float | None:
        return times[kind, "cpu"][size] / times[kind, place][size] if times[kind, place] else None

    return {
        **{
            f"{name}_over_fp32": best[name] / best["fp32"] if name in best else None
            for name in ("tf32", "bf16", "fp16")
        },
        "encoder_layer_cpu_over_gpu": faster("encoder_layer", 512, "gpu"),
        "transformer_cpu_over_gpu": faster("transformer", 512, "gpu"),
        "square_1000_cpu_over_gpu": faster("square", 1000, "gpu"),
        "square_1000_cpu_over_gpu_with_copies": faster("square", 1000, "gpu with copies"),
        "crossover_size": crossover(times["square", "cpu"], times["square", "gpu"]),
        "crossover_size_with_copies": crossover(times["square", "cpu"], times["square", "gpu with copies"]),
        "gain_by_padded_vocabulary": widths[1] / widths[0] - 1,
        "gain_by_even_hidden_size": widths[3] / widths[2] - 1,
    }


def show(figures: list[dict], facts: dict[str, float | None], unseen: dict[str, str]) -> None:
    """Print a table for each group of kinds, the conclusions, and what was not measured."""
    for title, kinds in TABLES.items():
        group = [f for f in figures if f["kind"] in kinds]
        rows = [["what", "type", "median", "lowest", "highest", "unit", "of peak", "of ceiling"]]
        for f in group:
            largest = max(other["median"] for other in group if other["unit"] == f["unit"])
            prefix, scale = next((p, scale) for p, scale in PREFIXES.items() if largest >= scale)
            values = [f"{f[key] / scale:.3g}" for key in ("median", "min", "max")]
            shares = ["n/a" if f[key] is None else f"{f[key]:.0%}" for key in ("share_of_peak", "share_of_ceiling")]
            rows.append([f["what"], f["dtype"] or "", *values, prefix + f["unit"], *shares])
        if group:
            print(f"\n{title}, n = {group[0]['n']}\n{table(rows)}")
    rows = [[name, "n/a" if value is None else f"{value:.4g}"] for name, value in facts.items()]
    print("\n" + table([["ratio or size", "measured"], *rows]))
    print("\n".join(f"not measured: {what}: {why}" for what, why in unseen.items()))


def plot_roofline(figures: list[dict], best: dict[str, float], name: str, file: Path) -> bool:
    """Draw each figure that has FLOP per byte under the measured roof of its type and, where known, the data sheet's.
    False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, axes = pyplot.subplots(figsize=(8, 5))
    for i, dtype in enumerate(dtype for dtype in best if dtype != "memory"):
        points = [f for f in figures if f["dtype"] == dtype and f.get("flop_per_byte")]
        rates = [f["median"] * (f["flop_per_byte"] if f["unit"] == "B/s" else 1) / 1e12 for f in points]
        axes.plot([f["flop_per_byte"] for f in points], rates, "o", color=f"C{i}", label=dtype)
        sheet = (hardware.peak_flops(name, dtype), hardware.memory_bandwidth(name))
        for style, (flops, bandwidth) in (("-", (best[dtype], best["memory"])), ("--", sheet)):
            if flops and bandwidth:
                per_byte = [2**-4, flops / bandwidth, 2**14]
                roof = [min(flops, bandwidth * x) / 1e12 for x in per_byte]
                axes.plot(per_byte, roof, style, color=f"C{i}", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s")
    axes.set_title(f"{name}: the measured roof, and the data sheet's (dashed) where it is known")
    axes.legend()
    canvas.savefig(file, format="png", dpi=120, bbox_inches="tight")
    pyplot.close(canvas)
    return True
