"""Read and print the facts about a machine, for show.py."""

import os
import platform
import shutil
import subprocess

import _machine
import psutil
import torch

from common import hardware
from common.report import fold, print_table

HEADINGS = {
    "terabytes_per_second": "TB/s",
    "tdp_watts": "watts",
    "reference_80_gb_gpus": "80 GB GPUs",
}
COMPARED = ["NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"]


def host() -> dict:
    """Return the processor, its cores and memory, the limits of this process, and torch's build."""
    memory_limit, cores_limit = _machine.limits()
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))  # a batch system may have given only some of them
    nccl = None
    if torch.distributed.is_nccl_available():
        nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
    return {
        "cpu": _machine.cpu_fact("model name") or platform.machine(),
        "cores": cores,
        "cores_limit": cores_limit,
        "memory_total_bytes": psutil.virtual_memory().total,
        "memory_limit_bytes": memory_limit,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": hardware.cudnn_version(),
        "nccl": nccl,
    }


def topology() -> str | None:
    """Return how GPUs reach each other, in nvidia-smi's words, or None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "topo", "-m"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout if done.returncode == 0 else None


def check_agreement(gpus: list[dict], usable: list) -> int:
    """Add torch's memory to the facts of each GPU. Return how many GPUs NVML and torch both see.

    The driver, and the host of a virtual GPU, keep a part of the memory for themselves, more or
    less of it. So assert only that torch has no more than the driver. MIG slices are left out: NVML
    describes the whole card.
    """
    agreeing = 0
    for gpu in gpus:
        for properties in usable:
            if gpu["uuid"] != f"GPU-{properties.uuid}" or gpu["mig"]:
                continue
            gpu["memory_for_torch_bytes"] = properties.total_memory
            # a value that NVML does not report is None
            driver_bytes = gpu["memory_total_bytes"] or properties.total_memory
            assert properties.total_memory <= driver_bytes, (driver_bytes, properties.total_memory)
            agreeing += 1
    return agreeing


def peaks(gpus: list[dict], usable: list) -> list[dict]:
    """Return the data sheet of each GPU in this machine, and of those in COMPARED."""
    names = [gpu["name"] or "n/a" for gpu in gpus]
    names += [properties.name for properties in usable]
    names += COMPARED
    return [_data_sheet(name) for name in dict.fromkeys(names)]


def _data_sheet(name: str) -> dict:
    """Return TFLOP/s by dtype, TB/s, bytes and W. None is not known, 0 is not in hardware."""
    sheet = hardware.devices().get(name, {})
    row = {"device": name}
    for dtype in _machine.CUDA_SINCE:
        row[f"{dtype}_tflops"] = _in_tera(sheet.get(dtype))
    row["terabytes_per_second"] = _in_tera(sheet.get("bandwidth"))
    row["memory_bytes"] = sheet.get("memory")
    row["tdp_watts"] = sheet.get("tdp")
    return row


def _in_tera(value: float | None) -> float | None:
    return None if value is None else value / 1e12


# --- printing


def print_machine(
    host_facts: dict,
    gpus: list[dict],
    why_none: str | None,
    paths: str | None,
    usable: list,
) -> None:
    """Print the host, each GPU, the paths between them, and how many GPUs torch can use."""
    rows = [{"": name, "value": value} for name, value in host_facts.items()]
    print_rows("This machine", rows)
    for gpu in gpus:
        rows = [{"": name, "value": value} for name, value in gpu.items() if name != "refused"]
        print_rows(f"GPU {gpu['index']}, as the driver reports it (n/a: it does not)", rows)
    if gpus:
        print(f"Between GPUs\n\n{paths or 'n/a: nvidia-smi does not report it'}\n")

    reason = f" ({why_none})" if why_none else ""
    others = _machine.gpus_of_others(gpus)
    if others > 0:
        reason += f" ({others} more belong to other jobs)"
    build = ""
    if not torch.version.cuda and not torch.version.hip:
        build = " (this torch is built without CUDA)"
    print(fold(f"NVML sees {len(gpus)} GPUs{reason}, torch can use {len(usable)}{build}") + "\n")


def print_rows(heading: str, rows: list[dict]) -> None:
    """Print a heading and a table with a line per row."""
    lines = [[_heading(name) for name in rows[0]]]
    for row in rows:
        cells = []
        for name, value in row.items():
            cells.append(_cell(row.get("", name), value))  # a row of two has its name in ""
        lines.append(cells)
    print(f"{heading}\n")
    print_table(lines)


def _heading(name: str) -> str:
    for suffix in ("_bytes", "_tflops"):
        name = name.removesuffix(suffix)
    return HEADINGS.get(name, name.replace("_", " "))


def _cell(name: str, value: object) -> str:
    if value is None:
        return "n/a"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_item(item) for item in value) or "none"
    if isinstance(value, int | float) and name.endswith("_bytes"):
        return f"{value / 1e9:,.1f} GB"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _item(item: object) -> str:
    if isinstance(item, dict):  # a process on a GPU
        return f"{item['pid']} ({item['user'] or '?'})"
    return str(item)
