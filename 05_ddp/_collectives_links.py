"""What collectives.py makes of its samples: bandwidths, a fit, predictions, and what the link could carry at most."""

import math
from pathlib import Path

import numpy as np
import torch

from common import model, nvml
from common.report import table

MODELS = ["nano", "llama-124m", "llama-1b", "llama-8b", "llama-70b"]
# bytes/s of one lane in one direction, by NVLink generation as the driver names it
LANE = {"1.0": 20e9, "2.0": 25e9, "2.2": 25e9, "3.0": 25e9, "4.0": 25e9, "5.0": 50e9}


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
    uuid, name = str(torch.cuda.get_device_properties(device).uuid), torch.cuda.get_device_name(device)
    gpu = next((g for g in nvml.gpus()[0] if (g["uuid"] or "").endswith(uuid)), {})
    lanes, generation = gpu.get("nvlinks"), gpu.get("nvlink_version")
    if not lanes or generation not in LANE or "RTX" in name:  # workstation cards run the same lanes more slowly
        return None, f"{name}: {lanes or 'no known'} NVLink lanes, generation {generation or 'n/a'}"
    return lanes * LANE[generation], f"{lanes} lanes of NVLink {generation}, each {LANE[generation] / 1e9:g} GB/s"


def measurement(name: str, n: int, size: int, seconds: list[float], peak: float | None) -> dict:
    """Median and spread of the samples, and the bandwidths that the median gives."""
    median, factor = float(np.median(seconds)), bus_factor(name, n)
    return {
        **{"collective": name, "bytes": size, "seconds_median": median, "seconds_min": min(seconds)},
        **{"seconds_max": max(seconds), "samples": len(seconds), "bus_factor": factor},
        "algorithm_bytes_per_second": size / median,
        "bus_bytes_per_second": factor * size / median,
        "share_of_peak": factor * size / median / peak if peak else None,
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
    off = np.exp(np.abs(np.log(t / line)))
    quality = {"factor_off_median": float(np.median(off)), "factor_off_max": float(off.max())}
    return {"alpha_seconds": float(alpha), "beta_bytes_per_second": float(1 / per_byte), **quality}


def predictions(line: dict) -> list[dict]:
    """The all-reduce of each model's gradients, as one message, by the fitted line."""
    found = []
    for name in MODELS:
        with torch.device("meta"):
            parameters = sum(p.numel() for p in model.Transformer(model.SIZES[name]).parameters())
        for dtype in (torch.float32, torch.bfloat16):
            size = parameters * dtype.itemsize
            seconds = line["alpha_seconds"] + size / line["beta_bytes_per_second"]
            known = {"model": name, "gradients": "fp32" if dtype == torch.float32 else "bf16", "bytes": size}
            found.append({**known, "predicted_seconds": seconds, "measured_seconds": None})
    return found


def size_name(size: int) -> str:
    """1 KiB, 4 MiB: the nearest power of 1,024 and what is left of it."""
    power = min(3, int(math.log(max(1, size), 1024) + 0.01))
    return f"{size / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def show(measured: list[dict], fits: dict[str, dict | None], samples: int) -> None:
    """Print every measurement, and the fitted lines."""
    rows = [["collective", "size", "median µs", "lowest", "highest", "algorithm GB/s", "bus GB/s", "of peak"]]
    for m in sorted(measured, key=lambda m: [*fits].index(m["collective"])):
        times = [f"{m[key] * 1e6:.0f}" for key in ("seconds_median", "seconds_min", "seconds_max")]
        rates = [f"{m[key] / 1e9:.3g}" for key in ("algorithm_bytes_per_second", "bus_bytes_per_second")]
        share = "n/a" if m["share_of_peak"] is None else f"{m['share_of_peak']:.0%}"
        rows.append([m["collective"], size_name(m["bytes"]), *times, *rates, share])
    print(f"\nTime of the slowest rank, n = {samples}\n{table(rows)}\n\nFitted: time = alpha + bytes / beta")
    rows = [["collective", "alpha µs", "beta GB/s", "off by a factor of", "at most"]]
    for name, line in fits.items():
        values = ["n/a"] * 4
        if line:
            values = [f"{line['alpha_seconds'] * 1e6:.0f}", f"{line['beta_bytes_per_second'] / 1e9:.3f}"]
            values += [f"{line[f'factor_off_{which}']:.2f}" for which in ("median", "max")]
        rows.append([name, *values])
    print(table(rows))


def show_predictions(found: list[dict]) -> None:
    """Print the predicted times, and the measured one where there is one."""
    rows = [
        [
            "all-reduce of the gradients of",
            "type",
            "size",
            "predicted s",
            "measured s",
            "lowest",
            "highest",
            "of predicted",
        ]
    ]
    for p in found:
        seen = ["n/a"] * 4
        if p["measured_seconds"]:
            seen = [f"{p[f'measured_seconds{which}']:.4f}" for which in ("", "_min", "_max")]
            seen.append(f"{p['measured_seconds'] / p['predicted_seconds']:.2f}")
        rows.append([p["model"], p["gradients"], size_name(p["bytes"]), f"{p['predicted_seconds']:.4f}", *seen])
    print(f"\n{table(rows)}")


def plot(measured: list[dict], fits: dict[str, dict | None], peak: float | None, title: str, file: Path) -> bool:
    """Time with its fitted line (dashed), and bus bandwidth under the peak, over size. False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

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
