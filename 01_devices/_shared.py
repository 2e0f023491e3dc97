"""What the lessons of this chapter read of a machine: each GPU's facts through NVML, the limits of a container, and the
types that a device multiplies in hardware.

Every NVML query may fail alone: a virtual machine hides clocks, an old driver lacks a function. A value that the driver
does not report is None, and the driver's error text is in `refused`; nothing here raises.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from common.hardware import devices, peak_flops

try:
    import pynvml as nv
except ImportError:  # nvidia-ml-py
    nv = None

# Why the clocks are below their maximum, and NVML's name of it; idleness and the user's own setting do not count.
THROTTLE_REASONS = {
    "power cap": "nvmlClocksThrottleReasonSwPowerCap",
    "hardware slowdown": "nvmlClocksThrottleReasonHwSlowdown",
    "thermal, software": "nvmlClocksThrottleReasonSwThermalSlowdown",
    "thermal, hardware": "nvmlClocksThrottleReasonHwThermalSlowdown",
    "power brake": "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
}


def gpus() -> tuple[list[dict], str | None]:
    """One dict per GPU in the order of the bus, CUDA_VISIBLE_DEVICES not applied; and, if there are none, why."""
    if nv is None:
        return [], "the module pynvml is missing (pip install nvidia-ml-py)"
    try:
        nv.nvmlInit()
        count = nv.nvmlDeviceGetCount()
    except Exception as error:  # a half-installed driver fails in ways that are no NVMLError
        return [], f"no NVIDIA driver that answers: {_words(error)}"
    found = []
    for index in range(count):
        try:
            facts = _describe(nv.nvmlDeviceGetHandleByIndex(index))
        except Exception as error:  # fallen off the bus, or another's: the other GPUs still count
            facts = {**_describe(None), "refused": {"handle": _words(error)}}
        found.append({"index": index, **facts})
    return found, None if count else "no GPU"


def gpu_of(device: torch.device) -> dict:
    """What the driver reports of one CUDA device, found by UUID because CUDA and NVML count differently; {} if nothing.
    The other GPUs are not asked: each takes some 40 ms, and what was read under load would be read after it."""
    try:
        nv.nvmlInit()
        handle = nv.nvmlDeviceGetHandleByUUID(
            f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        )
        return {"index": nv.nvmlDeviceGetIndex(handle), **_describe(handle)}
    except Exception:  # no NVML, no such GPU (AMD, a slice of one)
        return {}


def _words(error: Exception) -> str:
    return f"{error}" or type(error).__name__


def _describe(handle: Any) -> dict:
    """Every query's answer; all None without a handle. Clocks and power come early: they change within milliseconds."""
    queries: dict[str, Callable[[], Any]] = {
        "uuid": lambda: nv.nvmlDeviceGetUUID(handle),
        "name": lambda: nv.nvmlDeviceGetName(handle),
        "bus_id": lambda: nv.nvmlDeviceGetPciInfo(handle).busId,
        "driver": lambda: nv.nvmlSystemGetDriverVersion(),
        "cuda": lambda: "{}.{}".format(*divmod(nv.nvmlSystemGetCudaDriverVersion() // 10, 100)),
        "compute_capability": lambda: "{}.{}".format(
            *nv.nvmlDeviceGetCudaComputeCapability(handle)
        ),
        "memory_total_bytes": lambda: nv.nvmlDeviceGetMemoryInfo(handle).total,
        "memory_used_bytes": lambda: nv.nvmlDeviceGetMemoryInfo(handle).used,
        "utilization": lambda: nv.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        "power_watts": lambda: nv.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "power_limit_watts": lambda: nv.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
        "temperature_celsius": lambda: nv.nvmlDeviceGetTemperature(handle, nv.NVML_TEMPERATURE_GPU),
        "sm_clock_mhz": lambda: nv.nvmlDeviceGetClockInfo(handle, nv.NVML_CLOCK_SM),
        "sm_clock_max_mhz": lambda: nv.nvmlDeviceGetMaxClockInfo(handle, nv.NVML_CLOCK_SM),
        "throttle_reasons": lambda: _reasons(handle),
        "mig": lambda: nv.nvmlDeviceGetMigMode(handle)[0] == nv.NVML_DEVICE_MIG_ENABLE,
        "nvlinks": lambda: _links_up(handle),
        "nvlink_tx_bytes": lambda: _traffic(handle, nv.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX),
        "nvlink_rx_bytes": lambda: _traffic(handle, nv.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX),
        "processes": lambda: [_process(p) for p in nv.nvmlDeviceGetComputeRunningProcesses(handle)],
    }
    answers: dict[str, Any] = dict.fromkeys(queries)
    refused: dict[str, str] = {}
    for name, query in queries.items() if handle is not None else ():
        try:
            answers[name] = query()
        except Exception as error:  # any query, any error: the others still count
            refused[name] = _words(error)
    return {**answers, "refused": refused}


def _reasons(handle: Any) -> list[str]:
    mask = nv.nvmlDeviceGetCurrentClocksEventReasons(handle)
    return [reason for reason, name in THROTTLE_REASONS.items() if mask & getattr(nv, name)]


def _links_up(handle: Any) -> int:
    """How many NVLink lanes of a GPU are up."""
    up = 0
    for link in range(nv.NVML_NVLINK_MAX_LINKS):
        try:
            up += nv.nvmlDeviceGetNvLinkState(handle, link) == nv.NVML_FEATURE_ENABLED
        except nv.NVMLError as error:
            # no lane of this number, or no NVLink at all
            if link or error.value == nv.NVML_ERROR_NOT_SUPPORTED:
                break
            raise
    return up


def _traffic(handle: Any, field: int) -> int:
    every_lane = 0xFFFFFFFF  # scope of the field: the sum over lanes
    value = nv.nvmlDeviceGetFieldValues(handle, [(field, every_lane)])[0]
    if value.nvmlReturn != nv.NVML_SUCCESS:
        raise nv.NVMLError(value.nvmlReturn)
    return value.value.ullVal * 1024  # the driver counts KiB


def _process(found: Any) -> dict:
    try:
        owner = psutil.Process(found.pid).username()
    except psutil.Error:  # gone by now, or in another container
        owner = None
    return {"pid": found.pid, "user": owner, "memory_bytes": found.usedGpuMemory}


# The compute capability from which an NVIDIA GPU has units that multiply matrices of the type.
CUDA_SINCE = {
    "fp32": (1, 0),
    "fp16": (7, 0),
    "int8": (7, 5),
    "tf32": (8, 0),
    "bf16": (8, 0),
    "fp8": (8, 9),
}
# A CPU's instruction sets for matmuls of the type, in Linux's names; any one of them is enough.
CPU_SETS = {
    "tf32": {"amx_tf32"},
    "bf16": {"avx512_bf16", "amx_bf16", "bf16"},
    "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"},
    "fp8": {"amx_fp8"},
    "int8": {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"},
}


def native_types(device: torch.device) -> tuple[set[str], str]:
    """The types (fp32, tf32, bf16, fp16, fp8, int8) that `device` multiplies in hardware, and how we know. A type that
    is not here may still work: the device then computes in another one, which is slower."""
    # ROCm answers with a "capability" that is not CUDA's
    if device.type == "cuda" and torch.version.hip:
        return {
            "fp32",
            "fp16",
            "bf16",
            "int8",
        }, f"AMD {torch.cuda.get_device_properties(device).gcnArchName}"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        found = {dtype for dtype, since in CUDA_SINCE.items() if capability >= since}
        return found, "compute capability {}.{}".format(*capability)
    if device.type == "mps":
        return {"fp32", "fp16"}, "Metal"
    here = cpu_sets()
    found = {dtype for dtype, sets in CPU_SETS.items() if sets & here}
    useful = sorted(here & set.union(*CPU_SETS.values()))
    return (
        {"fp32"} | found,
        f"instruction sets {', '.join(useful)}" if useful else "no instruction set for other types",
    )


def cpu_fact(name: str) -> str:
    """What Linux says of the processor under this name, such as "model name"; empty if nothing."""
    found = re.search(rf"^(?:{name})\s*: (.+)", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return found[1] if found else ""


def cpu_sets() -> set[str]:
    """The processor's instruction sets as Linux names them (x86: flags, ARM: Features)."""
    return set(cpu_fact("flags|Features").split())


def highest_flops(name: str, dtype: str, sm_clock_max_mhz: float | None) -> float | None:
    """FLOP/s that a right measurement cannot exceed; None if not known. A data sheet counts with a boost clock, and the
    chip may go higher: the H100 SXM's counts 1,830 MHz for matrix units, and the driver allows 1,980, 8 % more."""
    flops = peak_flops(name, dtype)
    clock = devices().get(name, {}).get("fp32_clock" if dtype == "fp32" else "matrix_clock")
    if flops is None or not clock or not sm_clock_max_mhz:
        return flops
    return flops * max(1.0, sm_clock_max_mhz * 1e6 / clock)


def limits(proc: str = "/proc", groups: str = "/sys/fs/cgroup") -> tuple[int | None, float | None]:
    """(bytes of memory, cores) that a container or a batch system allows; None where there is no limit. A limit may be
    set on this process's control group or on any group above it."""
    lines = _text(Path(proc, "self/cgroup")).splitlines()
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    folders = Path(f"{groups}{own}", "_").parents
    memory = [_text(folder / "memory.max") for folder in folders]
    quotas = [_text(folder / "cpu.max").split() for folder in folders]
    cores = [int(quota[0]) / int(quota[1]) for quota in quotas if quota and quota[0] != "max"]
    return min((int(text) for text in memory if text.isdigit()), default=None), min(
        cores, default=None
    )


def _text(file: Path) -> str:
    return file.read_text().strip() if file.is_file() else ""
