"""How to time a device and not the queue in front of it. benchmark.py measures with this.

A GPU is asynchronous: a call returns when its work is in the queue. Either the GPU's own clock is read (CUDA events,
which wait in the same queue), or the caller waits for the result before looking at the watch. Both are right, for
different questions. The first calls load kernels and raise clocks: warm up. A second call finds its operands in the
cache: write something larger in between. One sample is an anecdote: take several, show the median and the spread.
"""

import platform
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from common import nvml

WARM_UP_SECONDS = 0.05


def timed(work: Callable, device, samples: int, flush: Tensor | None = None, repeat=1, clock="device") -> list[float]:
    """Seconds per call of work(): `samples` means over `repeat` calls each, after a warm-up.

    Clock "device": the GPU's own, by CUDA events (elsewhere like "wall"). "wall": until each call's result is there.
    "issue": until the calls return. `flush`, a tensor larger than the caches, is written before each sample: the
    operands then come from memory, and the GPU is busy while the call is issued, so that the launch is not timed.
    """
    wait = (lambda: None) if device.type == "cpu" else torch.accelerator.synchronize
    work()  # may load kernels for longer than all of the warm-up
    wait()
    deadline = time.perf_counter() + WARM_UP_SECONDS
    while time.perf_counter() < deadline:
        work()
        wait()
    seconds = []
    for _ in range(samples):
        wait()
        if flush is not None:
            flush.zero_()
        if device.type == "cuda" and clock == "device":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeat):
                work()
            end.record()
            wait()
            seconds.append(start.elapsed_time(end) / 1e3 / repeat)
        else:
            wait()
            began = time.perf_counter()
            for _ in range(repeat):
                work()
                if clock != "issue":
                    wait()
            seconds.append((time.perf_counter() - began) / repeat)
    wait()
    return seconds


def conditions(device: torch.device) -> dict:
    """What a figure has to be read with: the processor, and a GPU's clocks and limits now. None: not known."""
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    known = {"cpu": model[1] if model else platform.processor() or None, "cpu_threads": torch.get_num_threads()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = next((g for g in nvml.gpus()[0] if (g["uuid"] or "").endswith(str(properties.uuid))), {})
        names = ("driver", "sm_clock_mhz", "sm_clock_max_mhz", "memory_clock_mhz", "power_limit_watts", "power_watts")
        known |= {"compute_capability": f"{properties.major}.{properties.minor}", "cuda": torch.version.cuda}
        known |= {"l2_cache_bytes": properties.L2_cache_size}
        known |= {name: gpu.get(name) for name in (*names, "throttle_reasons")}
    return known
