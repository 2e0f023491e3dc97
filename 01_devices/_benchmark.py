"""How benchmark.py multiplies in each type, and what it makes of its rows: shares, ratios, bugs, the roofline plot."""

from collections.abc import Callable
from pathlib import Path

import _shared as machine
import torch
from torch import Tensor

from common import hardware

TYPES = {  # torch's type; the largest relative error that rounding explains
    "fp32": (torch.float32, 2**-16),  # 2^-24 per addition, thousands of them
    "tf32": (torch.float32, 2**-9),  # both operands cut to 10 bits
    "bf16": (torch.bfloat16, 2**-7),  # partial sums and result rounded to 8 bits
    "fp16": (torch.float16, 2**-10),  # to 11 bits
    "fp8": (torch.float8_e4m3fn, 2**-6),  # exact multiplications; the result is bf16
    # added up in about 14 bits all along, not only for 128 terms
    "fp8_fast": (torch.float8_e4m3fn, 2**-5),
    "int8": (torch.int8, 0.0),  # added up in int32: exact
}
LABELS = {"fp8": "fp8, use_fast_accum=False", "fp8_fast": "fp8, use_fast_accum=True"}
PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "": 1.0, "m": 1e-3, "µ": 1e-6, "n": 1e-9}


def operands(
    dtype: str, shape: tuple[int, int, int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Random x [M, K] and w [N, K]; zeros would switch fewer transistors and run at higher clocks."""
    m, n, k = shape
    if dtype == "int8":
        return tuple(
            torch.randint(-128, 128, (rows, k), device=device, dtype=torch.int8) for rows in (m, n)
        )
    return tuple(torch.randn(rows, k, device=device).to(TYPES[dtype][0]) for rows in (m, n))


def matmul(dtype: str, x: Tensor, w: Tensor) -> Callable[[], Tensor]:
    """x @ w.T on the units for `dtype`: as nn.Linear has it, and the layout that every unit takes."""
    if dtype == "int8":
        return lambda: torch._int_mm(x, w.t())
    if dtype in ("fp8", "fp8_fast"):
        one = torch.ones((), device=x.device)  # the scale of either operand
        fast = dtype == "fp8_fast"
        return lambda: torch._scaled_mm(
            x, w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast
        )
    # whatever the environment says (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 in NVIDIA's containers): fp32 means fp32
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    return lambda: x @ w.t()


def obstacle(dtype: str, device: torch.device) -> str | None:
    """Why matmuls in `dtype` are not timed; None if they are. A GPU is timed in the types that it multiplies in
    hardware, a CPU also in those that it only emulates: a type that works is not yet a type that is fast."""
    native, how = machine.native_types(device)
    # without units torch computes tf32 and fp8 in fp32, so that nothing would be measured
    if dtype.removesuffix("_fast") not in native and (
        device.type == "cuda" or dtype in ("tf32", "fp8", "fp8_fast")
    ):
        return f"no units for it ({how})"
    try:
        matmul(dtype, *operands(dtype, (64, 64, 64), device))()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def conditions(device: torch.device) -> dict:
    """What a figure has to be read with: the processor, and what the driver reports of a GPU now. None: not known."""
    gpu = machine.gpu_of(device) if device.type == "cuda" else {}
    return {"cpu": machine.cpu_fact("model name"), "cpu_threads": torch.get_num_threads(), **gpu}


def compare(rows: list[dict], name: str, sm_clock_max_mhz: float | None) -> dict[str, float]:
    """The best median of each type (FLOP/s) and of the memory (B/s). Every row gets its share of that, the data sheet's
    peak, and the limit: what no right measurement can exceed."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        row["peak"] = row["limit"] = row["peak_share"] = row["best_share"] = None
        if row["unit"] == "FLOP/s":
            dtype = row["dtype"].removesuffix("_fast")
            row["peak"] = hardware.peak_flops(name, dtype)
            row["limit"] = machine.highest_flops(name, dtype, sm_clock_max_mhz)
            if row["dtype"] == "fp8_fast" and row["limit"]:
                # GeForce cards add up fp8 in fp32 at half rate, and so the data sheet counts them
                row["limit"] = max(
                    row["limit"], machine.highest_flops(name, "int8", sm_clock_max_mhz) or 0.0
                )
            groups.setdefault(row["dtype"], []).append(row)
        elif row["kind"] == "triad":
            row["peak"] = row["limit"] = hardware.devices().get(name, {}).get("bandwidth")
            groups.setdefault("memory", []).append(row)
    best = {group: max(row["median"] for row in members) for group, members in groups.items()}
    for row in rows:
        group = row["dtype"] if row["unit"] == "FLOP/s" else "memory"
        row["best_share"] = (
            row["median"] / best[group] if row["unit"] != "s" and "flop_per_byte" in row else None
        )
        row["peak_share"] = row["median"] / row["peak"] if row["peak"] else None
        prefix, scale = next(
            (prefix, scale) for prefix, scale in PREFIXES.items() if row["median"] >= scale
        )
        median, low, high = (f"{row[key] / scale:.3g}" for key in ("median", "min", "max"))
        row["measured"] = f"{median} {prefix}{row['unit']} ({low} to {high})"
        row["type"] = LABELS.get(row["dtype"], row["dtype"] or "") + (
            "" if row.get("native", True) else " (emulated)"
        )
    return best


def ratios(rows: list[dict], best: dict[str, float]) -> dict[str, float | None]:
    """The ratios that tutorials quote, and the crossover: the size from which on the GPU takes less time, there and at
    every larger size. None: one side of it was not measured, or the GPU never wins."""
    found = {
        f"{dtype}_over_fp32": best.get(dtype) and best[dtype] / best["fp32"]
        for dtype in [*TYPES][1:5]
    }
    seconds = {
        (row["place"], row["shape"][-1]): row["median"] for row in rows if row["kind"] == "square"
    }
    gains = {
        size: seconds["cpu", size] / there
        for (place, size), there in seconds.items()
        if place == "gpu"
    }
    slower = max((size for size, gain in gains.items() if gain <= 1), default=0)
    found["crossover_size"] = min((size for size in gains if size > slower), default=None)
    found["square_1000_cpu_over_gpu"] = gains.get(1000)
    return found


def plot_roofline(rows: list[dict], best: dict[str, float], title: str, file: Path) -> str:
    """Each row that has FLOP per byte under the measured roof of its type: below the corner the memory sets the rate,
    above it the arithmetic units. Dashed: the data sheet's roof, where known."""
    try:
        from matplotlib.figure import Figure  # without pyplot: into a file only, never on a screen
    except ImportError:
        return "no picture (pip install matplotlib)"
    axes = Figure(figsize=(8, 4.5)).add_subplot(
        xlabel="FLOP per byte of memory traffic", ylabel="FLOP/s"
    )
    memory_peak = next(row["peak"] for row in rows if row["kind"] == "triad")
    for i, dtype in enumerate(dtype for dtype in best if dtype != "memory"):
        points = [row for row in rows if row["dtype"] == dtype and row.get("flop_per_byte")]
        for row in points:
            rate = row["median"] * (row["flop_per_byte"] if row["unit"] == "B/s" else 1)
            marker = "s" if row["unit"] == "B/s" else "v" if row["shape"][0] == 32 else "o"
            axes.plot(row["flop_per_byte"], rate, marker, color=f"C{i}")
        axes.plot([], [], "o", color=f"C{i}", label=points[0]["type"])
        sheet = next(row["peak"] for row in points if row["unit"] == "FLOP/s")
        for flops, bandwidth, style in (
            (best[dtype], best["memory"], "-"),
            (sheet, memory_peak, "--"),
        ):
            if flops and bandwidth:
                per_byte = [2**-4, flops / bandwidth, 2**12]
                roof = [min(flops, bandwidth * x) for x in per_byte]
                axes.plot(per_byte, roof, style, color=f"C{i}", linewidth=1)
    for marker, label in (("v", "32 rows"), ("s", "a = b + 3c")):
        axes.plot([], [], marker, color="grey", label=label)
    axes.set(xscale="log", yscale="log")
    axes.set_title(
        f"{title}: points are measured, lines their roof (dashed: the data sheet's)", fontsize=10
    )
    axes.legend(fontsize=8)
    axes.figure.savefig(file, format="png", dpi=110, bbox_inches="tight")
    return f"roofline: {file}"
