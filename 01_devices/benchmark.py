"""Know your numbers: what this device computes and moves per second, and what waiting for it costs.

Two rates bound every kernel: the FLOP/s of the arithmetic units and the bytes/s of the memory. Which one is the limit
depends on the FLOP per byte: the roofline plot shows both, and where real matrix products land. Around them:
copies between host and device, the price of a launch, the size below which the CPU beats the GPU beside it, and
what an unlucky width costs. Every figure is the median of --samples, with the lowest and the highest.

    laptop    python 01_devices/benchmark.py
    one GPU   python 01_devices/benchmark.py --samples 20 --json numbers.json
    node      CUDA_VISIBLE_DEVICES=3 python 01_devices/benchmark.py --plot gpu3.png

Look for: how far small and thin products stay below the best that any shape reached in that type. Lowest and highest
far apart: the machine has other work. BUG, exit code 1: a rate above the data sheet's peak, scaled to the highest
clock that the driver allows; the timing is wrong then, the hardware not fast. fp8 is timed twice: with sums in fp32,
torch's default, and with use_fast_accum=True, which most published figures have.
How it is timed: _benchmark_timing.py. Before: show.py, doctor.py. Next: monitor.py, ../02_tensors_precision/.
"""

import math
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # old/, with nothing installed
from _benchmark_products import LABELS, TYPES, limit_flops, obstacle, operands, product, relative_error
from _benchmark_report import bugs, ceilings, conclusions, figure, plot_roofline, print_conditions, print_tables
from _benchmark_timing import WARM_UP_SECONDS, buffer_bytes, conditions, conditions_under_load, timed, warm_up

from old import cli, exits, hardware, report, runtime

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
ARRAY_BYTES = {"cpu": 2**28, "gpu": 2**30}  # at most: _benchmark_timing.py
FLUSH_BYTES = {"cpu": 2**27, "gpu": 2**29}
TYPE_WARM_UP_SECONDS = {"cpu": 0.1, "gpu": 1.0}  # once for each type, beside that of every figure


def matmul(kind: str, dtype: str, shape: tuple, device: torch.device, samples: int, flush: Tensor) -> dict:
    """FLOP/s of a product of random operands. AssertionError if its result is wrong."""
    x, w = operands(dtype, shape, device)
    multiply = product(dtype, x, w)
    result = multiply()
    error, allowed = relative_error(result, x, w), TYPES[dtype][1]
    assert error <= allowed, f"{dtype} {shape}: relative error {error:.1e} is above {allowed:.1e}"

    m, n, k = shape
    flop = 2 * m * n * k  # a multiplication and an addition for each of M x N x K
    rates = [flop / seconds for seconds in timed(multiply, device, samples, flush)]
    type_on_sheet = dtype.removesuffix("_fast")
    return figure(
        kind,
        f"{m:,} x {n:,} x {k:,}",
        dtype,
        shape,
        rates,
        "FLOP/s",
        peak=hardware.peak_flops(hardware.device_name(device), type_on_sheet),
        native=type_on_sheet in hardware.native_types(device)[0],
        flop_per_byte=flop / (x.nbytes + w.nbytes + result.nbytes),
        relative_error=error,
    )


def bandwidth(device: torch.device, samples: int, flush: Tensor, array_bytes: int) -> list[dict]:
    """Copy a = b and triad a = b + 3c: every array read or written counts once, as in STREAM."""
    a, b, c = (torch.randn(array_bytes // 4, device=device) for _ in range(3))
    peak = hardware.memory_bandwidth(hardware.device_name(device))
    found = []
    for kind, arrays, flop, work, expected in (
        ("copy", 2, 0, partial(a.copy_, b), lambda: b[::997]),
        ("triad", 3, 2, partial(torch.add, b, c, alpha=3, out=a), lambda: b[::997] + 3 * c[::997]),
    ):
        rates = [arrays * a.nbytes / seconds for seconds in timed(work, device, samples, flush)]
        torch.testing.assert_close(a[::997], expected())
        what = f"{kind}: {arrays} x {a.nbytes / 2**20:,.0f} MiB"
        found.append(figure(kind, what, "fp32", a.shape, rates, "B/s", peak=peak, flop_per_byte=flop / (4 * arrays)))
    return found


def transfers(device: torch.device, samples: int, transfer_bytes: int) -> list[dict]:
    """Between host and GPU: B/s until the data is there, and for how long the call keeps the CPU."""
    there = torch.randn(transfer_bytes // 4, device=device)
    found = []
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
    warnings.filterwarnings("ignore", message="enable_nested_tensor")  # nn.Transformer as built by default
    found = []

    def measure(kind: str, what: str, place: str, work, expected: Tensor) -> None:
        torch.testing.assert_close(work().cpu(), expected, rtol=1e-2, atol=1e-2)
        repeat = 10 if kind == "square" else 1
        seconds = timed(work, CPU if place == "cpu" else device, samples, repeat=repeat, clock="wall")
        found.append(figure(kind, f"{what}, {place}", "fp32", expected.shape, seconds, "s", place=place))

    # nn.Transformer takes a target, which tutorials forget, and by default the length before the batch: the same
    # tensor is then 512 sequences of one token, 45 GFLOP in place of 55
    x = torch.randn(1, 512, 512)
    layer = nn.TransformerEncoderLayer(512, 8, batch_first=True)
    for kind, what, net, inputs in (
        ("encoder_layer", "encoder layer, 1 x 512 tokens", layer, [x]),
        ("transformer", "Transformer, 1 x 512 tokens", nn.Transformer(512, batch_first=True), [x, x]),
        ("transformer_by_default", "Transformer, 512 x 1 token", nn.Transformer(512), [x, x]),
    ):
        expected = net.eval()(*inputs)
        measure(kind, what, "cpu", partial(net, *inputs), expected)
        if device != CPU:
            there = partial(net.to(device), *(tensor.to(device) for tensor in inputs))
            measure(kind, what, "gpu", there, expected)
    for n in SQUARES:
        a, b = torch.randn(2, n, n)
        measure("square", f"{n}", "cpu", partial(torch.mm, a, b), a @ b)
        if device != CPU:
            measure("square", f"{n}", "gpu", partial(torch.mm, a.to(device), b.to(device)), a @ b)
            with_copies = partial(lambda a, b: (a.to(device) @ b.to(device)).cpu(), a, b)
            measure("square", f"{n}", "gpu with copies", with_copies, a @ b)
    return found


def parse_args():
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--device", choices=("auto", "cuda", "mps", "cpu"), default="auto")
    add("--samples", type=cli.positive_int, default=5, help="of every figure, after a warm-up")
    add("--plot", type=cli.plot_file, metavar="PATH", default="runs/roofline.png", help="roofline, a PNG (%(default)s)")
    add("--json", type=cli.writable_file, metavar="PATH", help="write every figure as one JSON object")
    return parser.parse_args()


@torch.inference_mode()
def main() -> int:
    args = parse_args()
    began = time.perf_counter()
    device = runtime.single_device(args.device)
    runtime.seed(0, False)
    name = hardware.device_name(device)
    size = "gpu" if device.type == "cuda" else "cpu"
    array_bytes, flush_bytes = buffer_bytes(device, ARRAY_BYTES[size], FLUSH_BYTES[size])
    summary = {
        "device": name,
        **conditions(device),
        "array_bytes": array_bytes,
        "flush_bytes": flush_bytes,
        "type_warm_up_seconds": TYPE_WARM_UP_SECONDS[size],
        "figure_warm_up_seconds": WARM_UP_SECONDS,
        "samples": args.samples,
    }
    print_conditions({"torch": torch.__version__, **summary})

    flush = torch.zeros(flush_bytes, dtype=torch.uint8, device=device)
    unseen = {dtype: why for dtype in TYPES if (why := obstacle(dtype, device))}
    common_type = hardware.choose_dtype("auto", device)
    found = []
    groups = [("matmul", dtype, SHAPES[size]) for dtype in TYPES if dtype not in unseen]
    for kind, dtype, shapes in [*groups, ("width", common_type, WIDTHS[size])]:
        # under load a GPU's clocks sink to what its power limit allows: the first of a type must not be flattered
        largest = max(shapes, key=math.prod)
        multiply = product(dtype, *operands(dtype, largest, device))
        warm_up(multiply, device, TYPE_WARM_UP_SECONDS[size])
        if kind == "width":
            summary["under_load"] = conditions_under_load(multiply, device)
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

    for f in found:
        rate_of_units = f["unit"] == "FLOP/s"
        f["limit"] = limit_flops(name, f["dtype"], summary.get("sm_clock_max_mhz")) if rate_of_units else f["peak"]
    best = ceilings(found)
    facts = conclusions(found, best)
    print_tables(found, facts, unseen)
    checked = [f["dtype"] for f in found if "relative_error" in f]
    types = ", ".join(LABELS.get(dtype, dtype) for dtype in dict.fromkeys(checked))
    print(f"checked: {len(checked)} products in {types} against float64, within rounding;")
    print("         copies, triad, forward passes and square products against what they must give")
    wrong, known = bugs(found), any(f["peak"] for f in found)
    verdict = "no rate is above what its device can reach" if known else "not known for this device"
    print("\n".join(f"BUG: {line}" for line in wrong) or f"peaks: {verdict}")
    summary |= {
        "verdict": "BUG" if wrong else "ok" if known else None,
        "bugs": wrong,
        **facts,
        "ceilings": best,
        "not_measured": unseen,
        "measurements": found,
        "seconds": time.perf_counter() - began,
        "world_size": 1,
        "peak_memory_bytes": report.peak_memory_bytes(device),
    }
    report.write_json(summary, args.json)
    if plot_roofline(found, best, name, args.plot):
        print(f"roofline: {args.plot}")
    return 1 if wrong else 0


if __name__ == "__main__":
    exits.run(main)
