"""Read what a machine is: each GPU's facts through NVML, a container's limits, and native dtypes.

Every NVML query can fail alone: a virtual machine hides clocks, and an old driver lacks functions.
A value that the driver does not report is None, and `refused` holds the driver's error message.
Nothing here raises.
"""

import re
from pathlib import Path
from typing import Any

import psutil
import torch

from common.hardware import (
    container_memory_bytes,
    control_groups,
    devices,
    file_text,
    peak_flops,
)

try:
    import pynvml as nv
except ImportError:  # the package is nvidia-ml-py
    nv = None

# Why clocks are below their maximum, and NVML's name for the reason. Idleness and clocks that the
# user has set do not count.
THROTTLE_REASONS = {
    "power cap": "nvmlClocksThrottleReasonSwPowerCap",
    "hardware slowdown": "nvmlClocksThrottleReasonHwSlowdown",
    "thermal, software": "nvmlClocksThrottleReasonSwThermalSlowdown",
    "thermal, hardware": "nvmlClocksThrottleReasonHwThermalSlowdown",
    "power brake": "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
}
ALL_LANES = 0xFFFFFFFF  # NVML's scope for a field that is summed over all NVLink lanes

# --- GPUs


def gpus() -> tuple[list[dict], str | None]:
    """Return the facts of each GPU, in the order of the PCI bus, and why there are none.

    CUDA_VISIBLE_DEVICES has no effect here. The second value is None if there is a GPU. GPUs that
    this job may not use are left out: see gpus_of_others.
    """
    if nv is None:
        return [], "the module pynvml is missing (pip install nvidia-ml-py)"
    try:
        nv.nvmlInit()
        count = nv.nvmlDeviceGetCount()
    except Exception as error:  # a half-installed driver also raises errors other than NVMLError
        return [], f"no NVIDIA driver that answers: {_message(error)}"
    if count == 0:
        return [], "no GPU"

    all_facts = []
    for index in range(count):
        try:
            handle = nv.nvmlDeviceGetHandleByIndex(index)
            facts = _describe(handle)
        except Exception as error:  # this GPU fell off the bus: the others can still be read
            if _is_not_permitted(error):
                continue
            facts = dict.fromkeys(QUERIES)
            facts["refused"] = {"handle": _message(error)}
        all_facts.append({"index": index, **facts})
    if not all_facts:
        return [], f"this job may use none of the {count} GPUs of this machine"
    return all_facts, None


def gpus_of_others(own: list[dict]) -> int:
    """Return how many GPUs of this machine the job may not use. `own` is what gpus returns.

    A batch system or a container gives a job some GPUs, and Linux refuses it the others.
    """
    try:
        return nv.nvmlDeviceGetCount() - len(own)
    except Exception:  # no NVML: gpus says why
        return 0


def _is_not_permitted(error: Exception) -> bool:
    return getattr(error, "value", None) == nv.NVML_ERROR_NO_PERMISSION


def gpu_of(device: torch.device) -> dict:
    """Return the facts of one CUDA device, or {} if NVML does not know it.

    The GPU is found by its UUID, because CUDA and NVML count differently. The other GPUs are not
    read: each takes about 40 ms, and clocks that are read so late are no longer those under load.
    """
    try:
        nv.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        handle = nv.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return {"index": nv.nvmlDeviceGetIndex(handle), **_describe(handle)}
    except Exception:  # no NVML, or a GPU that it does not know (AMD, a MIG slice)
        return {}


def _describe(handle: Any) -> dict:
    """Ask every question in QUERIES about one GPU."""
    facts = {}
    refused = {}
    for name, query in QUERIES.items():
        try:
            facts[name] = query(handle)
        except Exception as error:  # whatever one query raises, the others can still be asked
            facts[name] = None
            refused[name] = _message(error)
    facts["refused"] = refused
    return facts


def _message(error: Exception) -> str:
    return str(error) or type(error).__name__


# --- the questions to the driver


def _uuid(handle: Any) -> str:
    return nv.nvmlDeviceGetUUID(handle)


def _name(handle: Any) -> str:
    return nv.nvmlDeviceGetName(handle)


def _bus_id(handle: Any) -> str:
    return nv.nvmlDeviceGetPciInfo(handle).busId


def _driver(_handle: Any) -> str:
    return nv.nvmlSystemGetDriverVersion()


def _cuda(_handle: Any) -> str:
    version = nv.nvmlSystemGetCudaDriverVersion()  # such as 12080 for 12.8
    return f"{version // 1000}.{version % 1000 // 10}"


def _compute_capability(handle: Any) -> str:
    major, minor = nv.nvmlDeviceGetCudaComputeCapability(handle)
    return f"{major}.{minor}"


def _memory_total(handle: Any) -> int:
    return nv.nvmlDeviceGetMemoryInfo(handle).total


def _memory_used(handle: Any) -> int:
    return nv.nvmlDeviceGetMemoryInfo(handle).used


def _utilization(handle: Any) -> float:
    return nv.nvmlDeviceGetUtilizationRates(handle).gpu / 100


def _power(handle: Any) -> float:
    return nv.nvmlDeviceGetPowerUsage(handle) / 1e3  # NVML has milliwatts


def _power_limit(handle: Any) -> float:
    return nv.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3


def _temperature(handle: Any) -> int:
    return nv.nvmlDeviceGetTemperature(handle, nv.NVML_TEMPERATURE_GPU)


def _sm_clock(handle: Any) -> int:
    return nv.nvmlDeviceGetClockInfo(handle, nv.NVML_CLOCK_SM)


def _sm_clock_max(handle: Any) -> int:
    return nv.nvmlDeviceGetMaxClockInfo(handle, nv.NVML_CLOCK_SM)


def _throttle_reasons(handle: Any) -> list[str]:
    mask = nv.nvmlDeviceGetCurrentClocksEventReasons(handle)
    return [reason for reason, name in THROTTLE_REASONS.items() if mask & getattr(nv, name)]


def _mig(handle: Any) -> bool:
    current, _pending = nv.nvmlDeviceGetMigMode(handle)
    return current == nv.NVML_DEVICE_MIG_ENABLE


def _nvlinks(handle: Any) -> int:
    """Count the NVLink lanes that are up."""
    up = 0
    for link in range(nv.NVML_NVLINK_MAX_LINKS):
        try:
            state = nv.nvmlDeviceGetNvLinkState(handle, link)
        except nv.NVMLError as error:
            # there is no lane with this number, or there is no NVLink at all
            if link > 0 or error.value == nv.NVML_ERROR_NOT_SUPPORTED:
                break
            raise
        if state == nv.NVML_FEATURE_ENABLED:
            up += 1
    return up


def _nvlink_sent(handle: Any) -> int:
    return _nvlink_bytes(handle, nv.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX)


def _nvlink_received(handle: Any) -> int:
    return _nvlink_bytes(handle, nv.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)


def _nvlink_bytes(handle: Any, field: int) -> int:
    value = nv.nvmlDeviceGetFieldValues(handle, [(field, ALL_LANES)])[0]
    if value.nvmlReturn != nv.NVML_SUCCESS:
        raise nv.NVMLError(value.nvmlReturn)
    return value.value.ullVal * 1024  # the driver counts KiB


def _processes(handle: Any) -> list[dict]:
    processes = []
    for process in nv.nvmlDeviceGetComputeRunningProcesses(handle):
        try:
            user = psutil.Process(process.pid).username()
        except psutil.Error:  # it has ended, or runs in another container
            user = None
        processes.append(
            {"pid": process.pid, "user": user, "memory_bytes": process.usedGpuMemory},
        )
    return processes


# Clocks and power change within milliseconds after a load, so they come early.
QUERIES = {
    "uuid": _uuid,
    "name": _name,
    "bus_id": _bus_id,
    "driver": _driver,
    "cuda": _cuda,
    "compute_capability": _compute_capability,
    "memory_total_bytes": _memory_total,
    "memory_used_bytes": _memory_used,
    "utilization": _utilization,
    "power_watts": _power,
    "power_limit_watts": _power_limit,
    "temperature_celsius": _temperature,
    "sm_clock_mhz": _sm_clock,
    "sm_clock_max_mhz": _sm_clock_max,
    "throttle_reasons": _throttle_reasons,
    "mig": _mig,
    "nvlinks": _nvlinks,
    "nvlink_tx_bytes": _nvlink_sent,
    "nvlink_rx_bytes": _nvlink_received,
    "processes": _processes,
}

# --- dtypes that the hardware multiplies

# The compute capability from which an NVIDIA GPU has units that multiply matrices of the dtype.
CUDA_SINCE = {
    "fp32": (1, 0),
    "fp16": (7, 0),
    "int8": (7, 5),
    "tf32": (8, 0),
    "bf16": (8, 0),
    "fp8": (8, 9),
}
# A CPU's instruction sets for matmuls of the dtype, in Linux's names. One of them is enough.
CPU_SETS = {
    "tf32": {"amx_tf32"},
    "bf16": {"avx512_bf16", "amx_bf16", "bf16"},
    "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"},
    "fp8": {"amx_fp8"},
    "int8": {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"},
}


def native_types(device: torch.device) -> tuple[set[str], str]:
    """Return the dtypes that `device` multiplies in hardware, and how this is known.

    The names are fp32, tf32, bf16, fp16, fp8 and int8. Another dtype may still work: the device
    then computes in one of these, which is slower.
    """
    if device.type == "cuda" and torch.version.hip:
        # ROCm also reports a compute capability, which is not CUDA's
        architecture = torch.cuda.get_device_properties(device).gcnArchName
        return {"fp32", "fp16", "bf16", "int8"}, f"AMD {architecture}"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        native = {dtype for dtype, since in CUDA_SINCE.items() if capability >= since}
        return native, f"compute capability {capability[0]}.{capability[1]}"
    if device.type == "mps":
        return {"fp32", "fp16"}, "Metal"

    cpu_sets = set(cpu_fact("flags|Features").split())  # flags on x86, Features on ARM
    native = {"fp32"}
    used_sets = set()
    for dtype, sets in CPU_SETS.items():
        if sets & cpu_sets:
            native.add(dtype)
            used_sets |= sets & cpu_sets
    if not used_sets:
        return native, "no instruction set for other dtypes"
    return native, f"instruction sets {', '.join(sorted(used_sets))}"


def highest_flops(name: str, dtype: str, sm_clock_max_mhz: float | None) -> float | None:
    """Return the FLOP/s that a correct measurement cannot exceed, or None if it is not known.

    A data sheet counts with a boost clock, and the chip may run above it. For example the data
    sheet of the H100 SXM counts 1,830 MHz for tensor cores, and the driver allows 1,980, 8 % more.
    """
    flops = peak_flops(name, dtype)
    clock_name = "fp32_clock" if dtype == "fp32" else "matrix_clock"
    sheet_clock = devices().get(name, {}).get(clock_name)
    if flops is None or not sheet_clock or not sm_clock_max_mhz:
        return flops
    return flops * max(1.0, sm_clock_max_mhz * 1e6 / sheet_clock)


# --- the host


def cpu_fact(name: str) -> str:
    """Return what /proc/cpuinfo says under this name, such as "model name", or an empty string."""
    line = re.search(rf"^(?:{name})\s*: (.+)", file_text(Path("/proc/cpuinfo")), re.MULTILINE)
    return line[1] if line else ""


def limits(proc: str = "/proc", groups: str = "/sys/fs/cgroup") -> tuple[int | None, float | None]:
    """Return the bytes of memory and the cores that a container or a batch system allows.

    None means no limit. The limit may be set on the control group of this process or on any group
    above it, in version 1 or 2 of control groups.
    """
    core_limits = []
    for folder in control_groups(proc, groups):
        # microseconds, and the period that they are in
        quota = file_text(folder / "cpu.max").split()
        quota = quota or [file_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        if quota[0].isdigit():  # else it is "max", -1 or there is no file
            core_limits.append(int(quota[0]) / int(quota[1]))
    memory_limit = container_memory_bytes(proc, groups)
    return memory_limit, min(core_limits, default=None)
