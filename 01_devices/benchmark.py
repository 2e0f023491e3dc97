"""How fast this device computes and moves data, and what it costs to wait for it.

Two rates bound every kernel: the FLOP/s of the arithmetic units and the bytes/s of the memory.
Which one is the limit depends on the kernel's FLOP per byte, as the roofline plot shows. The script
also times copies between host and device, kernel launches, the size from which a GPU beats its CPU,
and unfriendly matrix widths. Every figure is the median of --samples, with lowest and highest.

    laptop    python 01_devices/benchmark.py
    one GPU   python 01_devices/benchmark.py --samples 20 --json numbers.json
    node      CUDA_VISIBLE_DEVICES=3 python 01_devices/benchmark.py --plot gpu3.png

What to look at: how far small and thin matmuls stay below the best of their dtype. A rate above the
data sheet's peak is a BUG, with exit code 1: then the timing is wrong. fp8 is timed twice: with
sums in fp32, torch's default, and with use_fast_accum=True, as in most published figures.
Expected on an H100 SXM from its data sheet, without sparsity: at most 67 TFLOP/s in fp32, 495 in
tf32, 989 in bf16, 1,979 in fp8, and 3.35 TB/s. 8,192 x 8,192 x 8,192 stays below the
peak where the power limit lowers the clock: the matmuls of a training step reached 76 % of it on an
H200. 32 rows in bf16 should reach at most a ninth of it: they are bound by memory.
Previous: show.py, doctor.py. Next: monitor.py.
"""

import math
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _benchmark
import _machine
import torch
from _benchmark import make_row
from torch import Tensor, nn

from common import cli, hardware, lesson, runtime

CPU = torch.device("cpu")
DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,  # tensors stay fp32, and tensor cores read 10 bits of the mantissa
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "fp8_fast": torch.float8_e4m3fn,
    "int8": torch.int8,
}
# (M, N, K): x [M, K] times w [N, K] transposed. 32 rows are few tokens against a large matrix.
SHAPES = {
    "cpu": [
        (128, 128, 128),
        (256, 256, 256),
        (512, 512, 512),
        (1024, 1024, 1024),
        (32, 2048, 2048),
        (256, 2048, 1024),
    ],
    "gpu": [
        (512, 512, 512),
        (1024, 1024, 1024),
        (2048, 2048, 2048),
        (4096, 4096, 4096),
        (8192, 8192, 8192),
        (32, 8192, 8192),
        (4096, 14_336, 4096),
    ],
}
# Unfriendly and friendly widths in turn: GPT-2's vocabulary and a multiple of 64, and a hidden size
# that is off by one.
WIDTHS = {
    "cpu": [
        (128, 50_257, 256),
        (128, 50_304, 256),
        (512, 1025, 1025),
        (512, 1024, 1024),
    ],
    "gpu": [
        (4096, 50_257, 768),
        (4096, 50_304, 768),
        (4096, 4097, 4097),
        (4096, 4096, 4096),
    ],
}
SQUARES = [16, 32, 64, 128, 256, 512, 1000]  # sizes for the comparison of CPU and GPU
ARRAY_BYTES = {"cpu": 2**28, "gpu": 2**29}  # far larger than every cache
WARM_UP_SECONDS = 0.05  # before every figure
DTYPE_WARM_UP_SECONDS = {"cpu": 0.1, "gpu": 1.0}  # before the first figure of each dtype


# --- how to time work on a device


def timed(
    work: Callable,
    device: torch.device,
    samples: int,
    flush: Tensor | None = None,
    repeat: int = 1,
    clock: str = "device",
) -> list[float]:
    """Return the seconds per call of work(), `samples` times. Each is a mean over `repeat` calls.

    On a GPU a call returns as soon as its kernels are queued, so the clock must say what it times:

    - "device" is the GPU's own clock. CUDA events are queued before and after the work, and the
      GPU notes the time of each. On other devices it is the same as "wall".
    - "wall" runs until the result of each call is there.
    - "issue" runs until the calls return.

    `flush` is a tensor larger than the caches. It is written before each sample. So the operands
    come from memory, and the GPU is still busy while the work is queued: no launch is timed.
    """
    warm_up(work, device, WARM_UP_SECONDS)
    seconds = []
    for _ in range(samples):
        runtime.synchronize(device)
        if flush is not None:
            flush.zero_()
        if device.type == "cuda" and clock == "device":
            seconds.append(_device_seconds(work, repeat))
        else:
            seconds.append(_wall_seconds(work, device, repeat, wait=clock != "issue"))
    runtime.synchronize(device)
    return seconds


def _device_seconds(work: Callable, repeat: int) -> float:
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeat):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeat  # events have milliseconds


def _wall_seconds(work: Callable, device: torch.device, repeat: int, wait: bool) -> float:
    runtime.synchronize(device)
    start = time.perf_counter()
    for _ in range(repeat):
        work()
        if wait:
            runtime.synchronize(device)
    return (time.perf_counter() - start) / repeat


def warm_up(work: Callable, device: torch.device, seconds: float) -> None:
    """Call work() for this many seconds: the first call loads kernels, and clocks must rise."""
    work()
    runtime.synchronize(device)
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        work()
        runtime.synchronize(device)


# --- matmuls in each dtype


def make_operands(dtype: str, shape: tuple, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random x [M, K] and w [N, K].

    Zeros or small integers would switch fewer transistors. A GPU at its power limit would then run
    at higher clocks, and show rates that no training reaches.
    """
    m, n, k = shape
    if dtype == "int8":
        x = torch.randint(-128, 128, (m, k), device=device, dtype=torch.int8)
        w = torch.randint(-128, 128, (n, k), device=device, dtype=torch.int8)
    else:
        x = torch.randn(m, k, device=device).to(DTYPES[dtype])
        w = torch.randn(n, k, device=device).to(DTYPES[dtype])
    return x, w


def make_matmul(dtype: str, x: Tensor, w: Tensor) -> Callable[[], Tensor]:
    """Return a function that computes x @ w.T, [M, N], as nn.Linear does, on the units for dtype.

    The layout of w.T, whose columns are contiguous, is the only one that fp8 and int8 units take.
    """
    if dtype == "int8":
        return partial(torch._int_mm, x, w.t())
    if dtype in ("fp8", "fp8_fast"):
        one = torch.ones((), device=x.device)  # the scale of each operand
        return partial(
            torch._scaled_mm,
            x,
            w.t(),
            one,
            one,
            out_dtype=torch.bfloat16,
            use_fast_accum=dtype == "fp8_fast",
        )
    # NVIDIA's containers turn TF32 on (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1). Here fp32 is fp32.
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    return partial(torch.matmul, x, w.t())


def why_not(dtype: str, device: torch.device) -> str | None:
    """Return why matmuls in this dtype are not timed, or None if they are.

    A GPU is timed in the dtypes that it multiplies in hardware. A CPU is also timed in dtypes that
    it only emulates, to show that a dtype that works is not yet fast.
    """
    native, reason = _machine.native_types(device)
    in_hardware = dtype.removesuffix("_fast") in native
    # without units for tf32 or fp8 torch computes in fp32, and that would be timed instead
    falls_back_to_fp32 = dtype in ("tf32", "fp8", "fp8_fast")
    if not in_hardware and (device.type == "cuda" or falls_back_to_fp32):
        return f"no units for it ({reason})"
    try:
        x, w = make_operands(dtype, (64, 64, 64), device)
        make_matmul(dtype, x, w)()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def time_matmul(
    kind: str,
    dtype: str,
    shape: tuple,
    device: torch.device,
    samples: int,
    flush: Tensor,
) -> dict:
    """Return a row: FLOP/s of one matmul, its error against float64, and its FLOP per byte."""
    x, w = make_operands(dtype, shape, device)
    matmul = make_matmul(dtype, x, w)
    result = matmul()  # [M, N]

    # 16 x 16 entries are enough to see a wrong result
    rows = slice(None, None, max(1, len(x) // 16))
    columns = slice(None, None, max(1, len(w) // 16))
    exact = x[rows].cpu().double() @ w[columns].cpu().double().t()
    difference = result[rows, columns].cpu().double() - exact

    m, n, k = shape
    flop = 2 * m * n * k  # a multiplication and an addition for each of M x N x K
    rates = [flop / seconds for seconds in timed(matmul, device, samples, flush)]
    native, _ = _machine.native_types(device)
    return make_row(
        kind,
        f"{kind} {m} x {n} x {k}",
        dtype,
        shape,
        "FLOP/s",
        rates,
        relative_error=(difference.norm() / exact.norm()).item(),
        native=dtype.removesuffix("_fast") in native,
        flop_per_byte=flop / (x.nbytes + w.nbytes + result.nbytes),
    )


# --- memory, launches, copies


def time_triad(device: torch.device, samples: int, flush: Tensor, array_bytes: int) -> dict:
    """Return a row: bytes/s of a = b + 3c. Each array that is read or written counts once."""
    a = torch.randn(array_bytes // 4, device=device)
    b = torch.randn(array_bytes // 4, device=device)
    c = torch.randn(array_bytes // 4, device=device)
    triad = partial(torch.add, b, c, alpha=3, out=a)
    rates = [3 * a.nbytes / seconds for seconds in timed(triad, device, samples, flush)]
    torch.testing.assert_close(a[::997], b[::997] + 3 * c[::997])
    what = f"triad 3 x {a.nbytes / 2**20:,.0f} MiB"
    # a multiplication and an addition, for 3 x 4 bytes
    return make_row("triad", what, "fp32", a.shape, "B/s", rates, flop_per_byte=2 / 12)


def time_launch(device: torch.device, samples: int) -> dict:
    """Return a row: seconds per call of an operation that has almost nothing to do."""
    add = partial(torch.zeros(1, device=device).add_, 1)
    # 500 calls are fewer than a GPU's queue holds, so no call waits for the GPU
    seconds = timed(add, device, samples, repeat=500, clock="issue")
    return make_row("launch", "tiny op, call after call", "fp32", [1], "s", seconds)


def time_copies(device: torch.device, samples: int, copy_bytes: int) -> list[dict]:
    """Return rows for copies with non_blocking=True, from pageable and from pinned memory.

    One row has the bytes/s until the data has arrived. The next has the seconds until the call
    returns: copies from pageable memory keep the CPU waiting.
    """
    on_device = torch.randn(copy_bytes // 4, device=device)
    rows = []
    for memory in ("pageable", "pinned"):
        on_host = torch.randn(on_device.shape, pin_memory=memory == "pinned")
        for kind, target, source in (
            ("h2d", on_device, on_host),
            ("d2h", on_host, on_device),
        ):
            source.neg_()  # so that source and target differ before the copy
            copy = partial(target.copy_, source, non_blocking=True)
            seconds = timed(copy, device, samples, clock="wall")
            seconds_of_call = timed(copy, device, samples, clock="issue")
            assert torch.equal(target[::997].cpu(), source[::997].cpu()), (kind, memory)

            what = f"{kind}, {memory}"
            rates = [source.nbytes / value for value in seconds]
            rows.append(make_row(kind, what, None, source.shape, "B/s", rates))
            call = f"{what}: the call"
            rows.append(make_row(f"{kind}_call", call, None, source.shape, "s", seconds_of_call))
    return rows


# --- from which size on is a GPU faster than its CPU?


def compare_with_cpu(device: torch.device, samples: int) -> list[dict]:
    """Return rows: fp32 forward passes and square matmuls, until the result is there.

    With a GPU each work is timed on both, and without one on the CPU only.
    """
    torch.set_float32_matmul_precision("highest")
    places = {"cpu": CPU}
    if device != CPU:
        places["gpu"] = device

    rows = []
    for kind, what, work, inputs in _works():
        expected = work(*inputs)
        for place, where in places.items():
            if isinstance(work, nn.Module):
                work.to(where)
            inputs_there = [tensor.to(where) for tensor in inputs]
            call = partial(work, *inputs_there)
            torch.testing.assert_close(call().cpu(), expected, rtol=1e-2, atol=1e-2)
            repeat = 10 if kind == "square" else 1
            seconds = timed(call, where, samples, repeat=repeat, clock="wall")
            name = f"{what}, {place}"
            rows.append(make_row(kind, name, "fp32", expected.shape, "s", seconds, place=place))
    return rows


def _works() -> list[tuple]:
    """Return (kind, description, function, its inputs)."""
    warnings.filterwarnings("ignore", message="enable_nested_tensor")
    x = torch.randn(1, 512, 512)
    # nn.Transformer takes a source and a target. Its default is [tokens, batch, width]: then the
    # same tensor is 512 sequences of one token, which are 45 GFLOP and not 55.
    batch_first = nn.Transformer(512, batch_first=True).eval()
    by_default = nn.Transformer(512).eval()
    works = [
        ("transformer", "Transformer 1 x 512", batch_first, [x, x]),
        ("transformer_by_default", "Transformer 512 x 1", by_default, [x, x]),
    ]
    for size in SQUARES:
        a = torch.randn(size, size)
        b = torch.randn(size, size)
        works.append(("square", f"square {size}", torch.mm, [a, b]))
    return works


def heat_up(dtype: str, shapes: list[tuple], device: torch.device) -> Callable[[], Tensor]:
    """Run the largest matmul of a dtype for a while, and return it.

    Under load a GPU's clocks fall to what its power limit allows. Without this the first shape of
    a dtype would run at higher clocks than the others.
    """
    largest = max(shapes, key=math.prod)
    x, w = make_operands(dtype, largest, device)
    matmul = make_matmul(dtype, x, w)
    size = "gpu" if device.type == "cuda" else "cpu"
    warm_up(matmul, device, DTYPE_WARM_UP_SECONDS[size])
    return matmul


@torch.inference_mode()
def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--samples", type=cli.positive_int, default=5, help="of every figure, after a warm-up")
    add("--plot", type=cli.writable_picture, metavar="PATH", help="draw the roofline, a PNG")
    cli.add_device_and_json(parser)
    args = parser.parse_args()
    device = lesson.start(args.device)
    size = "gpu" if device.type == "cuda" else "cpu"
    idle = _benchmark.conditions(device)
    flush = torch.zeros(ARRAY_BYTES[size], dtype=torch.uint8, device=device)

    # 1. matmuls in every dtype that can be timed, then unfriendly widths
    rows = []
    not_measured = {}
    for dtype in DTYPES:
        reason = why_not(dtype, device)
        if reason is not None:
            not_measured[dtype] = reason
            continue
        heat_up(dtype, SHAPES[size], device)
        for shape in SHAPES[size]:
            rows.append(time_matmul("matmul", dtype, shape, device, args.samples, flush))

    training_dtype = hardware.choose_dtype("auto", device)
    matmul = heat_up(training_dtype, WIDTHS[size], device)
    if device.type == "cuda":
        for _ in range(500):  # the GPU works on these while its clocks are read
            matmul()
    under_load = _benchmark.conditions(device)
    for shape in WIDTHS[size]:
        rows.append(time_matmul("width", training_dtype, shape, device, args.samples, flush))

    # 2. memory, launches, the CPU beside the GPU, copies between them
    rows.append(time_triad(device, args.samples, flush, ARRAY_BYTES[size]))
    rows.append(time_launch(device, args.samples))
    rows += compare_with_cpu(device, args.samples)
    if device.type == "cuda":
        rows += time_copies(device, args.samples, ARRAY_BYTES["cpu"])
    else:
        not_measured["between host and GPU"] = f"only with CUDA, this is {device.type}"
    if device == CPU:
        not_measured["CPU against GPU"] = "no GPU: only the CPU's side"

    # 3. shares of the best rate and of the data sheet's peak
    name = hardware.device_name(device)
    best = _benchmark.add_shares(rows, name, idle.get("sm_clock_max_mhz"))
    ratios = _benchmark.ratios(rows, best)
    lesson.end(
        rows,
        columns=_benchmark.COLUMNS,
        checked=_benchmark.check(rows),
        args=args,
        device=device,
        matmul_data="random",
        **idle,
        under_load=under_load,
        best=best,
        **ratios,
        not_measured=not_measured,
    )
    _benchmark.print_facts(under_load, ratios, not_measured)
    if args.plot:
        title = idle["cpu"] if device == CPU else name
        print(_benchmark.plot_roofline(rows, best, title, args.plot))
    return 0


if __name__ == "__main__":
    exits.run(main)
