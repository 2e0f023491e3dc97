"""Peak rates by device, from the vendors' data sheets: dense (no 2:4 sparsity), matrix units.

A name that is not here gives None and MFU prints "n/a": a share of a guessed peak is not a
measurement. Names are matched whole, as torch.cuda.get_device_name prints them, because variants
of one chip differ: an H100 PCIe reaches 76 % of the SXM part's rate.
"""

import re

import torch

# pattern: (fp32, bf16 and fp16 with fp32 accumulation) in FLOP/s, memory bandwidth in B/s, source
_TABLE: dict[str, tuple[float, float, float, str]] = {
    r"NVIDIA H200": (67e12, 989.4e12, 4.8e12, "NVIDIA H200 data sheet"),
    r"NVIDIA H100 80GB HBM3": (67e12, 989.4e12, 3.35e12, "NVIDIA H100 data sheet, SXM"),
    r"NVIDIA H100 NVL": (60e12, 835.5e12, 3.9e12, "NVIDIA H100 data sheet, NVL"),
    r"NVIDIA H100 PCIe": (51.2e12, 756e12, 2.0e12, "NVIDIA H100 PCIe product brief"),
    r"(NVIDIA )?A100-SXM4-40GB": (19.5e12, 312e12, 1.555e12, "NVIDIA A100 data sheet, SXM 40 GB"),
    r"(NVIDIA )?A100-SXM4-80GB": (19.5e12, 312e12, 2.039e12, "NVIDIA A100 data sheet, SXM 80 GB"),
    r"(NVIDIA )?A100-PCIE-40GB": (19.5e12, 312e12, 1.555e12, "NVIDIA A100 data sheet, PCIe 40 GB"),
    r"NVIDIA A100 80GB PCIe": (19.5e12, 312e12, 1.935e12, "NVIDIA A100 data sheet, PCIe 80 GB"),
    r"NVIDIA L40S": (91.6e12, 362e12, 0.864e12, "NVIDIA L40S data sheet"),
    r"NVIDIA L4": (30.3e12, 121e12, 0.3e12, "NVIDIA L4 data sheet"),
    r"NVIDIA A10": (31.2e12, 125e12, 0.6e12, "NVIDIA A10 data sheet"),
    r"NVIDIA GeForce RTX 4090": (82.6e12, 165.2e12, 1.008e12, "NVIDIA Ada architecture whitepaper"),
    r"NVIDIA GeForce RTX 3090": (35.6e12, 71e12, 0.936e12, "NVIDIA Ampere GA102 whitepaper"),
}


def device_name(device: torch.device) -> str:
    """A GPU's name as its driver gives it; else the device type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_flops(name: str, dtype: str) -> float | None:
    """FLOP/s that device `name` can reach in `dtype` (fp32, bf16, fp16); None if not in the table."""
    for pattern, (fp32, half, _, _) in _TABLE.items():
        if re.fullmatch(pattern, name):
            return fp32 if dtype == "fp32" else half
    return None


def memory_bandwidth(name: str) -> float | None:
    """Bytes per second between device `name` and its memory; None if not in the table."""
    return next((row[2] for pattern, row in _TABLE.items() if re.fullmatch(pattern, name)), None)
