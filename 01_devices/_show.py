"""What show.py reads of the host and of the paths between GPUs, and how it prints."""

import os
import platform
from pathlib import Path

import _shared as machine
import psutil
import torch

from common.table import table

# instruction sets that matter for training and are not units of one type
GENERAL_SETS = {"sse2", "asimd", "neon", "avx2", "avx512f", "amx_tile", "sve", "sve2", "svebf16"}
# NVML's words for the PCIe path between two GPUs, and nvidia-smi's
PCIE_PATHS = {
    "NVML_TOPOLOGY_INTERNAL": "PIX",
    "NVML_TOPOLOGY_SINGLE": "PIX",
    "NVML_TOPOLOGY_MULTIPLE": "PXB",
    "NVML_TOPOLOGY_HOSTBRIDGE": "PHB",
    "NVML_TOPOLOGY_NODE": "NODE",
    "NVML_TOPOLOGY_SYSTEM": "SYS",
}


def host(proc: str = "/proc", groups: str = "/sys/fs/cgroup") -> dict:
    """The processor, its cores and memory with the limits of this process's control group, and torch's build."""
    memory = psutil.virtual_memory()
    memory_limit, cores_limit = machine.limits(proc, groups, memory.total)
    useful = set.union(GENERAL_SETS, *machine.CPU_SETS.values())
    return {
        "cpu": machine.cpu_model(Path(proc, "cpuinfo")) or platform.machine(),
        "cores_physical": psutil.cpu_count(logical=False),
        "cores_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cores_limit": cores_limit,
        "memory_total_bytes": memory.total,
        "memory_available_bytes": memory.available,
        "memory_limit_bytes": memory_limit,
        "instruction_sets": sorted(useful & machine.cpu_sets(Path(proc, "cpuinfo"))),
        "mps": torch.backends.mps.is_available(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
    }


def topology() -> list[list[str]] | None:
    """How each GPU reaches each other, a square matrix in the words of `nvidia-smi topo -m`: NV4 (four NVLink
    lanes), else the PCIe path PIX, PXB, PHB, NODE or SYS; X on the diagonal, "?" if unknown. None without NVML."""
    gpus, missing = machine.gpus()
    if missing:
        return None
    bus_ids = [gpu["bus_id"] for gpu in gpus]
    count = range(len(gpus))
    return [["X" if i == j else path_between(i, j, bus_ids) for j in count] for i in count]


def path_between(i: int, j: int, bus_ids: list[str | None]) -> str:
    nv = machine.nv
    try:
        first = nv.nvmlDeviceGetHandleByIndex(i)
        second = nv.nvmlDeviceGetHandleByIndex(j)
        ends = [nv.nvmlDeviceGetNvLinkRemotePciInfo(first, link).busId for link in machine.links_up(first)]
        if direct := ends.count(bus_ids[j]):
            return f"NV{direct}"
        # through an NVSwitch no lane ends at the other GPU itself: it ends at the switch
        if ends and None not in bus_ids and not set(ends) & set(bus_ids) and machine.links_up(second):
            return f"NV{min(len(ends), len(machine.links_up(second)))}"
    except Exception:  # no NVLink to ask about: PCIe may still answer
        pass
    try:
        level = nv.nvmlDeviceGetTopologyCommonAncestor(first, second)
        return next(short for name, short in PCIE_PATHS.items() if getattr(nv, name) == level)
    except Exception:
        return "?"


def print_rows(heading: str, rows: list[dict]) -> None:
    """One line for each row; bytes in GB, rates in powers of ten."""
    heads = [name.removesuffix("_bytes").replace("_", " ") for name in rows[0]]
    cells = [[_words(row.get("", name), value) for name, value in row.items()] for row in rows]
    print(f"{heading}\n\n{table([heads, *cells])}\n")


def _words(name: str, value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "n/a", True: "yes", False: "no"}[value]
    if isinstance(value, list):
        return ", ".join(f"{v['pid']} ({v['user'] or '?'})" if isinstance(v, dict) else v for v in value) or "none"
    if isinstance(value, int | float) and name.endswith("_bytes"):
        return f"{value / 1e9:,.1f} GB"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
