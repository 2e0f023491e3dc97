"""Know your numbers: what this device computes and moves per second, and what waiting for it costs.

Two rates bound every kernel: the FLOP/s of the arithmetic units and the bytes/s of the memory. Which one binds is
a question of its FLOP per byte: the roofline plot shows both, and where real matrix products land. Around them:
copies between host and device, the price of a launch, the size below which the CPU beats the GPU beside it, and
what an unlucky width costs. Every figure is the median of --samples, with the lowest and the highest.

    laptop    python 01_devices/benchmark.py
    one GPU   python 01_devices/benchmark.py --samples 20 --json numbers.json
    node      CUDA_VISIBLE_DEVICES=3 python 01_devices/benchmark.py --plot gpu3.png

Look for: how far small and thin products stay below the ceiling, the best that any shape reached in that type; a
lowest and highest far apart: the machine has other work. BUG, exit code 1: a rate above the data sheet's peak; the
timing is wrong then, the hardware not fast.
How it is timed: _benchmark_timing.py. Before: show.py, doctor.py. Next: monitor.py, ../02_tensors_precision/.
"""

import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common/, with nothing installed
from _benchmark_products import TYPES, not_native, operands, product, relative_error
from _benchmark_report import bugs, ceilings, conclusions, figure, plot_roofline, show
from _benchmark_timing import WARM_UP_SECONDS, buffer_bytes, conditions, timed, warm_up

from common import cli, exits, hardware, report, runtime

CPU = torch.device("cpu")
# (M, N, K): x [M, K] times w [N, K] transposed; 32 rows are few tokens against a whole matrix
SHAPES = {
    "cpu": [(128,) * 3, (256,) * 3, (512,) * 3, (1024,) * 3, (32, 2048, 2048), (256, 2048, 1024)],
    "gpu": [(512,) * 3, (1024,) * 3, (2048,) * 3, (4096,) * 3, (8192,) * 3, (32, 8192, 8192), (4096, 14_336, 4096)],
}
# unfriendly and friendly by turns: GPT-2's vocabulary and a multiple of 64; a hidden size off by one
WIDTHS = {
    "cpu": [(128, 50_257, 256), (128, 50_304, 256), (512, 1025, 1025), (512, 1024, 1024)],
    "gpu": [(4096, 50_257, 768), (4096, 50_304, 768), (4096, 4097, 4097), (4096, 4096, 4096)],
}
SQUARES = [16, 32, 64, 128, 256, 512, 1000]
ARRAY_BYTES, FLUSH_BYTES = {"cpu": 2**28, "gpu": 2**30}, {"cpu": 2**27, "gpu": 2**29}  # at most: _benchmark_timing.py
TYPE_WARM_UP_SECONDS = {"cpu": 0.1, "gpu": 1.0}  # once for each type, beside that of every figure


def matmul(kind: str, dtype: str, shape: tuple, device: torch.device, samples: int, flush: Tensor) -> dict:
    """FLOP/s of a product of random operands. AssertionError if its result is wrong."""
    x, w = operands(dtype, shape, device)
    multiply = product(dtype, x, w)
    result = multiply()
    error, limit = relative_error(result, x, w), TYPES[dtype][1]
    assert error <= limit, f"{dtype} {shape}: relative error {error:.1e} is above {limit:.1e}"
    m, n, k = shape
    flop = 2 * m * n * k  # a multiplication and an addition for each of M x N x K
    rates = [flop / seconds for seconds in timed(multiply, device, samples, flush)]
    peak = hardware.peak_flops(hardware.device_name(device), dtype)
    more = {"flop_per_byte": flop / (x.nbytes + w.nbytes + result.nbytes), "relative_error": error}
    return figure(kind, f"{m:,} x {n:,} x {k:,}", dtype, shape, rates, "FLOP/s", peak, **more)


def bandwidth(device: torch.device, samples: int, flush: Tensor, array_bytes: int) -> list[dict]:
    """Copy a = b and triad a = b + 3c: every array read or written counts once, as in STREAM."""
    a, b, c = (torch.randn(array_bytes // 4, device=device) for _ in range(3))
    found, peak = [], hardware.memory_bandwidth(hardware.device_name(device))
    for kind, arrays, flop, work, expected in (
        ("copy", 2, 0, partial(a.copy_, b), lambda: b[::997]),
        ("triad", 3, 2, partial(torch.add, b, c, alpha=3, out=a), lambda: b[::997] + 3 * c[::997]),
    ):
        rates = [arrays * a.nbytes / seconds for seconds in timed(work, device, samples, flush)]
        torch.testing.assert_close(a[::997], expected())
        what, more = f"{kind}: {arrays} x {a.nbytes:,} bytes", {"flop_per_byte": flop / (4 * arrays)}
        found.append(figure(kind, what, "fp32", a.shape, rates, "B/s", peak, **more))
    return found


def transfers(device: torch.device, samples: int, transfer_bytes: int) -> list[dict]:
    """Between host and GPU: B/s until the data is there, and for how long the call keeps the CPU."""
    found, there = [], torch.randn(transfer_bytes // 4, device=device)
    for memory in ("pageable", "pinned"):
        here = torch.randn(there.shape, pin_memory=memory == "pinned")
        for kind, target, source in (("h2d", there, here), ("d2h", here, there)):
            for non_blocking in (False, True):
                source.neg_()  # what the target already holds must not pass for a copy
                copy = partial(target.copy_, source, non_blocking=non_blocking)
                what = f"{kind}, {memory}, {'non-blocking' if non_blocking else 'blocking'}"
                rates = [there.nbytes / seconds for seconds in timed(copy, device, samples, clock="wall")]
                calls = timed(copy, device, samples, clock="issue")
                assert torch.equal(target[::997].cpu(), source[::997].cpu()), what
                found.append(figure(kind, what, None, there.shape, rates, "B/s"))
                found.append(figure(f"{kind}_call", f"{what}: the call", None, there.shape, calls, "s"))
    return found


def launches(device: torch.device, samples: int) -> list[dict]:
    """What an operation costs that has next to nothing to do."""
    add = partial(torch.zeros(1, device=device).add_, 1)
    calls = timed(add, device, samples, repeat=500, clock="issue")  # fewer than a GPU's queue holds
    found = [figure("launch", "call after call", "fp32", [1], calls, "s")]
    if device != CPU:
        trips = timed(add, device, samples, repeat=100, clock="wall")
        found.append(figure("round_trip", "waiting for each", "fp32", [1], trips, "s"))
    return found


def against_cpu(device: torch.device, samples: int) -> list[dict]:
    """fp32, by the watch of whoever waits for the result: forward passes, and square products of growing size."""
    torch.set_float32_matmul_precision("highest")
    found = []

    def add(kind: str, what: str, place: str, work: Callable[[], Tensor], expected: Tensor) -> None:
        torch.testing.assert_close(work().cpu(), expected, rtol=1e-2, atol=1e-2)
        repeat, side = 10 if kind == "square" else 1, CPU if place == "cpu" else device
        seconds = timed(work, side, samples, repeat=repeat, clock="wall")
        found.append(figure(kind, f"{what}, {place}", "fp32", expected.shape, seconds, "s", place=place))

    x = torch.randn(1, 512, 512)
    for kind, net, inputs in (
        ("encoder_layer", nn.TransformerEncoderLayer(512, 8, batch_first=True), [x]),
        ("transformer", nn.Transformer(512, batch_first=True), [x, x]),  # it takes a target, which tutorials forget
    ):
        expected = net.eval()(*inputs)
        add(kind, type(net).__name__, "cpu", partial(net, *inputs), expected)
        if device != CPU:
            there = partial(net.to(device), *(tensor.to(device) for tensor in inputs))
            add(kind, type(net).__name__, "gpu", there, expected)
    for n in SQUARES:
        a, b = torch.randn(2, n, n)
        add("square", f"{n}", "cpu", partial(torch.mm, a, b), a @ b)
        if device != CPU:
            add("square", f"{n}", "gpu", partial(torch.mm, a.to(device), b.to(device)), a @ b)
            with_copies = partial(lambda a, b: (a.to(device) @ b.to(device)).cpu(), a, b)
            add("square", f"{n}", "gpu with copies", with_copies, a @ b)
    return found


@torch.inference_mode()
def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--device", choices=("auto", "cuda", "mps", "cpu"), default="auto")
    add("--samples", type=cli.positive_int, default=5, help="of every figure, after a warm-up")
    add("--plot", type=cli.plot_file, metavar="PATH", default="runs/roofline.png", help="roofline, a PNG (%(default)s)")
    add("--json", type=cli.writable_file, metavar="PATH", help="write every figure as one JSON object")
    args = parser.parse_args()
    began = time.perf_counter()
    device = runtime.single_device(args.device)
    runtime.seed(0, False)
    name, size = hardware.device_name(device), "gpu" if device.type == "cuda" else "cpu"
    array_bytes, flush_bytes = buffer_bytes(device, ARRAY_BYTES[size], FLUSH_BYTES[size])
    summary = {"device": name, **conditions(device), "array_bytes": array_bytes, "flush_bytes": flush_bytes}
    summary |= {"type_warm_up_seconds": TYPE_WARM_UP_SECONDS[size], "figure_warm_up_seconds": WARM_UP_SECONDS}
    summary["samples"] = args.samples
    print("\n".join(f"{key:<22} {value}" for key, value in {"torch": torch.__version__, **summary}.items()), flush=True)

    flush = torch.zeros(flush_bytes, dtype=torch.uint8, device=device)
    unseen = {dtype: why for dtype in TYPES if (why := not_native(dtype, device))}
    native = [dtype for dtype in TYPES if dtype not in unseen]
    found, common_type = [], "bf16" if "bf16" in native else "fp32"
    for kind, dtype, shapes in [("matmul", d, SHAPES[size]) for d in native] + [("width", common_type, WIDTHS[size])]:
        # under load a GPU's clocks sink to what its power limit allows: the first of a type must not be flattered
        largest = max(shapes, key=math.prod)
        warm_up(product(dtype, *operands(dtype, largest, device)), device, TYPE_WARM_UP_SECONDS[size])
        found += [matmul(kind, dtype, shape, device, args.samples, flush) for shape in shapes]
    summary["after_matmuls"] = conditions(device)
    found += bandwidth(device, args.samples, flush, array_bytes)
    found += launches(device, args.samples)
    found += against_cpu(device, args.samples)
    if device.type == "cuda":
        found += transfers(device, args.samples, min(array_bytes, ARRAY_BYTES["cpu"]))
    else:
        unseen["between host and GPU"] = f"only with CUDA, this is {device.type}"
    if device == CPU:
        unseen["CPU against GPU"] = "no GPU here or --device cpu: only the CPU's side"

    slack = 1.25 if "GeForce" in name else 1.0  # their clocks go above the boost clock that the data sheet counts with
    best, wrong, known = ceilings(found), bugs(found, slack), any(f["peak"] for f in found)
    facts = conclusions(found, best)
    show(found, facts, unseen)
    checked = [f["dtype"] for f in found if "relative_error" in f]
    print(f"checked: {len(checked)} products in {', '.join(dict.fromkeys(checked))} against float64, within rounding;")
    print("         copies, triad, forward passes and square products against what they must give")
    print("\n".join(f"BUG: {line}" for line in wrong) or f"peaks: {'no rate is above its own' if known else 'n/a'}")
    summary |= {"verdict": "BUG" if wrong else "ok" if known else None, "bugs": wrong, **facts, "ceilings": best}
    summary |= {"not_measured": unseen, "measurements": found, "seconds": time.perf_counter() - began}
    summary |= {"world_size": 1, "peak_memory_bytes": report.peak_memory_bytes(device)}
    report.write_json(summary, args.json)
    drawn = plot_roofline(found, best, name, args.plot)
    print(f"roofline: {args.plot}" if drawn else "no roofline (pip install matplotlib)")
    return 1 if wrong else 0


if __name__ == "__main__":
    exits.run(main)
