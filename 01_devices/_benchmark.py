"""Turn the figures of benchmark.py into shares, ratios, checks and the roofline plot."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import _machine
import torch

from common import hardware, report

# The largest relative error of a matmul that rounding explains.
TOLERANCES = {
    "fp32": 2**-16,  # 2^-24 per addition, and there are thousands
    "tf32": 2**-9,  # both operands are rounded to 10 bits
    "bf16": 2**-7,  # partial sums and the result are rounded to 8 bits
    "fp16": 2**-10,  # the same with 11 bits
    "fp8": 2**-6,  # multiplications are exact, the result is bf16
    "fp8_fast": 2**-5,  # sums have about 14 bits all along, and not only over 128 terms
    "int8": 0.0,  # sums in int32 are exact
}
LABELS = {"fp8": "fp8", "fp8_fast": "fp8 fast_accum"}
PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "": 1.0, "m": 1e-3, "µ": 1e-6, "n": 1e-9}
RATIOS = ("tf32", "bf16", "fp16", "fp8")  # over fp32
COLUMNS = {
    "what": "what",
    "type": "type",
    "measured": "median (lowest to highest)",
    "peak_share": "of peak",
    "best_share": "of best",
}
FACTS = ("cpu", "cpu_threads", "sm_clock_mhz", "power_watts")  # printed with the ratios
FEWEST_FLOP_PER_BYTE = 2**-4  # where the plot begins
MOST_FLOP_PER_BYTE = 2**12  # and where it ends


def make_row(
    kind: str,
    what: str,
    dtype: str | None,
    shape: Sequence[int],
    unit: str,
    values: list[float],
    **own,
) -> dict:
    """Return a row with the median, the lowest and the highest of `values`, which are in `unit`."""
    return {
        "kind": kind,
        "what": what,
        "dtype": dtype,
        "shape": list(shape),
        "unit": unit,
        "n": len(values),
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        **own,
    }


def conditions(device: torch.device) -> dict:
    """Return the processor, and what the driver reports of a GPU now. None is not known."""
    facts = {
        "cpu": _machine.cpu_fact("model name"),
        "cpu_threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        facts.update(_machine.gpu_of(device))
    return facts


# --- shares


def add_shares(rows: list[dict], name: str, sm_clock_max_mhz: float | None) -> dict[str, float]:
    """Return the best median of each dtype (FLOP/s) and of the memory (B/s).

    Every row also gets its share of that, its share of the data sheet's peak, and `limit`: the
    rate that no correct measurement can exceed. All are None where they are not known.
    """
    best = {}
    for row in rows:
        row["peak"], row["limit"] = _peak_and_limit(row, name, sm_clock_max_mhz)
        group = _group(row)
        if group is not None:
            best[group] = max(best.get(group, 0.0), row["median"])

    for row in rows:
        group = _group(row)
        row["best_share"] = None if group is None else row["median"] / best[group]
        row["peak_share"] = row["median"] / row["peak"] if row["peak"] else None
        row["measured"] = _with_range(row)
        row["type"] = LABELS.get(row["dtype"], row["dtype"] or "")
        if not row.get("native", True):
            row["type"] += " (emulated)"
    return best


def _group(row: dict) -> str | None:
    """Return what a row's rate is compared with: its dtype, the memory, or nothing."""
    if row["unit"] == "FLOP/s":
        return row["dtype"]
    if row["kind"] == "triad":
        return "memory"
    return None


def _peak_and_limit(
    row: dict, name: str, sm_clock_max_mhz: float | None
) -> tuple[float | None, float | None]:
    if row["kind"] == "triad":
        bandwidth = hardware.devices().get(name, {}).get("bandwidth")
        return bandwidth, bandwidth
    if row["unit"] != "FLOP/s":
        return None, None
    dtype = row["dtype"].removesuffix("_fast")
    peak = hardware.peak_flops(name, dtype)
    limit = _machine.highest_flops(name, dtype, sm_clock_max_mhz)
    if row["dtype"] == "fp8_fast" and limit:
        # GeForce cards add up fp8 in fp32 at half the rate, and their data sheets count that. The
        # full rate is that of int8.
        full_rate = _machine.highest_flops(name, "int8", sm_clock_max_mhz) or 0.0
        limit = max(limit, full_rate)
    return peak, limit


def _with_range(row: dict) -> str:
    """Format a row's rate or time: 193 GFLOP/s (148 to 193)."""
    prefix = next(prefix for prefix, scale in PREFIXES.items() if row["median"] >= scale)
    median = row["median"] / PREFIXES[prefix]
    low = row["min"] / PREFIXES[prefix]
    high = row["max"] / PREFIXES[prefix]
    return f"{median:.3g} {prefix}{row['unit']} ({low:.3g} to {high:.3g})"


def ratios(rows: list[dict], best: dict[str, float]) -> dict[str, float | None]:
    """Return each dtype's best rate over fp32's, and how CPU and GPU compare.

    crossover_size is the size from which on the GPU takes less time, there and at every larger
    size. A value is None if one side was not measured, or if the GPU never wins.
    """
    found = {}
    for dtype in RATIOS:
        found[f"{dtype}_over_fp32"] = best[dtype] / best["fp32"] if dtype in best else None

    seconds = {"cpu": {}, "gpu": {}}
    for row in rows:
        if row["kind"] == "square":
            size = row["shape"][-1]
            seconds[row["place"]][size] = row["median"]
    gains = {size: seconds["cpu"][size] / value for size, value in seconds["gpu"].items()}
    largest_lost = max((size for size, gain in gains.items() if gain <= 1), default=0)
    found["crossover_size"] = min((size for size in gains if size > largest_lost), default=None)
    found["square_1000_cpu_over_gpu"] = gains.get(1000)
    return found


# --- checks and printing


def check(rows: list[dict]) -> list[str]:
    """Assert that results are right and that no rate is impossible. Return what was checked."""
    dtypes = {}
    a_limit_is_known = False
    for row in rows:
        name = f"{row['type']} {row['what']}"
        if "relative_error" in row:
            error = row["relative_error"]
            assert error <= TOLERANCES[row["dtype"]], f"{name}: relative error {error:.1e}"
            dtypes[row["type"]] = True
        if row["limit"]:
            a_limit_is_known = True
            assert row["max"] <= row["limit"], (
                f"BUG in the timing: {name}: {row['max']:.4g}, at most {row['limit']:.4g}"
            )
    peaks = "no rate is above the peak"
    if not a_limit_is_known:
        peaks = "peaks of this device: not known"
    return [f"matmuls in {', '.join(dtypes)} against float64, the rest against its formula", peaks]


def print_facts(under_load: dict, all_ratios: dict, not_measured: dict[str, str]) -> None:
    """Print a line for each fact, ratio, and figure that was not measured."""
    facts = {key: under_load.get(key) for key in FACTS}
    for key, value in (facts | all_ratios).items():
        print(f"{key.replace('_', ' ')}: {report.for_people(key, value)}")
    for what, reason in not_measured.items():
        print(report.fold(f"not measured: {LABELS.get(what, what)}: {reason}"))


# --- the roofline


def plot_roofline(rows: list[dict], best: dict[str, float], title: str, file: Path) -> str:
    """Draw the roofline as a PNG. Return a line that names the file."""
    try:
        from matplotlib.figure import Figure  # not pyplot, which would want a screen
    except ImportError:
        return "no picture (pip install matplotlib)"
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    draw_roofline(axes, rows, best, [f"C{number}" for number in range(10)], "grey")
    axes.set_title(
        f"{title}: points are measured, lines their roof (dashed: the data sheet's)", fontsize=10
    )
    figure.savefig(file, format="png", dpi=144)
    return f"roofline: {file}"


def draw_roofline(
    axes,
    rows: list[dict],
    best: dict[str, float],
    colors: Sequence[str],
    quiet: str,
) -> None:
    """Draw each row that has FLOP per byte below the measured roof of its dtype.

    Left of the roof's corner the memory sets the rate, right of it the arithmetic units. The data
    sheet's roof is dashed, where it is known. `colors` are those of the dtypes, `quiet` is that of
    the symbols in the legend.
    """
    [triad] = [row for row in rows if row["kind"] == "triad"]

    dtypes = [dtype for dtype in best if dtype != "memory"]
    for number, dtype in enumerate(dtypes):
        color = colors[number]
        points = [row for row in rows if row["dtype"] == dtype and row.get("flop_per_byte")]
        for row in points:
            _draw_point(axes, row, color)
        matmuls = [row for row in points if row["unit"] == "FLOP/s"]
        axes.plot([], [], "o", color=color, label=points[0]["type"])
        _draw_roof(axes, best[dtype], best["memory"], color, "-")
        _draw_roof(axes, matmuls[0]["peak"], triad["peak"], color, "--")
    for marker, label in (("v", "32 rows"), ("s", "a = b + 3c")):
        axes.plot([], [], marker, color=quiet, label=label)

    axes.set(
        xscale="log",
        yscale="log",
        xlabel="FLOP per byte of memory traffic",
        ylabel="FLOP/s",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=9, frameon=False)


def _draw_point(axes, row: dict, color: str) -> None:
    rate = row["median"]
    marker = "o"
    if row["unit"] == "B/s":
        rate *= row["flop_per_byte"]
        marker = "s"
    elif row["shape"][0] == 32:
        marker = "v"
    axes.plot(row["flop_per_byte"], rate, marker, color=color)


def _draw_roof(axes, flops: float | None, bandwidth: float | None, color: str, style: str) -> None:
    if not flops or not bandwidth:
        return
    per_byte = [FEWEST_FLOP_PER_BYTE, flops / bandwidth, MOST_FLOP_PER_BYTE]
    roof = [min(flops, bandwidth * x) for x in per_byte]
    axes.plot(per_byte, roof, style, color=color, linewidth=1)
