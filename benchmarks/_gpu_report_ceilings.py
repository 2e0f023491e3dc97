"""The ceilings of one GPU: a large bf16 matrix product, a copy in its memory, and its clock and power meanwhile.

A process of its own for gpu_report.py, so that what is allocated here is gone when training starts. It writes what it
measured to the file that it is given.
"""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # old/, with nothing installed
from old import nvml, runtime

SAMPLES = 20  # of each ceiling
CALLS = 5  # in each sample
SIZE = 8192


def ceilings(device: torch.device) -> dict:
    """FLOP/s and bytes/s of each sample, and what torch and the driver tell about the GPU."""
    about = describe(device)
    # random data: a GPU multiplies zeros faster than it can multiply anything real, for it draws less power
    a = torch.randn(SIZE, SIZE, device=device, dtype=torch.bfloat16)
    b = torch.randn(SIZE, SIZE, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(a)
    seconds = timed(lambda: torch.mm(a, b, out=out))
    matmul = [2 * SIZE**3 / s for s in seconds]
    about |= under_load(device, lambda: torch.mm(a, b, out=out))
    source = torch.randint(256, (2**31,), dtype=torch.uint8, device=device)  # 2 GiB: far more than any cache
    target = torch.empty_like(source)
    seconds = timed(lambda: target.copy_(source))
    copy = [2 * source.numel() / s for s in seconds]  # read once and written once
    return {"about": about, "matmul": matmul, "copy": copy}


def timed(work: Callable) -> list[float]:
    """Seconds of one call of `work`, SAMPLES times after a warm-up, between the GPU's own events."""
    for _ in range(5 * CALLS):
        work()
    seconds = []
    for _ in range(SAMPLES):
        began = torch.cuda.Event(enable_timing=True)
        ended = torch.cuda.Event(enable_timing=True)
        began.record()
        for _ in range(CALLS):
            work()
        ended.record()
        ended.synchronize()
        seconds.append(began.elapsed_time(ended) / 1e3 / CALLS)
    return seconds


def describe(device: torch.device) -> dict:
    """The GPU as torch and, if it answers, NVML tell it."""
    properties = torch.cuda.get_device_properties(device)
    told = nvml.gpu_of(device)
    if not told:
        print(f"skipped: driver, power and clocks ({nvml.gpus()[1] or 'NVML does not list this GPU'})")
    processes = told.get("processes")
    return {
        "gpu": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "driver": told.get("driver"),
        "power_limit_watts": told.get("power_limit_watts"),
        "sm_clock_max_mhz": told.get("sm_clock_max_mhz"),
        "other_processes": max(0, len(processes) - 1) if processes else None,
    }


def under_load(device: torch.device, work: Callable) -> dict:
    """Clock and power while this GPU works: what it sustains, not what it could.

    A reading counts only if the GPU was still busy when it had been taken. Only this GPU is asked, because a
    look at all of them takes longer than the work that is queued.
    """
    clocks, watts = [], []
    index = nvml.gpu_of(device).get("index")
    for _ in range(5):
        busy = torch.cuda.Event()
        for _ in range(200):
            work()
        busy.record()
        clock, power = clock_and_power(index)
        if not busy.query():
            clocks.append(clock)
            watts.append(power)
        torch.cuda.synchronize()
    clocks = [clock for clock in clocks if clock is not None]
    watts = [power for power in watts if power is not None]
    return {
        "sm_clock_under_matmul_mhz": statistics.median(clocks) if clocks else None,
        "power_under_matmul_watts": max(watts, default=None),
    }


def clock_and_power(index: int | None) -> tuple[int | None, float | None]:
    """MHz and watts of one GPU now; None for what the driver does not report."""
    if index is None:
        return None, None
    clock, power = None, None
    try:
        handle = nvml.nv.nvmlDeviceGetHandleByIndex(index)
        clock = nvml.nv.nvmlDeviceGetClockInfo(handle, nvml.nv.NVML_CLOCK_SM)
        power = nvml.nv.nvmlDeviceGetPowerUsage(handle) / 1e3
    except nvml.nv.NVMLError:
        pass
    return clock, power


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(json.dumps(ceilings(runtime.pick_device("cuda"))))
