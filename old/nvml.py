"""What the NVIDIA driver tells about each GPU, through NVML.

Every query may fail alone: a virtual machine hides clocks, a laptop has no ECC, an old driver lacks a function.
A value that the driver does not report is None, and the driver's error text is in `refused`; nothing here raises.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    import torch

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
    """One dict per GPU in the order of the bus, CUDA_VISIBLE_DEVICES not applied; and, if there are none, why.

    Bytes, watts, MHz, degrees Celsius, shares of one; counters since the driver was loaded.
    """
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


def gpu_of(device: "torch.device") -> dict:
    """What the driver tells of one CUDA device, found by UUID because CUDA and NVML count differently; {} if nothing.

    The other GPUs are not asked: each takes some 40 ms, and what was read under load would be read after it.
    """
    import torch

    try:
        nv.nvmlInit()
        handle = nv.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
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
        "cuda": lambda: _dotted(nv.nvmlSystemGetCudaDriverVersion()),
        "compute_capability": lambda: "{}.{}".format(*nv.nvmlDeviceGetCudaComputeCapability(handle)),
        "memory_total_bytes": lambda: nv.nvmlDeviceGetMemoryInfo(handle).total,
        "memory_used_bytes": lambda: nv.nvmlDeviceGetMemoryInfo(handle).used,
        "utilization": lambda: nv.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        "power_watts": lambda: nv.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "power_limit_watts": lambda: nv.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
        "temperature_celsius": lambda: nv.nvmlDeviceGetTemperature(handle, nv.NVML_TEMPERATURE_GPU),
        "sm_clock_mhz": lambda: nv.nvmlDeviceGetClockInfo(handle, nv.NVML_CLOCK_SM),
        "sm_clock_max_mhz": lambda: nv.nvmlDeviceGetMaxClockInfo(handle, nv.NVML_CLOCK_SM),
        "memory_clock_mhz": lambda: nv.nvmlDeviceGetClockInfo(handle, nv.NVML_CLOCK_MEM),
        "throttle_reasons": lambda: _reasons(handle),
        "pcie_generation": lambda: nv.nvmlDeviceGetCurrPcieLinkGeneration(handle),
        "pcie_generation_max": lambda: nv.nvmlDeviceGetMaxPcieLinkGeneration(handle),
        "pcie_width": lambda: nv.nvmlDeviceGetCurrPcieLinkWidth(handle),
        "pcie_width_max": lambda: nv.nvmlDeviceGetMaxPcieLinkWidth(handle),
        "pcie_tx_bytes_per_second": lambda: 1000 * nv.nvmlDeviceGetPcieThroughput(handle, nv.NVML_PCIE_UTIL_TX_BYTES),
        "pcie_rx_bytes_per_second": lambda: 1000 * nv.nvmlDeviceGetPcieThroughput(handle, nv.NVML_PCIE_UTIL_RX_BYTES),
        "ecc": lambda: nv.nvmlDeviceGetEccMode(handle)[0] == nv.NVML_FEATURE_ENABLED,
        "mig": lambda: nv.nvmlDeviceGetMigMode(handle)[0] == nv.NVML_DEVICE_MIG_ENABLE,
        "numa_node": lambda: _numa_node(nv.nvmlDeviceGetPciInfo(handle).busId),
        "nvlinks": lambda: len(links_up(handle)),
        "nvlink_version": lambda: _nvlink_version(handle),
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


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _numa_node(bus_id: str, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The CPU socket that the GPU hangs on; None where the kernel knows of one only. NVML's own query is for GPUs
    that are a NUMA node themselves."""
    file = devices / bus_id.lower()[-12:] / "numa_node"
    node = int(file.read_text()) if file.exists() else -1
    return None if node < 0 else node


def throttle_reasons(index: int) -> list[str] | None:
    """Why GPU `index` is throttled now; None if the driver does not say. gpus() must have been called before."""
    try:
        return _reasons(nv.nvmlDeviceGetHandleByIndex(index))
    except Exception:
        return None


def _reasons(handle: Any) -> list[str]:
    mask = nv.nvmlDeviceGetCurrentClocksEventReasons(handle)
    return [reason for reason, name in THROTTLE_REASONS.items() if mask & getattr(nv, name)]


def links_up(handle: Any) -> list[int]:
    """The NVLink lanes of a GPU that are up."""
    up = []
    for link in range(nv.NVML_NVLINK_MAX_LINKS):
        try:
            if nv.nvmlDeviceGetNvLinkState(handle, link) == nv.NVML_FEATURE_ENABLED:
                up.append(link)
        except nv.NVMLError as error:
            if link:  # fewer lanes than the most a GPU can have
                break
            if error.value == nv.NVML_ERROR_NOT_SUPPORTED:
                return []
            raise
    return up


def _nvlink_version(handle: Any) -> str | None:
    """The generation, such as "4.0"; the driver gives the place in a list: 4.0 is its sixth."""
    names = {getattr(nv, name): name for name in dir(nv) if name.startswith("NVML_NVLINK_VERSION_")}
    newest = max((nv.nvmlDeviceGetNvLinkVersion(handle, link) for link in links_up(handle)), default=None)
    return None if newest is None else names[newest].removeprefix("NVML_NVLINK_VERSION_").replace("_", ".")


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
