"""Know your numbers: what this device computes and moves per second, and what waiting for it costs.

Two rates bound every kernel: the FLOP/s of the arithmetic units and the bytes/s of the memory. Which one is the limit
depends on the FLOP per byte: the roofline plot shows both. Around them: copies between host and device, the price of a
launch, the size below which the CPU beats the GPU beside it, and what an unlucky width costs. Every figure is the
median of --samples, with the lowest and the highest. Matmuls multiply random numbers: zeros or small integers switch
fewer transistors, so that a GPU at its power limit would run at higher clocks and show rates that no training reaches.

    laptop    python 01_devices/benchmark.py
    one GPU   python 01_devices/benchmark.py --samples 20 --json numbers.json
    node      CUDA_VISIBLE_DEVICES=3 python 01_devices/benchmark.py --plot gpu3.png

Look for: how far small and thin matmuls stay below the best of their type. BUG, exit code 1: a rate above the data
sheet's peak, scaled to the highest clock that the driver allows; the timing is wrong then, the hardware not fast. fp8
is timed twice: with sums in fp32, torch's default, and with use_fast_accum=True, which most published figures have.
Before: show.py, doctor.py. Next: monitor.py.
"""

import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
import _benchmark as bench
import _shared as machine

from common import cli, exits, hardware, report, runtime

CPU = torch.device("cpu")
# (M, N, K): x [M, K] times w [N, K] transposed; 32 rows are few tokens against a whole matrix
SHAPES = {
    "cpu": [(128,) * 3, (256,) * 3, (512,) * 3, (1024,) * 3, (32, 2048, 2048), (256, 2048, 1024)],
    "gpu": [
        (512,) * 3,
        (1024,) * 3,
        (2048,) * 3,
        (4096,) * 3,
        (8192,) * 3,
        (32, 8192, 8192),
        (4096, 14_336, 4096),
    ],
}
# unfriendly and friendly by turns: GPT-2's vocabulary and a multiple of 64; a hidden size off by one
WIDTHS = {
    "cpu": [(128, 50_257, 256), (128, 50_304, 256), (512, 1025, 1025), (512, 1024, 1024)],
    "gpu": [(4096, 50_257, 768), (4096, 50_304, 768), (4096, 4097, 4097), (4096, 4096, 4096)],
}
SQUARES = [16, 32, 64, 128, 256, 512, 1000]
ARRAY_BYTES = {"cpu": 2**28, "gpu": 2**29}  # far above every cache; one of this size flushes them
WARM_UP_SECONDS = 0.05  # of every figure
TYPE_WARM_UP_SECONDS = {"cpu": 0.1, "gpu": 1.0}  # once for each type: see main


def warm_up(work: Callable, device: torch.device, seconds: float) -> None:
    """Call work() for so long, and at least once: the first call loads kernels, and clocks rise."""
    deadline = None
    while deadline is None or time.perf_counter() < deadline:
        work()
        runtime.synchronize(device)
        deadline = deadline or time.perf_counter() + seconds


def timed(
    work: Callable, device, samples: int, flush: Tensor | None = None, repeat=1, clock="device"
) -> list[float]:
    """Seconds per call of work(): `samples` means over `repeat` calls each. On a GPU a call returns when it is queued.

    Clock "device": the GPU's own, by CUDA events, which wait in the same queue (elsewhere like "wall"). "wall": until
    each call's result is there. "issue": until the calls return. `flush`, larger than the caches, is written before
    each sample: operands then come from memory, and the GPU is busy while the call is issued, so no launch is timed.
    """
    warm_up(work, device, WARM_UP_SECONDS)
    by_events = device.type == "cuda" and clock == "device"
    seconds = []
    for _ in range(samples):
        runtime.synchronize(device)
        if flush is not None:
            flush.zero_()
        if by_events:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeat):
                work()
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3 / repeat)
        else:
            runtime.synchronize(device)
            began = time.perf_counter()
            for _ in range(repeat):
                work()
                if clock != "issue":
                    runtime.synchronize(device)
            seconds.append((time.perf_counter() - began) / repeat)
    runtime.synchronize(device)
    return seconds


def run(
    kind: str,
    what: str,
    dtype: str | None,
    shape: Sequence[int],
    unit: str,
    values: list[float],
    **own,
) -> dict:
    """A row: median, lowest and highest of the samples, in `unit`."""
    spread = {
        "n": len(values),
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
    }
    return {
        "kind": kind,
        "what": what,
        "dtype": dtype,
        "shape": list(shape),
        "unit": unit,
        **spread,
        **own,
    }


def matmul(
    kind: str, dtype: str, shape: tuple, device: torch.device, samples: int, flush: Tensor
) -> dict:
    x, w = bench.operands(dtype, shape, device)
    multiply = bench.matmul(dtype, x, w)
    result = multiply()
    # 16 x 16 entries are enough
    rows, columns = (slice(None, None, max(1, size // 16)) for size in result.shape)
    exact = x[rows].cpu().double() @ w[columns].cpu().double().t()
    error = (result[rows, columns].cpu().double() - exact).norm() / exact.norm()
    m, n, k = shape
    flop = 2 * m * n * k  # a multiplication and an addition for each of M x N x K
    rates = [flop / seconds for seconds in timed(multiply, device, samples, flush)]
    row = run(
        kind,
        f"{kind} {m:,} x {n:,} x {k:,}",
        dtype,
        shape,
        "FLOP/s",
        rates,
        relative_error=error.item(),
    )
    row["native"] = dtype.removesuffix("_fast") in machine.native_types(device)[0]
    row["flop_per_byte"] = flop / (x.nbytes + w.nbytes + result.nbytes)
    return row


def bandwidth(device: torch.device, samples: int, flush: Tensor, array_bytes: int) -> dict:
    """The triad a = b + 3c: every array read or written counts once, as in STREAM."""
    a, b, c = (torch.randn(array_bytes // 4, device=device) for _ in range(3))
    triad = partial(torch.add, b, c, alpha=3, out=a)
    rates = [3 * a.nbytes / seconds for seconds in timed(triad, device, samples, flush)]
    torch.testing.assert_close(a[::997], b[::997] + 3 * c[::997])
    what = f"triad 3 x {a.nbytes / 2**20:,.0f} MiB"
    # a product, a sum; 3 x 4 bytes
    return run("triad", what, "fp32", a.shape, "B/s", rates, flop_per_byte=2 / 12)


def transfers(device: torch.device, samples: int, transfer_bytes: int) -> list[dict]:
    """Copies with non_blocking=True: B/s until the data is there, and for how long the call keeps the CPU."""
    there = torch.randn(transfer_bytes // 4, device=device)
    found = []
    for memory in ("pageable", "pinned"):
        here = torch.randn(there.shape, pin_memory=memory == "pinned")
        for kind, target, source in (("h2d", there, here), ("d2h", here, there)):
            source.neg_()  # what the target already holds must not pass for a copy
            copy = partial(target.copy_, source, non_blocking=True)
            rates = [
                there.nbytes / seconds for seconds in timed(copy, device, samples, clock="wall")
            ]
            calls = timed(copy, device, samples, clock="issue")
            assert torch.equal(target[::997].cpu(), source[::997].cpu()), (
                f"{kind}, {memory}: the target differs"
            )
            found.append(run(kind, f"{kind}, {memory}", None, there.shape, "B/s", rates))
            found.append(
                run(f"{kind}_call", f"{kind}, {memory}: the call", None, there.shape, "s", calls)
            )
    return found


def launch(device: torch.device, samples: int) -> dict:
    """What an operation costs that has next to nothing to do."""
    add = partial(torch.zeros(1, device=device).add_, 1)
    # fewer than a GPU's queue holds
    seconds = timed(add, device, samples, repeat=500, clock="issue")
    return run("launch", "tiny op, call after call", "fp32", [1], "s", seconds)


def against_cpu(device: torch.device, samples: int) -> list[dict]:
    """fp32, by the watch of whoever waits for the result: forward passes, and square matmuls of growing size."""
    torch.set_float32_matmul_precision("highest")
    # nn.Transformer as built by default
    warnings.filterwarnings("ignore", message="enable_nested_tensor")
    x = torch.randn(1, 512, 512)
    # nn.Transformer takes a target, which tutorials forget, and by default the length before the batch: the same
    # tensor is then 512 sequences of one token, 45 GFLOP in place of 55
    works = [
        (
            "transformer",
            "Transformer, 1 x 512 tokens",
            nn.Transformer(512, batch_first=True),
            [x, x],
        ),
        ("transformer_by_default", "Transformer, 512 x 1 token", nn.Transformer(512), [x, x]),
        *(("square", f"square {n}", torch.mm, [*torch.randn(2, n, n)]) for n in SQUARES),
    ]
    found = []
    for kind, what, work, inputs in works:
        expected = work.eval()(*inputs) if isinstance(work, nn.Module) else work(*inputs)
        for place in ("cpu",) if device == CPU else ("cpu", "gpu"):
            where = CPU if place == "cpu" else device
            work = work.to(where) if isinstance(work, nn.Module) else work
            call = partial(work, *(tensor.to(where) for tensor in inputs))
            torch.testing.assert_close(call().cpu(), expected, rtol=1e-2, atol=1e-2)
            seconds = timed(
                call, where, samples, repeat=10 if kind == "square" else 1, clock="wall"
            )
            found.append(
                run(kind, f"{what}, {place}", "fp32", expected.shape, "s", seconds, place=place)
            )
    return found


def check(rows: list[dict]) -> list[str]:
    for row in rows:
        name, error, limit = f"{row['type']} {row['what']}", row.get("relative_error"), row["limit"]
        assert error is None or error <= bench.TYPES[row["dtype"]][1], (
            f"{name}: relative error {error:.1e}"
        )
        assert not limit or row["max"] <= limit, (
            f"BUG in the timing: {name}: {row['max']:.4g}, at most {limit:.4g}"
        )
    types = ", ".join(dict.fromkeys(row["type"] for row in rows if "relative_error" in row))
    rates = (
        "no rate is above the peak"
        if any(row["limit"] for row in rows)
        else "peaks of this device: not known"
    )
    return [f"matmuls in {types} against float64, all else against what it must give", rates]


@torch.inference_mode()
def main() -> int:
    parser = cli.Parser(__doc__)
    parser.add_argument(
        "--samples", type=cli.positive_int, default=5, help="of every figure, after a warm-up"
    )
    parser.add_argument(
        "--plot", type=cli.writable_file, metavar="PATH", help="draw the roofline, a PNG"
    )
    cli.add_device_and_json(parser)
    args = parser.parse_args()
    device = report.start_lesson(args.device)
    size = "gpu" if device.type == "cuda" else "cpu"
    own = {"matmul_data": "random", **bench.conditions(device)}
    flush = torch.zeros(ARRAY_BYTES[size], dtype=torch.uint8, device=device)
    not_measured = {dtype: why for dtype in bench.TYPES if (why := bench.obstacle(dtype, device))}
    rows = []
    groups = [("matmul", dtype, SHAPES[size]) for dtype in bench.TYPES if dtype not in not_measured]
    for kind, dtype, shapes in [
        *groups,
        ("width", hardware.choose_dtype("auto", device), WIDTHS[size]),
    ]:
        # under load a GPU's clocks sink to what its power limit allows: the first of a type must not be flattered
        multiply = bench.matmul(dtype, *bench.operands(dtype, max(shapes, key=math.prod), device))
        warm_up(multiply, device, TYPE_WARM_UP_SECONDS[size])
        if kind == "width":
            for _ in range(500 if device.type == "cuda" else 0):
                multiply()  # in the queue: the next line reads the clocks while the GPU works
            own["under_load"] = bench.conditions(device)
        rows += [matmul(kind, dtype, shape, device, args.samples, flush) for shape in shapes]
    rows.append(bandwidth(device, args.samples, flush, ARRAY_BYTES[size]))
    rows.append(launch(device, args.samples))
    rows += against_cpu(device, args.samples)
    if device.type == "cuda":
        rows += transfers(device, args.samples, ARRAY_BYTES["cpu"])
    else:
        not_measured["between host and GPU"] = f"only with CUDA, this is {device.type}"
    not_measured |= {"CPU against GPU": "no GPU: only the CPU's side"} if device == CPU else {}
    name = hardware.device_name(device)
    best = bench.compare(rows, name, own.get("sm_clock_max_mhz"))
    ratios = bench.ratios(rows, best)
    own |= {"best": best, **ratios, "not_measured": not_measured}
    columns = {"what": "what", "type": "type", "measured": "median (lowest to highest)"}
    columns |= {"peak_share": "of peak", "best_share": "of best"}
    report.end_lesson(rows, columns=columns, checked=check(rows), args=args, device=device, **own)
    facts = {
        key: own["under_load"].get(key)
        for key in ("cpu", "cpu_threads", "sm_clock_mhz", "power_watts")
    } | ratios
    lines = [
        f"{key.replace('_', ' ')}: {report.for_people(key, value)}" for key, value in facts.items()
    ]
    lines += [
        f"not measured: {bench.LABELS.get(what, what)}: {why}" for what, why in not_measured.items()
    ]
    print("\n".join(lines))
    if args.plot:
        print(bench.plot_roofline(rows, best, own["cpu"] if device == CPU else name, args.plot))
    return 0


if __name__ == "__main__":
    exits.run(main)
