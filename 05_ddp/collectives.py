"""What collectives cost: the six collectives that training is made of, checked for correct results and measured.

Ranks hold buffers of equal size; a collective is a call that all of them make. DDP all-reduces gradients; FSDP
all-gathers weights and reduce-scatters gradients; experts and sequences move by all-to-all, pipelines by send/recv.
The time of each is nearly latency + bytes / bandwidth: small messages pay the first, large ones the second. The two
numbers are fitted for each collective, and tell how long the gradients of a model will take.

    laptop    python 05_ddp/collectives.py
    one node  torchrun --nproc_per_node=8 05_ddp/collectives.py --max-bytes 4294967296 --samples 20 --link-gb-per-s 450
    cluster   the same on every node, with --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400

Bus bandwidth = bytes that each rank must send / time, as nccl-tests counts it; size is the whole buffer (n chunks).
--link-gb-per-s is what the link carries in one direction, by its data sheet: NVLink 300 for an A100, 450 for an H100
or H200, 900 for a B200. A ring all-reduce sends each buffer 2 (n - 1) / n times. A switch that adds up (NVLS) sends it
once, so its bus bandwidth may be above the link's; the buffer itself cannot be faster.
Look for: times that do not grow below some 10 KiB (latency only: that is why DDP sends buckets, not tensors); on
GPUs, bus bandwidths that agree; lowest and highest far apart: the machine has other work.
Before: train.py. Next: stragglers.py.
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits, report, runtime
from lm import shapes

# the newer name, where it is
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
SMALLEST = 1024  # bytes


def collectives(base: Tensor, rank: int, n: int) -> dict[str, tuple[Callable, Tensor, Callable]]:
    """Name: (the call, where its result will be, what it must be) if each rank r holds (r + 1) times the base. Buffers
    are n chunks long: a scatter leaves each rank one chunk, a gather starts from one."""
    mine = base * (rank + 1)
    out = mine.clone()  # for those that work in place
    size = base.numel() // n
    my_chunk = base[rank * size : (rank + 1) * size]
    holders = torch.arange(1.0, n + 1, device=base.device)
    total = n * (n + 1) / 2

    # round the ring, all ranks at once: one that sent first would wait for ever
    def send_and_receive() -> None:
        there = dist.P2POp(dist.isend, mine, (rank + 1) % n)
        back = dist.P2POp(dist.irecv, out, (rank - 1) % n)
        for work in dist.batch_isend_irecv([there, back]):
            work.wait()

    return {
        "broadcast": (partial(dist.broadcast, out, src=0), out, lambda: base),
        "all-reduce": (partial(dist.all_reduce, out), out, lambda: base * total),
        "reduce-scatter": (
            partial(reduce_scatter, out[:size], mine),
            out[:size],
            lambda: my_chunk * total,
        ),
        "all-gather": (
            partial(all_gather, out, mine[:size]),
            out,
            lambda: torch.outer(holders, base[:size]).flatten(),
        ),
        # a transpose: chunk r of every rank
        "all-to-all": (
            partial(dist.all_to_all_single, out, mine),
            out,
            lambda: torch.outer(holders, my_chunk).flatten(),
        ),
        "send/recv": (send_and_receive, out, lambda: base * ((rank - 1) % n + 1)),
    }


def bus_factor(name: str, n: int) -> float:
    """Bytes that each of n ranks must send over the bytes in its buffer. A ring all-reduce is a reduce-scatter and an
    all-gather; in each, a rank sends n - 1 of n chunks."""
    if n == 1:
        return 0.0
    return {"broadcast": 1.0, "send/recv": 1.0, "all-reduce": 2 * (n - 1) / n}.get(
        name, (n - 1) / n
    )


def timed(work: Callable, device: torch.device, samples: int, repeat: int) -> list[float]:
    """Seconds per call, by the slowest rank: none can go on before it. Each sample is `repeat` calls after a
    barrier; the first, which may still open connections, is dropped."""
    seconds = []
    for _ in range(samples + 1):
        dist.barrier()
        runtime.synchronize(device)  # the barrier itself must not be in a GPU's queue
        began = time.perf_counter()
        for _ in range(repeat):
            work()
        runtime.synchronize(device)
        seconds.append((time.perf_counter() - began) / repeat)
    slowest = torch.tensor(seconds[1:], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


def fit(sizes: list[int], seconds: list[float]) -> tuple[float, float] | None:
    """Latency and seconds per byte of t = latency + bytes x seconds per byte; None if the times do not show both.

    Least squares of the relative errors: plain ones would not see the microseconds of small messages.
    """
    t = np.array(seconds)
    # the line at each size, as a share of the measured time
    terms = np.stack([1 / t, np.array(sizes) / t], axis=1)
    latency, per_byte = np.linalg.lstsq(terms, np.ones_like(t), rcond=None)[0].tolist()
    return (latency, per_byte) if len(sizes) > 2 and latency > 0 and per_byte > 0 else None


def run(name: str, device: torch.device, max_bytes: int, samples: int, link: float) -> dict:
    """One collective: checked and timed at every size, and the line through its times. `link` is in bytes/s."""
    rank, n = dist.get_rank(), dist.get_world_size()
    measurements = []
    size = SMALLEST
    while size <= max_bytes:
        count = max(1, size // 4 // n) * n  # n whole chunks of fp32
        # 1 to 97, again and again: a chunk in the wrong place shows, and sums over ranks stay exact in fp32
        base = torch.arange(1.0, 98.0, device=device).repeat(count // 97 + 1)[:count]
        work, result, expected = collectives(base, rank, n)[name]
        work()
        assert torch.equal(result, expected()), (
            f"{name} of {base.nbytes} bytes is wrong on rank {rank}"
        )
        # small ones are over sooner than a barrier, or a launch
        enough = 2**26 if device.type == "cuda" else 2**20
        seconds = timed(work, device, samples, repeat=max(1, min(20, enough // base.nbytes)))
        measurements.append(
            {
                "bytes": base.nbytes,
                "seconds": statistics.median(seconds),
                "min_seconds": min(seconds),
                "max_seconds": max(seconds),
                "samples": samples,
                "bus_bytes_per_second": bus_factor(name, n)
                * base.nbytes
                / statistics.median(seconds),
            }
        )
        size *= 4
    sizes, times = ([m[key] for m in measurements] for key in ("bytes", "seconds"))
    line = fit(sizes, times)
    errors = (
        [
            abs(line[0] + line[1] * size - time) / time
            for size, time in zip(sizes, times, strict=True)
        ]
        if line
        else []
    )
    largest = measurements[-1]
    return {
        "collective": name,
        "latency_us": 1e6 * line[0] if line else None,
        "bandwidth_gb_per_s": 1e-9 / line[1] if line else None,
        "typical_error_share": statistics.median(errors) if errors else None,
        **largest,
        "bus_gb_per_s": largest["bus_bytes_per_second"] / 1e9,
        "link_share": largest["bus_bytes_per_second"] / link if link else None,
        "measurements": measurements,
    }


def predict(row: dict, device: torch.device, samples: int) -> dict[str, float]:
    """By model: seconds of the all-reduce of its fp32 gradients as one message, by the fitted line. The smallest is
    measured, too: its size is none of those that the line was fitted through."""
    if row["latency_us"] is None or dist.get_world_size() == 1:
        return {}
    predicted = {}
    for name, config in shapes.SIZES.items():
        size = 4 * shapes.parameter_count(config)
        predicted[name] = row["latency_us"] / 1e6 + size / row["bandwidth_gb_per_s"] / 1e9
    text = ", ".join(
        f"{name} {report.for_people('seconds', seconds)}" for name, seconds in predicted.items()
    )
    runtime.print0(f"predicted, all-reduce of the gradients in fp32: {text}")
    gradients = torch.zeros(shapes.parameter_count(shapes.SIZES["nano"]), device=device)
    seconds = statistics.median(
        timed(partial(dist.all_reduce, gradients), device, samples, repeat=1)
    )
    runtime.print0(
        f"measured, nano: {report.for_people('seconds', seconds)}, {seconds / predicted['nano']:.2f} times that"
    )
    return predicted


def check(rows: list[dict], link: float) -> list[str]:
    """The results themselves have been compared before they were timed."""
    measured = [(row["collective"], m) for row in rows for m in row["measurements"]]
    checked = [
        f"{len(measured)} results of {len(rows)} collectives, to the bit, on all {dist.get_world_size()} ranks"
    ]
    if not link:
        return checked
    for name, m in measured:
        rate = min(1.0, bus_factor(name, dist.get_world_size())) * m["bytes"] / m["min_seconds"]
        assert rate <= link, (
            f"BUG: {name} of {m['bytes']} bytes is faster than the link, so the timing is wrong"
        )
    return [*checked, "nothing is faster than the link"]


COLUMNS = {
    "collective": "collective",
    "latency_us": "latency, µs",
    "bandwidth_gb_per_s": "bandwidth, GB/s",
    "typical_error_share": "typical error",
    "bytes": "largest size",
    "seconds": "its time",
    "bus_gb_per_s": "bus GB/s",
    "link_share": "of the link",
}


def main() -> int:
    args = report.lesson_flags(__doc__, max_bytes=2**24, samples=5, link_gb_per_s=0.0)
    if args.max_bytes < SMALLEST:
        raise exits.UserError(
            f"--max-bytes {args.max_bytes}: the smallest buffer has {SMALLEST} bytes"
        )
    runtime.relaunch(args.device)
    device = runtime.init_process_group(args.device)
    link = 1e9 * args.link_gb_per_s
    names = ["broadcast", "all-reduce", "reduce-scatter", "all-gather", "all-to-all"]
    if dist.get_world_size() > 1:  # alone, a rank has no neighbour
        names.append("send/recv")
    rows = [run(name, device, args.max_bytes, args.samples, link) for name in names]
    predicted = predict(rows[1], device, args.samples)
    report.end_lesson(
        rows,
        columns=COLUMNS,
        checked=check(rows, link),
        args=args,
        device=device,
        dtype="fp32",
        predicted_seconds=predicted,
    )
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
