"""What a device can do at most: the data sheets' figures in devices.csv, and the types it multiplies in hardware.

A name that is not in the table gives None and MFU prints "n/a": a share of a guessed peak is not a measurement.
Names are matched whole, as torch.cuda.get_device_name prints them, because variants of one chip differ: an
H100 PCIe reaches 76 % of the SXM part's rate.
"""

import csv
import platform
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Peak(NamedTuple):
    """One row of devices.csv. FLOP/s by type, operations for int8, both without 2:4 sparsity: 0 is a type that the
    device has no units for, None a figure without a source."""

    fp32: float | None
    tf32: float | None
    bf16: float | None
    fp16: float | None
    fp8: float | None
    int8: float | None
    bandwidth: float | None  # bytes per second between the device and its memory
    memory: float | None  # bytes, in the sheet's own gigabytes
    tdp: float | None  # watts
    fp32_clock: float | None  # Hz, with which the sheet counts fp32
    matrix_clock: float | None  # Hz, with which it counts the other types
    source: str


# What one unit of a column is. The file has the figures as they are printed: TFLOP/s, GB/s, GB, W, MHz.
UNITS = {"bandwidth": 1e9, "memory": 1e9, "tdp": 1.0, "fp32_clock": 1e6, "matrix_clock": 1e6}


@cache
def peaks() -> dict[str, Peak]:
    """Every device in devices.csv, by name."""
    found = {}
    with Path(__file__).with_name("devices.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            names, source = row.pop("names"), row.pop("source")
            figures = {key: float(text) * UNITS.get(key, 1e12) if text else None for key, text in row.items()}
            for name in names.split(";"):
                found[name] = Peak(**figures, source=source)
    return found


def peak(name: str) -> Peak | None:
    """All figures of device `name`; None if it is not in the table."""
    return peaks().get(name)


def peak_flops(name: str, dtype: str) -> float | None:
    """FLOP/s of device `name` in `dtype` (fp32, tf32, bf16, fp16, fp8, int8) by its data sheet; None if not known."""
    found = peak(name)
    return getattr(found, dtype) or None if found else None


def highest_flops(name: str, dtype: str, sm_clock_max_mhz: float | None) -> float | None:
    """FLOP/s that a right measurement cannot exceed; None if not known.

    A data sheet counts with a boost clock, and the chip may go higher: the H100 SXM's sheet counts 1,830 MHz for
    matrix units and the driver allows 1,980, 8 % more. So this is the sheet's figure times the highest clock that
    NVML reports (`sm_clock_max_mhz`) over the clock that the sheet counts with, or the plain figure if that is
    the larger one or either clock is not known. Shares (MFU) are still taken of peak_flops.
    """
    found, flops = peak(name), peak_flops(name, dtype)
    if found is None or flops is None:
        return None
    counted = found.fp32_clock if dtype == "fp32" else found.matrix_clock
    if not counted or not sm_clock_max_mhz:
        return flops
    return flops * max(1.0, sm_clock_max_mhz * 1e6 / counted)


def memory_bandwidth(name: str) -> float | None:
    """Bytes per second between device `name` and its memory; None if not in the table."""
    found = peak(name)
    return found.bandwidth if found else None


def device_name(device: "torch.device") -> str:
    """A GPU's name as its driver gives it; else the device type."""
    if device.type != "cuda":
        return device.type
    import torch

    return torch.cuda.get_device_name(device)


def cpu_model(file: Path = Path("/proc/cpuinfo")) -> str | None:
    """The processor's name as Linux tells it, or as Python does; None if neither knows."""
    found = re.search(r"model name\s*: (.+)", file.read_text()) if file.is_file() else None
    return found[1] if found else platform.processor() or None


# the compute capability from which an NVIDIA GPU has units that multiply matrices of the type
CUDA_SINCE = {"fp32": (1, 0), "fp16": (7, 0), "int8": (7, 5), "tf32": (8, 0), "bf16": (8, 0), "fp8": (8, 9)}
# an AMD GPU's matrix units by chip: MI100, MI200, MI300, MI350, Radeon RX 7000 and 9000
AMD_TYPES = {
    "gfx908": {"fp32", "fp16", "bf16", "int8"},
    "gfx90a": {"fp32", "fp16", "bf16", "int8"},
    "gfx942": {"fp32", "tf32", "fp16", "bf16", "fp8", "int8"},
    "gfx950": {"fp32", "fp16", "bf16", "fp8", "int8"},
    "gfx1100": {"fp32", "fp16", "bf16", "int8"},
    "gfx1201": {"fp32", "fp16", "bf16", "fp8", "int8"},
}
# a CPU's instruction sets for products of the type, in Linux's names; any one of them is enough
CPU_SETS = {
    "tf32": {"amx_tf32"},
    "bf16": {"avx512_bf16", "amx_bf16", "bf16"},
    "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"},
    "fp8": {"amx_fp8"},
    "int8": {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"},
}


def cpu_instruction_sets(file: Path = Path("/proc/cpuinfo")) -> set[str]:
    """The processor's flags as Linux lists them (x86: flags, ARM: Features); without that list, as torch does."""
    lists = re.findall(r"^(?:flags|Features)\s*: (.+)", file.read_text(), re.MULTILINE) if file.is_file() else []
    if lists:
        return set(lists[0].split())
    import torch

    known = getattr(torch.cpu, "get_capabilities", dict)()  # not in torch 2.11
    return {name for name, there in known.items() if there is True}


def control_groups(proc: str = "/proc", groups: str = "/sys/fs/cgroup") -> list[Path]:
    """The folders of this process's control groups, version 1 or 2, and those above them: each may set a limit."""
    folders = []
    for line in _line(Path(proc, "self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        folders += Path(f"{groups}/{controllers}{path}", "_").parents
    return folders


def memory_limits(folders: list[Path]) -> list[tuple[int, int]]:
    """(bytes allowed, bytes taken) of each of these control groups that has a limit."""
    found = []
    for folder in folders:
        for limit, taken in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            if (most := _line(folder / limit)).isdigit():
                found.append((int(most), int(_line(folder / taken) or 0)))
    return found


def available_memory() -> int:
    """Bytes of RAM that can be had: what the computer has free, or what a container's limit leaves."""
    import psutil

    left = [most - taken for most, taken in memory_limits(control_groups())]
    return min([psutil.virtual_memory().available, *left])


def _line(file: Path) -> str:
    return file.read_text().strip() if file.is_file() else ""


def native_types(device: "torch.device") -> tuple[set[str], str]:
    """The types (fp32, tf32, bf16, fp16, fp8, int8) that `device` multiplies in hardware, and how we know.

    A type that is not here may still work: the device then computes in another one, which is slower.
    """
    import torch

    if device.type == "cuda" and torch.version.hip:  # ROCm answers with a "capability" that is not CUDA's
        chip = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        return AMD_TYPES.get(chip, {"fp32"}), f"AMD {chip}"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        found = {dtype for dtype, since in CUDA_SINCE.items() if capability >= since}
        return found, "compute capability {}.{}".format(*capability)
    if device.type == "mps":
        return {"fp32", "fp16"}, "Metal"
    here = cpu_instruction_sets()
    found = {dtype for dtype, sets in CPU_SETS.items() if sets & here}
    useful = sorted(here & set.union(*CPU_SETS.values()))
    return {"fp32"} | found, f"instruction sets {', '.join(useful)}" if useful else "no instruction set for other types"


def choose_dtype(name: str, device: "torch.device") -> str:
    """What --dtype `name` means on this device: "auto" is bf16 where that is multiplied in hardware, else fp32."""
    if name != "auto":
        return name
    return "bf16" if "bf16" in native_types(device)[0] else "fp32"
