"""What collectives cost: the six collectives that training is made of, measured and checked for correct results.

Ranks hold buffers of equal size; a collective is a call that all of them make. DDP all-reduces gradients; FSDP
all-gathers weights and reduce-scatters gradients; experts and sequences move by all-to-all, pipelines by send/recv.
The time of each is nearly latency + bytes / bandwidth: small messages pay the first, large ones the second. The two
numbers are fitted for each collective, and tell how long the gradients of a model will take. The fit (`fit`), the bytes
that a rank must send (`bus_factor`) and the forecast (`predictions`) are in _collectives.py.

    laptop    python 05_ddp/collectives.py
    one node  torchrun --nproc_per_node=8 05_ddp/collectives.py --max-bytes 4294967296 --samples 20
    cluster   the same on every node, with --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400

Algorithm bandwidth = size / time. Bus bandwidth = bytes each rank must send / time; compare it with one direction of
the link. This is nccl-tests' convention; size is the whole buffer (n chunks). A ring all-reduce sends each buffer
2 (n - 1) / n times. A switch that adds up (NVLS) sends it once, so its bus bandwidth may be above the peak, but not
its algorithm bandwidth.
Look for: times that do not grow below some 10 KiB (latency only: that is why DDP sends buckets, not tensors); on
GPUs, bus bandwidths of large sizes that agree; lowest and highest far apart: the machine has other work.
BUG, exit code 1: more than the link's peak; the timing is wrong then. Before: train.py. Next: stragglers.py.
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common/, with nothing installed
from _collectives import bugs, fit, measurement, nvlink, plot, predictions, say_predictions

from common import cli, exits, hardware, lesson, runtime

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the newer name, where it is
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
ROOT = 0  # who broadcasts
MAX_BYTES = {"cpu": 2**24, "cuda": 2**30}


def collectives(mine: Tensor, out: Tensor, rank: int, n: int) -> dict[str, tuple[Callable, Tensor]]:
    """Name: (the call, where its result will be). A rank has `mine`; `out` is a copy of it for calls that work in
    place. Both are n chunks long: a scatter leaves each rank one chunk, a gather starts from one."""
    chunk = mine.numel() // n

    def send_and_receive() -> None:  # round the ring, all ranks at once: one that sent first would wait for ever
        there = dist.P2POp(dist.isend, mine, (rank + 1) % n)
        back = dist.P2POp(dist.irecv, out, (rank - 1) % n)
        for work in dist.batch_isend_irecv([there, back]):
            work.wait()

    return {
        "broadcast": (partial(dist.broadcast, out, src=ROOT), out),
        "all-reduce": (partial(dist.all_reduce, out), out),
        "reduce-scatter": (partial(reduce_scatter, out[:chunk], mine), out[:chunk]),
        "all-gather": (partial(all_gather, out, mine[:chunk]), out),
        "all-to-all": (partial(dist.all_to_all_single, out, mine), out),
        "send/recv": (send_and_receive, out),
    }


def pattern(count: int, device: torch.device) -> Tensor:
    """1 to 97, again and again: a chunk in the wrong place shows, and sums over ranks stay exact in fp32."""
    return torch.arange(1.0, 98.0, device=device).repeat(count // 97 + 1)[:count]


def expected(name: str, base: Tensor, rank: int, n: int) -> Tensor:
    """The result when each rank r holds (r + 1) times the base."""
    size = base.numel() // n
    chunk = slice(rank * size, (rank + 1) * size)
    holders = torch.arange(1.0, n + 1, device=base.device)
    total = base * (n * (n + 1) / 2)
    return {
        "broadcast": lambda: base * (ROOT + 1),
        "all-reduce": lambda: total,
        "reduce-scatter": lambda: total[chunk],
        "all-gather": lambda: torch.outer(holders, base[:size]).flatten(),
        "all-to-all": lambda: torch.outer(holders, base[chunk]).flatten(),  # a transpose: chunk r of every rank
        "send/recv": lambda: base * ((rank - 1) % n + 1),
    }[name]()


def check_result(name: str, work: Callable, result: Tensor, mine: Tensor, out: Tensor, rank: int, n: int) -> None:
    """AssertionError unless the collective gives what it must, to the bit."""
    out.copy_(mine)
    work()
    right = torch.equal(result, expected(name, mine / (rank + 1), rank, n))
    assert right, f"{name} of {mine.nbytes} bytes is wrong on rank {rank}"


def timed(work: Callable, device: torch.device, samples: int, repeat: int) -> list[float]:
    """Seconds per call, by the slowest rank: none can go on before it. Each sample is `repeat` calls after a
    barrier; the first, which may still open connections, is dropped."""
    seconds = []
    for _ in range(samples + 1):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()  # the barrier itself must not be in the queue
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
        began = time.perf_counter()
        for _ in range(repeat):
            work()
        if device.type == "cuda":
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3 / repeat)
        else:
            seconds.append((time.perf_counter() - began) / repeat)
    slowest = torch.tensor(seconds[1:], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


def measure(device: torch.device, max_bytes: int, samples: int, peak: float | None) -> tuple[list[dict], dict]:
    """Check and time every collective at every size; and which ones this backend cannot do, with its reason."""
    rank, n = dist.get_rank(), dist.get_world_size()
    measured = []
    missing = {} if n > 1 else {"send/recv": "a world of one has no neighbour"}
    size = 1024
    while size <= max_bytes:
        count = max(1, size // 4 // n) * n  # n whole chunks of fp32
        mine = pattern(count, device) * (rank + 1)
        out = torch.empty_like(mine)
        for name, (work, result) in collectives(mine, out, rank, n).items():
            if name in missing:
                continue
            try:
                check_result(name, work, result, mine, out, rank, n)
            except (RuntimeError, NotImplementedError) as error:
                if "support" not in str(error):  # no lack of the backend: a failure
                    raise
                missing[name] = str(error).splitlines()[0]
                continue
            enough = 2**26 if device.type == "cuda" else 2**20  # small ones are over sooner than a barrier, or a launch
            repeat = max(1, min(20, enough // mine.nbytes))
            measured.append(measurement(name, n, mine.nbytes, timed(work, device, samples, repeat), peak))
        size *= 4
    return measured, missing


def run(name: str, measured: list[dict], line: dict | None) -> dict:
    """The row of one collective: its line, and its largest size."""
    largest = [m for m in measured if m["collective"] == name][-1]
    return {
        "collective": name,
        "latency_us": 1e6 * line["alpha_seconds"] if line else None,
        "bandwidth_gb_per_s": line["beta_bytes_per_second"] / 1e9 if line else None,
        "typical_error_ratio": line["factor_off_median"] if line else None,
        "bytes": largest["bytes"],
        "seconds": largest["seconds_median"],
        "min_seconds": largest["seconds_min"],
        "max_seconds": largest["seconds_max"],
        "bus_gb_per_s": largest["bus_bytes_per_second"] / 1e9,
        "peak_share": largest["share_of_peak"],
    }


def check(measured: list[dict], peak: float | None) -> list[str]:
    """The results themselves have been compared before they were timed."""
    wrong = bugs(measured, peak)
    assert not wrong, f"BUG: faster than the link can be, so the timing is wrong: {'; '.join(wrong)}"
    names = len({m["collective"] for m in measured})
    checked = [f"{len(measured)} results of {names} collectives, to the bit, on all {dist.get_world_size()} ranks"]
    return [*checked, "nothing is above the link's peak"] if peak else checked


COLUMNS = {
    "collective": "collective",
    "latency_us": "latency, µs",
    "bandwidth_gb_per_s": "bandwidth, GB/s",
    "typical_error_ratio": "typical error",
    "bytes": "largest size",
    "seconds": "its time",
    "bus_gb_per_s": "bus GB/s",
    "peak_share": "of peak",
}


def main() -> int:
    parser = cli.Parser(__doc__)
    parser.add_argument("--max-bytes", type=cli.positive_int, help="largest buffer (default: CPU 16 MiB, GPU 1 GiB)")
    parser.add_argument("--samples", type=cli.positive_int, default=5, help="of every figure, after a warm-up")
    parser.add_argument("--plot", type=cli.writable_file, metavar="PATH", help="a PNG of times and bandwidths by size")
    cli.add_device_and_json(parser)
    args = parser.parse_args()
    if args.max_bytes is not None and args.max_bytes < 1024:
        raise exits.UserError(f"--max-bytes {args.max_bytes}: the smallest buffer has 1024 bytes")
    lesson.relaunch(args.device)
    device = runtime.init_process_group(args.device)
    n = dist.get_world_size()
    backend = "nccl" if device.type == "cuda" else "gloo"
    peak, link = nvlink(device, one_node=all(runtime.gather(runtime.ranks()[2] == dist.get_rank())))
    runtime.say(f"{backend}; link's peak: {f'{peak / 1e9:g} GB/s' if peak else 'n/a'} ({link})")

    measured, missing = measure(device, args.max_bytes or MAX_BYTES[device.type], args.samples, peak)
    fits = {}
    for name in dict.fromkeys(m["collective"] for m in measured):
        own = [m for m in measured if m["collective"] == name]
        fits[name] = fit([m["bytes"] for m in own], [m["seconds_median"] for m in own])
    predicted = predictions(fits["all-reduce"]) if n > 1 and fits.get("all-reduce") else []
    for p in predicted[:2]:  # nano's gradients, in fp32 and bf16: the line was not fitted through these
        dtype = torch.float32 if p["gradients"] == "fp32" else torch.bfloat16
        gradients = torch.zeros(p["bytes"] // dtype.itemsize, dtype=dtype, device=device)
        seconds = timed(partial(dist.all_reduce, gradients), device, args.samples, 1)
        p["measured_seconds"] = statistics.median(seconds)
        p["measured_seconds_min"] = min(seconds)
        p["measured_seconds_max"] = max(seconds)
    say_predictions(predicted)
    for name, reason in missing.items():
        runtime.say(f"not measured: {name}: {reason}")
    if args.plot and runtime.is_rank0():
        plot(measured, fits, peak, f"{n} x {hardware.device_name(device)}, {backend}", args.plot)
    lesson.end(
        [run(name, measured, line) for name, line in fits.items()],
        columns=COLUMNS,
        checked=check(measured, peak),
        args=args,
        device=device,
        dtype="fp32",
        backend=backend,
        link=link,
        link_peak_bytes_per_second=peak,
        measurements=measured,
        fits=fits,
        predictions=predicted,
        not_measured=missing,
    )
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
