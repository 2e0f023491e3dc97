"""What show.py reads of this machine besides its GPUs' own facts: the host, and how each GPU reaches each other."""

import os
import platform
from pathlib import Path

import psutil
import torch

from old import hardware, nvml

# instruction sets that matter for training and are not units of one type: these are in hardware.CPU_SETS
GENERAL_SETS = {"sse2", "asimd", "neon", "avx2", "avx512f", "avx512_f", "amx_tile", "sve", "sve2", "svebf16"}
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
    cpuinfo = Path(proc, "cpuinfo")
    useful = set.union(GENERAL_SETS, *hardware.CPU_SETS.values())
    memory = psutil.virtual_memory()
    memory_limit, cores_limit = limits(proc, groups, memory.total)
    return {
        "cpu": hardware.cpu_model(cpuinfo) or platform.machine(),
        "cores_physical": psutil.cpu_count(logical=False),
        "cores_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cores_limit": cores_limit,
        "memory_total_bytes": memory.total,
        "memory_available_bytes": memory.available,
        "memory_limit_bytes": memory_limit,
        "instruction_sets": sorted(useful & hardware.cpu_instruction_sets(cpuinfo)),
        "mps": torch.backends.mps.is_available(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
    }


def limits(proc: str, groups: str, memory_total: int) -> tuple[int | None, float | None]:
    """(bytes of memory, cores) that a container or a batch system allows; None where there is no limit.

    A limit may be set on this process's control group or on any group above it, in version 1 or 2.
    """

    folders = hardware.control_groups(proc, groups)
    memory = [most for most, _ in hardware.memory_limits(folders) if most < memory_total]
    cores = []
    for file in (folder / "cpu.max" for folder in folders):
        said = file.read_text().strip() if file.is_file() else ""
        if said and not said.startswith("max"):
            quota, period = said.split()
            cores.append(int(quota) / int(period))
    return min(memory, default=None), min(cores, default=None)


def topology() -> list[list[str]] | None:
    """How each GPU reaches each other, a square matrix in the words of `nvidia-smi topo -m`: NV4 (four NVLink
    lanes), else the PCIe path PIX, PXB, PHB, NODE or SYS; X on the diagonal, "?" if unknown. None without NVML."""
    gpus, missing = nvml.gpus()
    if missing:
        return None
    bus_ids = [gpu["bus_id"] for gpu in gpus]
    count = range(len(gpus))
    return [["X" if i == j else path_between(i, j, bus_ids) for j in count] for i in count]


def path_between(i: int, j: int, bus_ids: list[str | None]) -> str:
    nv = nvml.nv
    try:
        first = nv.nvmlDeviceGetHandleByIndex(i)
        second = nv.nvmlDeviceGetHandleByIndex(j)
        ends = [nv.nvmlDeviceGetNvLinkRemotePciInfo(first, link).busId for link in nvml.links_up(first)]
        if direct := ends.count(bus_ids[j]):
            return f"NV{direct}"
        # through an NVSwitch no lane ends at the other GPU itself: it ends at the switch
        if ends and None not in bus_ids and not set(ends) & set(bus_ids) and nvml.links_up(second):
            return f"NV{min(len(ends), len(nvml.links_up(second)))}"
    except Exception:  # no NVLink to ask about: PCIe may still answer
        pass
    try:
        level = nv.nvmlDeviceGetTopologyCommonAncestor(first, second)
        return next(short for name, short in PCIE_PATHS.items() if getattr(nv, name) == level)
    except Exception:
        return "?"
