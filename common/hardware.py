"""Peak rates by device, from the vendors' data sheets: dense (no 2:4 sparsity), matrix units.

A name that is not here gives None and MFU prints "n/a": a share of a guessed peak is not a
measurement. Names are matched whole, as torch.cuda.get_device_name prints them, because variants
of one chip differ: an H100 PCIe reaches 76 % of the SXM part's rate.
"""

import platform
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch


class Peak(NamedTuple):
    """FLOP/s by type, operations for int8; bf16 and fp16 are alike. 0: the device has no unit for the type."""

    fp32: float
    tf32: float
    bf16: float
    fp8: float
    int8: float
    bandwidth: float  # bytes per second between the device and its memory
    source: str


# the compute capability from which a GPU has units that multiply matrices of the type
SINCE = {"fp32": (1, 0), "fp16": (7, 0), "int8": (7, 5), "tf32": (8, 0), "bf16": (8, 0), "fp8": (8, 9)}

# TFLOP/s and GB/s as the data sheets print them, halved where those count sparsity
_TABLE: dict[str, tuple[float, float, float, float, float, float, str]] = {
    r"NVIDIA H200": (67, 494.7, 989.4, 1978.9, 1978.9, 4800, "NVIDIA H200 data sheet"),
    r"NVIDIA H100 80GB HBM3": (67, 494.7, 989.4, 1978.9, 1978.9, 3350, "NVIDIA H100 data sheet, SXM"),
    r"NVIDIA H100 NVL": (60, 417.7, 835.5, 1671, 1671, 3900, "NVIDIA H100 data sheet, NVL"),
    r"NVIDIA H100 PCIe": (51.2, 378, 756, 1513, 1513, 2000, "NVIDIA H100 PCIe product brief"),
    r"(NVIDIA )?A100-SXM4-40GB": (19.5, 156, 312, 0, 624, 1555, "NVIDIA A100 data sheet, SXM 40 GB"),
    r"(NVIDIA )?A100-SXM4-80GB": (19.5, 156, 312, 0, 624, 2039, "NVIDIA A100 data sheet, SXM 80 GB"),
    r"(NVIDIA )?A100-PCIE-40GB": (19.5, 156, 312, 0, 624, 1555, "NVIDIA A100 data sheet, PCIe 40 GB"),
    r"NVIDIA A100 80GB PCIe": (19.5, 156, 312, 0, 624, 1935, "NVIDIA A100 data sheet, PCIe 80 GB"),
    r"NVIDIA L40S": (91.6, 183, 362, 733, 733, 864, "NVIDIA L40S data sheet"),
    r"NVIDIA L4": (30.3, 60, 121, 242.5, 242.5, 300, "NVIDIA L4 data sheet"),
    r"NVIDIA A10": (31.2, 62.5, 125, 0, 250, 600, "NVIDIA A10 data sheet"),
    r"NVIDIA GeForce RTX 4090": (82.6, 82.6, 165.2, 330.3, 660.6, 1008, "NVIDIA Ada architecture whitepaper"),
    r"NVIDIA GeForce RTX 3090": (35.6, 35.6, 71, 0, 284, 936, "NVIDIA Ampere GA102 whitepaper"),
}


def peak(name: str) -> Peak | None:
    """All peaks of device `name`; None if it is not in the table."""
    for pattern, (*tera, giga, source) in _TABLE.items():
        if re.fullmatch(pattern, name):
            return Peak(*(rate * 1e12 for rate in tera), giga * 1e9, source)
    return None


def device_name(device: torch.device) -> str:
    """A GPU's name as its driver gives it; else the device type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def cpu_model() -> str | None:
    """The processor's name as Linux tells it, or as Python does; None if neither knows."""
    file = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", file.read_text()) if file.exists() else None
    return found[1] if found else platform.processor() or None


CPU_UNITS = {"bf16": {"avx512_bf16", "amx_bf16", "bf16"}, "fp16": {"avx512_fp16", "amx_fp16"}}  # in /proc/cpuinfo
AMD_UNITS = {"gfx90a": {"fp32", "fp16", "bf16", "int8"}, "gfx942": {"fp32", "fp16", "bf16", "tf32", "fp8", "int8"}}


@cache
def native_types(device: torch.device) -> tuple[set[str], str]:
    """The types (fp32, tf32, bf16, fp16, fp8, int8) that this device multiplies in hardware, and how we know."""
    if device.type == "cuda" and torch.version.hip:  # ROCm answers with a "capability" that is not CUDA's
        chip = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        return AMD_UNITS.get(chip, {"fp32"}), f"AMD {chip}"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        found = {name for name, since in SINCE.items() if capability >= since}
        return found, "compute capability {}.{}".format(*capability)
    if device.type == "mps":
        return {"fp32", "fp16"}, "Metal"
    info = Path("/proc/cpuinfo")
    flags = set(re.findall(r"\w+", info.read_text() if info.exists() else "")) & set.union(*CPU_UNITS.values())
    found = {name for name, units in CPU_UNITS.items() if units & flags}
    return {"fp32", *found}, f"instruction sets for 16-bit matrices: {', '.join(sorted(flags)) or 'none'}"


def peak_flops(name: str, dtype: str) -> float | None:
    """FLOP/s that device `name` can reach in `dtype` (fp32, tf32, bf16, fp16, fp8, int8); None if not known."""
    found = peak(name)
    return (getattr(found, "bf16" if dtype == "fp16" else dtype) or None) if found else None


def memory_bandwidth(name: str) -> float | None:
    """Bytes per second between device `name` and its memory; None if not in the table."""
    found = peak(name)
    return found.bandwidth if found else None
