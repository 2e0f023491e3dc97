"""Measure the six collectives that training is made of, and predict the all-reduce of a model.

A collective is a call that all ranks make. DDP all-reduces gradients. FSDP all-gathers weights and
reduce-scatters gradients. Experts and sequences move by all-to-all, pipelines by send and receive.
The time of each is nearly

    latency + bytes / bandwidth

so small messages pay the latency, and large ones the bandwidth. The script checks each result, and
fits the two numbers to the measured times.

    laptop    python 05_ddp/collectives.py
    one node  torchrun --standalone --nproc_per_node=8 05_ddp/collectives.py --link-gb-per-s 450
    cluster   the same on each node, but in place of --standalone
              --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400 --rdzv-id=$JOB

"Bus GB/s" is the number of bytes that each rank must send, divided by the time, as nccl-tests
defines it. --link-gb-per-s is the bandwidth of the link in one direction, from its data sheet:
NVLink has 300 in an A100, 450 in an H100 or H200, 900 in a B200. In a ring all-reduce each rank
sends 2 (n - 1) / n times the size of its buffer. With NVLink switches that add up (NVLS) it sends
the buffer once. So the bus bandwidth of an all-reduce can be above the link's, but the buffer
itself cannot be faster than the link.

What to look at: below about 10 KiB the time does not grow with the size. This latency is why DDP
sends buckets and not single tensors. If the lowest and the highest time are far apart, the machine
has other work.

On GPUs the default is --max-bytes 1 GiB. Expected on 8 H100s from their data sheets: an all-gather
or a reduce-scatter of 1 GiB takes at least 2.1 ms, and bus bandwidths are below 450 GB/s, but for
the all-reduce.

Previous: ddp_from_scratch.py. Next: stragglers.py.
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _collectives as helper
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from common import lesson, runtime
from common.torch_versions import all_gather_single, reduce_scatter_single
from lm import shapes

SMALLEST_BYTES = 1024
GPU_DEFAULTS = {"max_bytes": 2**30, "samples": 20}
# A sample repeats the call of a small buffer until so many bytes are sent, by device: a single call
# would be over before the clock or a barrier has noticed.
BYTES_PER_SAMPLE = {"cpu": 2**20, "cuda": 2**26}


# --- the six collectives


def prepare(name: str, base: Tensor) -> tuple[Callable[[], object], Tensor, Tensor]:
    """Return the call of a collective, the tensor that its result is written to, and the result.

    Rank r holds (r + 1) times `base`, so every rank knows what it must receive. A buffer has n
    chunks, one for each rank.
    """
    rank = dist.get_rank()
    n = dist.get_world_size()
    mine = base * (rank + 1)
    out = mine.clone()  # for calls that work in place, and for results
    chunk_size = base.numel() // n
    my_chunk = base[rank * chunk_size : (rank + 1) * chunk_size]
    factors = torch.arange(1.0, n + 1, device=base.device)  # of ranks 0, 1, ...
    sum_of_factors = n * (n + 1) / 2

    if name == "broadcast":  # rank 0's buffer, to all
        return partial(dist.broadcast, out, src=0), out, base

    if name == "all-reduce":  # the sum of all buffers, to all
        return partial(dist.all_reduce, out), out, base * sum_of_factors

    if name == "reduce-scatter":  # the sum of all buffers: chunk r to rank r
        out = out[:chunk_size]
        return partial(reduce_scatter_single, out, mine), out, my_chunk * sum_of_factors

    if name == "all-gather":  # a chunk of each rank, one after the other, to all
        expected = torch.outer(factors, base[:chunk_size]).flatten()
        return partial(all_gather_single, out, mine[:chunk_size]), out, expected

    if name == "all-to-all":  # chunk r of every rank, to rank r: a transpose
        expected = torch.outer(factors, my_chunk).flatten()
        return partial(dist.all_to_all_single, out, mine), out, expected

    assert name == "send/recv"  # to the next rank in a ring, from the previous one
    previous_rank = (rank - 1) % n
    next_rank = (rank + 1) % n
    call = partial(send_and_receive, mine, next_rank, out, previous_rank)
    return call, out, base * (previous_rank + 1)


def send_and_receive(to_send: Tensor, target: int, received: Tensor, source: int) -> None:
    """Send to one rank and receive from another at the same time.

    If all ranks first sent and then received, each would wait for the next one forever.
    """
    send = dist.P2POp(dist.isend, to_send, target)
    receive = dist.P2POp(dist.irecv, received, source)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


# --- what they cost


def bus_factor(name: str, n: int) -> float:
    """Return the bytes that each of n ranks must send, as a multiple of the bytes in its buffer."""
    if n == 1:
        return 0.0
    if name in ("broadcast", "send/recv"):
        return 1.0
    if name == "all-reduce":
        return 2 * (n - 1) / n  # in a ring, a reduce-scatter and then an all-gather
    return (n - 1) / n  # all chunks but one


def timed(
    call: Callable[[], object], device: torch.device, samples: int, repeat: int
) -> list[float]:
    """Return the seconds per call on the slowest rank, for each sample of `repeat` calls.

    A barrier before each sample makes all ranks start together. The first sample is dropped: it may
    still open connections.
    """
    seconds = []
    for _ in range(samples + 1):
        dist.barrier()
        runtime.synchronize(device)  # on a GPU the barrier is queued like any other work
        start = time.perf_counter()
        for _ in range(repeat):
            call()
        runtime.synchronize(device)
        seconds.append((time.perf_counter() - start) / repeat)
    slowest = torch.tensor(seconds[1:], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


def fit(sizes: list[int], seconds: list[float]) -> tuple[float, float] | None:
    """Fit seconds = latency + bytes x seconds_per_byte. Return latency and seconds_per_byte.

    Return None if the times do not show both. Relative errors are minimized: absolute ones would
    ignore the microseconds of small messages.
    """
    if len(sizes) < 3:
        return None
    t = np.array(seconds)
    # Each column is a term of the sum, as a share of the measured time.
    terms = np.stack([1 / t, np.array(sizes) / t], axis=1)
    solution = np.linalg.lstsq(terms, np.ones_like(t), rcond=None)
    latency, seconds_per_byte = solution[0].tolist()
    if latency <= 0 or seconds_per_byte <= 0:
        return None
    return latency, seconds_per_byte


# --- the measurement


def measure_size(name: str, size: int, device: torch.device, samples: int) -> dict:
    """Check and time a collective with a buffer of about `size` bytes per rank."""
    n = dist.get_world_size()
    count = max(1, size // 4 // n) * n  # n whole chunks of fp32
    # The numbers 1 to 97, again and again. A chunk in the wrong place has other numbers, and sums
    # over the ranks are exact in fp32.
    base = torch.arange(1.0, 98.0, device=device).repeat(count // 97 + 1)[:count]
    call, result, expected = prepare(name, base)
    call()
    assert torch.equal(result, expected), (
        f"{name} of {base.nbytes} bytes is wrong on rank {dist.get_rank()}"
    )

    repeat = max(1, min(20, BYTES_PER_SAMPLE[device.type] // base.nbytes))
    seconds = timed(call, device, samples, repeat)
    median = statistics.median(seconds)
    return {
        "bytes": base.nbytes,
        "seconds": median,
        "min_seconds": min(seconds),
        "max_seconds": max(seconds),
        "samples": samples,
        "bus_bytes_per_second": bus_factor(name, n) * base.nbytes / median,
    }


def run(name: str, device: torch.device, args) -> dict:
    """Measure a collective at every size up to --max-bytes, and fit the line."""
    measurements = []
    size = SMALLEST_BYTES
    while size <= args.max_bytes:
        measurements.append(measure_size(name, size, device, args.samples))
        size *= 4
    sizes = [measurement["bytes"] for measurement in measurements]
    seconds = [measurement["seconds"] for measurement in measurements]
    return helper.row_of(name, measurements, fit(sizes, seconds), link=args.link_gb_per_s * 1e9)


def predict(row: dict, device: torch.device, samples: int) -> dict[str, float]:
    """Predict the seconds of the all-reduce of a model's fp32 gradients as one message, by model.

    `row` is that of the all-reduce. The prediction for the smallest model is also measured: the
    line was not fitted to a message of this size.
    """
    if row["latency_us"] is None or dist.get_world_size() == 1:
        return {}
    latency = row["latency_us"] / 1e6
    bandwidth = row["bandwidth_gb_per_s"] * 1e9
    predicted = {}
    for name, config in shapes.SIZES.items():
        gradient_bytes = 4 * shapes.parameter_count(config)
        predicted[name] = latency + gradient_bytes / bandwidth

    gradients = torch.zeros(shapes.parameter_count(shapes.SIZES["nano"]), device=device)
    all_reduce = partial(dist.all_reduce, gradients)
    measured = statistics.median(timed(all_reduce, device, samples, repeat=1))
    helper.print_predictions(predicted, measured)
    return predicted


def main() -> int:
    args = lesson.parse_flags(
        __doc__, gpu=GPU_DEFAULTS, relaunches=True, max_bytes=2**24, samples=5, link_gb_per_s=0.0
    )
    if args.max_bytes < SMALLEST_BYTES:
        raise exits.UserError(
            f"--max-bytes {args.max_bytes}: the smallest buffer has {SMALLEST_BYTES} bytes"
        )
    lesson.relaunch(args.device)  # plain python becomes torchrun: a rank per GPU, 2 on a CPU
    device = runtime.init_process_group(args.device)

    names = ["broadcast", "all-reduce", "reduce-scatter", "all-gather", "all-to-all"]
    if dist.get_world_size() > 1:  # a single rank has no neighbour
        names.append("send/recv")
    rows = [run(name, device, args) for name in names]
    predicted = predict(rows[1], device, args.samples)
    lesson.end(
        rows,
        columns=[helper.FITTED, helper.LARGEST],
        checked=helper.check(rows, link=args.link_gb_per_s * 1e9, bus_factor=bus_factor),
        args=args,
        device=device,
        dtype="fp32",
        predicted_seconds=predicted,
    )
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
