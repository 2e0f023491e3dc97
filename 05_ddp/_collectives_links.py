"""What collectives.py makes of its samples: bandwidths, a fit, predictions, and what the link could carry at most."""

import math
from pathlib import Path

import numpy as np
import torch

from old import nvml, report, shapes
from old.report import table

MODELS = ["nano", "llama-124m", "llama-1b", "llama-8b", "llama-70b", "llama-405b"]
# Bytes/s that one NVLink lane carries in one direction, by compute capability. The generation that the driver names
# does not decide it: GA102 and GA100 both have NVLink 3. From NVIDIA's white paper of each architecture.
LANE_RATES = {
    (6, 0): 20e9,  # Pascal, P100: 4 lanes, 160 GB/s in both directions together
    (7, 0): 25e9,  # Volta, V100: 6 lanes, 300 GB/s
    (7, 5): 25e9,  # Turing, Quadro RTX 8000 and RTX 2080 Ti: 2 lanes, 100 GB/s by bridge
    (8, 0): 25e9,  # Ampere GA100, A100: 12 lanes, 600 GB/s; A30: 4 lanes, 200 GB/s by bridge
    (8, 6): 14.0625e9,  # Ampere GA102, A40, RTX A6000, A5500, A5000 and 3090: 4 lanes, 112.5 GB/s by bridge
    (9, 0): 25e9,  # Hopper, H100 and H200: 18 lanes, 900 GB/s
    (10, 0): 50e9,  # Blackwell, B200: 18 lanes, 1,800 GB/s
}


def bus_factor(name: str, n: int) -> float:
    """Bytes that each of n ranks must send over the bytes in its buffer, as nccl-tests counts them.

    A ring all-reduce is a reduce-scatter and an all-gather; in each, a rank sends n - 1 of n chunks.
    """
    if n == 1:
        return 0.0
    return {"broadcast": 1.0, "send/recv": 1.0, "all-reduce": 2 * (n - 1) / n}.get(name, (n - 1) / n)


def nvlink(device: torch.device, one_node: bool) -> tuple[float | None, str]:
    """Bytes/s that this GPU's NVLink lanes carry in one direction, all together, and in words; None where not known."""
    if device.type != "cuda":
        return None, "between CPU processes: no data sheet"
    if not one_node:
        return None, "between nodes: the network's peak is not known here"
    lanes = nvml.gpu_of(device).get("nvlinks")
    capability = torch.cuda.get_device_capability(device)
    rate = LANE_RATES.get(capability)
    if not lanes or rate is None:
        name, (major, minor) = torch.cuda.get_device_name(device), capability
        return None, f"{name}: {lanes or 'no known'} NVLink lanes, compute capability {major}.{minor}"
    return lanes * rate, f"{lanes} lanes of NVLink, {rate / 1e9:g} GB/s each in one direction"


def measurement(name: str, n: int, size: int, seconds: list[float], peak: float | None) -> dict:
    """Median and spread of the samples, and the bandwidths that the median gives."""
    median = float(np.median(seconds))
    factor = bus_factor(name, n)
    bus_rate = factor * size / median
    return {
        "collective": name,
        "bytes": size,
        "seconds_median": median,
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "samples": len(seconds),
        "bus_factor": factor,
        "algorithm_bytes_per_second": size / median,
        "bus_bytes_per_second": bus_rate,
        "share_of_peak": bus_rate / peak if peak else None,
    }


def bugs(measured: list[dict], peak: float | None) -> list[str]:
    """Samples faster than the link can be. A switch that adds up (NVLS) saves a rank half of an all-reduce: it sends
    its buffer once, so that the bus bandwidth may be above the peak; the buffer itself may not."""
    found = []
    for m in measured:
        rate = min(1.0, m["bus_factor"]) * m["bytes"] / m["seconds_min"]
        if peak and rate > peak:
            found.append(f"{m['collective']}, {m['bytes']} bytes: {rate / 1e9:.4g} GB/s, peak {peak / 1e9:.4g}")
    return found


def fit(sizes: list[int], seconds: list[float]) -> dict | None:
    """alpha and beta of t = alpha + bytes / beta; None if the times do not grow with the size.

    Least squares of the logarithms (Gauss-Newton): half and double are equally wrong, at 1 KiB as at 1 GiB. Plain
    least squares would not see the microseconds of small messages.
    """
    x, t = np.array(sizes, dtype=float), np.array(seconds)
    if len(sizes) < 3 or t[-1] <= t[0]:
        return None
    alpha, per_byte = t[0], t[-1] / x[-1]
    for _ in range(50):
        parts = np.stack([np.full_like(t, alpha), per_byte * x], axis=1)  # both stay positive: their logs are moved
        line = parts.sum(axis=1)
        step = np.linalg.lstsq(parts / line[:, None], np.log(t / line), rcond=None)[0]
        alpha, per_byte = (alpha, per_byte) * np.exp(step.clip(-1, 1))
    error_factors = np.exp(np.abs(np.log(t / line)))
    return {
        "alpha_seconds": float(alpha),
        "beta_bytes_per_second": float(1 / per_byte),
        "factor_off_median": float(np.median(error_factors)),
        "factor_off_max": float(error_factors.max()),
    }


def predictions(line: dict) -> list[dict]:
    """The all-reduce of each model's gradients, as one message, by the fitted line."""
    found = []
    for name in MODELS:
        parameters = shapes.parameter_count(shapes.SIZES[name])
        for dtype, bytes_each in (("fp32", 4), ("bf16", 2)):
            size = parameters * bytes_each
            prediction = {
                "model": name,
                "gradients": dtype,
                "bytes": size,
                "predicted_seconds": line["alpha_seconds"] + size / line["beta_bytes_per_second"],
                "measured_seconds": None,
            }
            found.append(prediction)
    return found


def size_name(size: int) -> str:
    """1 KiB, 4 MiB: the nearest power of 1,024 and what is left of it."""
    power = min(3, int(math.log(max(1, size), 1024) + 0.01))
    return f"{size / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def show(measured: list[dict], fits: dict[str, dict | None], samples: int) -> None:
    """Print every measurement, and the fitted lines."""
    rows = [["collective", "size", "median µs", "lowest", "highest", "algorithm GB/s", "bus GB/s", "share of peak"]]
    for m in sorted(measured, key=lambda m: [*fits].index(m["collective"])):
        times = [f"{m[key] * 1e6:.0f}" for key in ("seconds_median", "seconds_min", "seconds_max")]
        rates = [f"{m[key] / 1e9:.3g}" for key in ("algorithm_bytes_per_second", "bus_bytes_per_second")]
        share = "n/a" if m["share_of_peak"] is None else f"{m['share_of_peak']:.0%}"
        rows.append([m["collective"], size_name(m["bytes"]), *times, *rates, share])
    print(f"\nTime of the slowest rank, medians of {samples} samples")
    print(table(rows))

    rows = [["collective", "latency, µs", "bandwidth, GB/s", "typical error, factor", "largest error, factor"]]
    for name, line in fits.items():
        if line is None:
            rows.append([name, "n/a", "n/a", "n/a", "n/a"])
            continue
        latency = f"{line['alpha_seconds'] * 1e6:.0f}"
        bandwidth = f"{line['beta_bytes_per_second'] / 1e9:.3f}"
        errors = [f"{line[key]:.2f}" for key in ("factor_off_median", "factor_off_max")]
        rows.append([name, latency, bandwidth, *errors])
    print("\nFitted: time = latency + bytes / bandwidth")
    print(table(rows))


def show_predictions(found: list[dict]) -> None:
    """Print the predicted times, and the measured one where there is one."""
    head = ["all-reduce of the gradients of", "type", "size", "predicted s", "measured s", "lowest", "highest"]
    rows = [[*head, "measured / predicted"]]
    for p in found:
        seen = ["n/a"] * 4
        if p["measured_seconds"]:
            seen = [f"{p[key]:.4f}" for key in ("measured_seconds", "measured_seconds_min", "measured_seconds_max")]
            seen.append(f"{p['measured_seconds'] / p['predicted_seconds']:.2f}")
        rows.append([p["model"], p["gradients"], size_name(p["bytes"]), f"{p['predicted_seconds']:.4f}", *seen])
    print(f"\n{table(rows)}")


def plot(measured: list[dict], fits: dict[str, dict | None], peak: float | None, title: str, file: Path) -> bool:
    """Time with its fitted line (dashed), and bus bandwidth under the peak, over size. False without matplotlib."""
    pyplot = report.pyplot()
    if pyplot is None:
        return False
    canvas, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    for i, name in enumerate(fits):
        points = [m for m in measured if m["collective"] == name]
        sizes = np.array([m["bytes"] for m in points])
        left.plot(sizes, [m["seconds_median"] for m in points], "o", color=f"C{i}", label=name)
        right.plot(sizes, [m["bus_bytes_per_second"] / 1e9 for m in points], "o-", color=f"C{i}", label=name)
        if line := fits[name]:
            left.plot(sizes, line["alpha_seconds"] + sizes / line["beta_bytes_per_second"], "--", color=f"C{i}")
    if peak:
        right.axhline(peak / 1e9, color="black", linestyle=":", label="the link's peak")
    left.set(xscale="log", yscale="log", xlabel="bytes", ylabel="seconds", title=title)
    right.set(xscale="log", xlabel="bytes", ylabel="bus bandwidth, GB/s")
    right.legend()
    canvas.savefig(file, format="png", dpi=120, bbox_inches="tight")
    pyplot.close(canvas)
    return True
