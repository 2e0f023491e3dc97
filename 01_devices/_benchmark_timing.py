"""How to time a device and not the queue in front of it. benchmark.py measures with this.

A GPU is asynchronous: a call returns when its work is in the queue. Either the GPU's own clock is read (CUDA events,
which wait in the same queue), or the caller waits for the result before looking at the watch. Both are right, for
different questions. The first calls load kernels and raise clocks: warm up. What is bound by arithmetic starts at
clocks that the power limit does not allow for long: warm up for longer. A second call finds its operands in the
cache: write something larger in between. One sample is an anecdote: take several, show the median and the spread.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import torch
from torch import Tensor

from old import hardware, nvml
from old.exits import UserError

WARM_UP_SECONDS = 0.05  # of every figure
# what NVML tells of a GPU that a figure depends on
FACTS = [
    "driver",
    "sm_clock_mhz",
    "sm_clock_max_mhz",
    "memory_clock_mhz",
    "power_limit_watts",
    "power_watts",
    "throttle_reasons",
]
LEAST_FREE_BYTES = 2**31  # the largest products, in fp32, and the flush


def waiter(device: torch.device) -> Callable[[], None]:
    """What waits until `device` is done."""
    return (lambda: None) if device.type == "cpu" else torch.accelerator.synchronize


def warm_up(work: Callable, device: torch.device, seconds: float) -> None:
    """Call work() for so long, and at least once: that may load kernels for longer than all the rest takes."""
    wait = waiter(device)
    work()
    wait()
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        work()
        wait()


def timed(work: Callable, device, samples: int, flush: Tensor | None = None, repeat=1, clock="device") -> list[float]:
    """Seconds per call of work(): `samples` means over `repeat` calls each, after a warm-up.

    Clock "device": the GPU's own, by CUDA events (elsewhere like "wall"). "wall": until each call's result is there.
    "issue": until the calls return. `flush`, a tensor larger than the caches, is written before each sample: the
    operands then come from memory, and the GPU is busy while the call is issued, so that the launch is not timed.
    """
    warm_up(work, device, WARM_UP_SECONDS)
    wait = waiter(device)
    seconds = []
    for _ in range(samples):
        wait()
        if flush is not None:
            flush.zero_()
        if device.type == "cuda" and clock == "device":
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
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


def cache_bytes(device: torch.device) -> int:
    """The last cache before the memory: a GPU's L2; a CPU's as Linux tells it, 0 where nobody does."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((2**10 * int(size.read_text().strip().removesuffix("K")) for size in sizes), default=0)


def buffer_bytes(device: torch.device, array_most: int, flush_most: int) -> tuple[int, int]:
    """(bytes of an array, bytes of the flush): at most an eighth of the free memory, the flush two caches at least."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if device.type == "cuda" and free < LEAST_FREE_BYTES:
        raise UserError(f"{free:,} bytes are free on {device}, this needs {LEAST_FREE_BYTES:,}: take an idle GPU")
    return min(array_most, free // 8), max(min(flush_most, free // 8), 2 * cache_bytes(device))


def conditions(device: torch.device) -> dict:
    """What a figure has to be read with: the processor, and a GPU's clocks and limits now. None: not known."""
    known = {"cpu": hardware.cpu_model(), "cpu_threads": torch.get_num_threads()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = nvml.gpu_of(device)
        known["compute_capability"] = f"{properties.major}.{properties.minor}"
        known["cuda"] = torch.version.cuda or torch.version.hip
        known["l2_cache_bytes"] = properties.L2_cache_size
        for name in FACTS:
            known[name] = gpu.get(name)
    return known


def conditions_under_load(work: Callable, device: torch.device) -> dict:
    """conditions(), read while `work` runs: an idle GPU lowers its clocks within milliseconds."""
    wait = waiter(device)
    with ThreadPoolExecutor(1) as other:
        warm_up(work, device, WARM_UP_SECONDS)
        told = other.submit(conditions, device)
        while not told.done():
            work()
            wait()
    return told.result()
