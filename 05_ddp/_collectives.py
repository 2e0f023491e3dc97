"""What collectives.py makes of its samples: bandwidths, a fit, predictions, and what the link could carry at most."""

from pathlib import Path

import numpy as np
import torch

from common import runtime, shapes
from common.report import for_people

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
    """Bytes that each of n ranks must send over the bytes in its buffer, as nccl-tests counts them. A ring all-reduce
    is a reduce-scatter and an all-gather; in each, a rank sends n - 1 of n chunks."""
    if n == 1:
        return 0.0
    return {"broadcast": 1.0, "send/recv": 1.0, "all-reduce": 2 * (n - 1) / n}.get(name, (n - 1) / n)


def lanes_up(device: torch.device) -> int | None:
    """The NVLink lanes of this GPU that are up; None if the driver does not say."""
    try:
        import pynvml as nv

        nv.nvmlInit()
        # by UUID, because CUDA and NVML count differently
        handle = nv.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except Exception:  # no NVML, no such GPU (AMD, a slice of one)
        return None
    lanes = 0
    for link in range(nv.NVML_NVLINK_MAX_LINKS):
        try:
            lanes += nv.nvmlDeviceGetNvLinkState(handle, link) == nv.NVML_FEATURE_ENABLED
        except nv.NVMLError:  # fewer lanes than the most a GPU can have
            break
    return lanes


def nvlink(device: torch.device, one_node: bool) -> tuple[float | None, str]:
    """Bytes/s that this GPU's NVLink lanes carry in one direction, all together, and in words; None where not known."""
    if device.type != "cuda":
        return None, "between CPU processes: no data sheet"
    if not one_node:
        return None, "between nodes: the network's peak is not known here"
    lanes = lanes_up(device)
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
    for name, config in shapes.SIZES.items():
        for dtype, bytes_each in (("fp32", 4), ("bf16", 2)):
            size = bytes_each * shapes.parameter_count(config)
            seconds = line["alpha_seconds"] + size / line["beta_bytes_per_second"]
            found.append({"model": name, "gradients": dtype, "bytes": size, "predicted_seconds": seconds})
    return found


def say_predictions(found: list[dict]) -> None:
    """What an all-reduce of each model's gradients will take, and the measured times where there are some."""
    for dtype in dict.fromkeys(p["gradients"] for p in found):
        own = [p for p in found if p["gradients"] == dtype]
        times = [f"{p['model']} {for_people('seconds', p['predicted_seconds'])}" for p in own]
        runtime.say(f"predicted, all-reduce of the gradients in {dtype}: {', '.join(times)}")
        keys = ("measured_seconds", "measured_seconds_min", "measured_seconds_max")
        seen, low, high = (for_people("seconds", own[0].get(key)) for key in keys)
        ratio = own[0]["measured_seconds"] / own[0]["predicted_seconds"]
        runtime.say(f"measured, {own[0]['model']}: {seen} ({low} to {high}), {ratio:.2f} times the prediction")


def plot(measured: list[dict], fits: dict[str, dict | None], peak: float | None, title: str, file: Path) -> None:
    """Time with its fitted line (dashed), and bus bandwidth under the peak, over size."""
    from matplotlib.figure import Figure

    left, right = Figure(figsize=(12, 4.5)).subplots(1, 2)
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
    left.figure.savefig(file, format="png", dpi=120, bbox_inches="tight")
