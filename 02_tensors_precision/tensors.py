"""What a tensor is: a block of memory, and a shape and strides that say how to walk through it.

Transposing, slicing and expanding change only shape and strides: the result is a view and copies
nothing. Other operations copy. Which is which decides the memory that training takes, and explains
most surprises with `view` and `contiguous`. A batch of images can lie in memory channel by channel
(NCHW) or pixel by pixel (NHWC, channels_last), and convolutions then differ in speed.

    laptop    python 02_tensors_precision/tensors.py
    one GPU   python 02_tensors_precision/tensors.py --device cuda
    cluster   it uses one process only

What to look at: every statement is checked before it is printed, by addresses and by writing
through views. The times at the end are medians (lowest to highest) of 7 rounds. Expected on an H100
from its data sheet, for 1,024 images of 64 x 56 x 56 in fp16: 237 GFLOP take at least 0.23 ms.
channels_last should come nearer to that, because tensor cores read pixels and NCHW must be
rearranged first. A clone of 128 MiB moves twice as much, in at least 0.08 ms.
Next: precision.py.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import torch
from torch import nn
from torch.nn.functional import conv2d

from common import lesson, measure

NHWC = torch.channels_last
SHAPES = {
    "loss": (),
    "bias": (768,),
    "weight": (2048, 768),
    "images": (32, 3, 224, 224),
}
VIEWS = [
    "x[1:]",
    "x[:, ::2]",
    "x.T",
    "x.view(4, 3)",
    "x.reshape(4, 3)",
    "x.contiguous()",
    "x.detach()",
]
COPIES = [
    "x.T.reshape(12)",
    "x.T.contiguous()",
    "x[[0, 2]]",
    "x[x > 5]",
    "x.double()",
    "x.clone()",
]
# Sizes of what is timed. On a GPU the work must take longer than its launch.
IMAGES = {"cpu": 32, "cuda": 1024}
MATRIX_ROWS = {"cpu": 4096, "cuda": 8192}  # of 4,096 columns: larger than a GPU's cache
CALLS = {"cpu": 1, "cuda": 20}  # per round: so the GPU has the next call while it works

# --- 1. strides


def dimensions() -> None:
    print("\nThe stride of a dimension is how many elements to skip for the next index along it")
    for name, shape in SHAPES.items():
        t = torch.zeros(shape)
        print(
            f"  {name}: {t.ndim}-D, shape {shape}, stride {t.stride()}, {t.nbytes:,} bytes in fp32"
        )
    # The value of each element is its own position in the storage.
    x = torch.arange(120).reshape(2, 3, 4, 5)
    y = x[1:, ::2, :, 1].mT  # [1, 4, 2]
    i, j, k = torch.meshgrid(*[torch.arange(size) for size in y.shape], indexing="ij")
    places = y.storage_offset() + i * y.stride(0) + j * y.stride(1) + k * y.stride(2)
    walk = f"y[i, j, k] lies at {y.storage_offset()} + (i, j, k)·{y.stride()}"
    check(torch.equal(y, places), f"x of (2, 3, 4, 5), y = x[1:, ::2, :, 1].mT: {walk}")


# --- 2. views and copies


def views_and_copies() -> None:
    print("\nView or copy? x is (3, 4). A view shares the memory of x: a write into it changes x")
    for code in (*VIEWS, *COPIES):
        x = torch.arange(12.0).reshape(3, 4)
        y = eval(code)  # so that the code that is printed is the code that ran
        same_memory = y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        y.fill_(-1)
        x_has_changed = bool((x == -1).any())
        assert same_memory == x_has_changed == (code in VIEWS), code
        kind = "view" if same_memory else "copy"
        print(f"  {code} is a {kind}: shape {tuple(y.shape)}, stride {y.stride()}")
    check(
        x[0].untyped_storage().nbytes() == 48,
        "x[0] keeps all 48 bytes of x alive; x[0].clone() would not",
    )


def broadcasting() -> None:
    print("\nBroadcasting: a dimension of stride 0 is stored once and read many times")
    bias = torch.randn(64, 1, 1)
    images = torch.randn(32, 64, 56, 56)
    wide = bias.expand_as(images)
    check(
        wide.stride() == (0, 1, 0, 0),
        "a bias of (64, 1, 1) expanded to (32, 64, 56, 56): stride (0, 1, 0, 0)",
    )
    check(
        (wide.nbytes, wide.untyped_storage().nbytes()) == (25_690_112, 256),
        "it is read as 25,690,112 bytes and stored as 256",
    )
    check(
        torch.equal(images + bias, images + wide.contiguous()),
        "images + bias is bit-identical to adding the stored copy",
    )
    check_raises("writing into the expanded bias", lambda: wide.add_(1))
    check(
        (torch.zeros(8, 1) - torch.zeros(8)).shape == (8, 8),
        "(8, 1) - (8) is (8, 8): a wrong loss and no error",
    )


# --- 3. NCHW and channels_last


def layouts() -> dict:
    print(
        "\n32 x 3 x 224 x 224 images, channel by channel (NCHW) and pixel by pixel (channels_last)"
    )
    nchw = torch.randn(32, 3, 224, 224)
    nhwc = nchw.to(memory_format=NHWC)
    fp32 = nhwc.untyped_storage().nbytes()
    bf16 = nhwc.bfloat16().untyped_storage().nbytes()
    check(
        fp32 == 4 * 4_816_896 == 19_267_584,
        "4,816,896 values of 4 bytes in fp32: 19,267,584 bytes",
    )
    check(bf16 == 9_633_792, "2 bytes in bf16 (or fp16), half the memory: 9,633,792 bytes")
    check(
        torch.equal(nchw, nhwc) and nchw.untyped_storage().nbytes() == fp32,
        "equal values and bytes in both layouts",
    )
    check(nchw.stride() == (150528, 50176, 224, 1), "NCHW: stride (150528, 50176, 224, 1)")
    check(nhwc.stride() == (150528, 1, 672, 3), "channels_last: stride (150528, 1, 672, 3)")
    check(
        not nhwc.is_contiguous(),
        "channels_last is not is_contiguous(): without an argument that means NCHW",
    )
    return {"batch_fp32_bytes": fp32, "batch_bf16_bytes": bf16}


def convolution(channels: int, side: int, stride: int, device: torch.device) -> dict:
    """Return a row: one convolution in both layouts. The results are equal up to rounding."""
    images = size_for(IMAGES, device)
    dtype = torch.float32
    tolerance = 1e-4
    if device.type == "cuda":
        dtype = torch.float16
        tolerance = 0.05
    x = torch.randn(images, channels, side, side, device=device).to(dtype)
    w = torch.randn(64, channels, 3, 3, device=device) / (9 * channels) ** 0.5
    w = w.to(dtype)
    x_nhwc = x.to(memory_format=NHWC)
    w_nhwc = w.to(memory_format=NHWC)
    channel_first = partial(conv2d, x, w, stride=stride, padding=1)
    pixel_first = partial(conv2d, x_nhwc, w_nhwc, stride=stride, padding=1)
    assert pixel_first().is_contiguous(memory_format=NHWC), "the convolution has changed the layout"
    torch.testing.assert_close(pixel_first(), channel_first(), rtol=0, atol=tolerance)
    shape = f"{images:,} x {channels} x {side} x {side}"
    name = str(dtype).removeprefix("torch.")
    what = f"conv, {shape}, {name}"
    return run(what, channel_first, pixel_first, device)


# --- 4. contiguous


def contiguity(device: torch.device) -> dict:
    print("\nContiguous: what view() needs, and what it costs")
    x = torch.randn(size_for(MATRIX_ROWS, device), 4096, device=device)
    check_raises("x.T.view(-1)", lambda: x.T.view(-1))
    x.T.reshape(-1).zero_()
    check(bool(x.any()), "x.T.reshape(-1).zero_() leaves x unchanged: reshape copied, silently")
    check(x.contiguous() is x, "x.contiguous() of a contiguous x is x itself, and free")
    what = f"a copy of {x.nbytes / 2**20:.0f} MiB"
    return run(what, x.T.contiguous, x.clone, device)


# --- 5. devices


def devices(device: torch.device) -> None:
    print("\nWhere data lives")
    x = torch.randn(3)
    net = nn.Linear(3, 3)
    check(
        torch.device("cuda") != "cuda",
        'torch.device("cuda") == "cuda" is False: compare device.type',
    )
    check(x.to("cpu") is x, "x.to(device) of a tensor that is there already is x itself")
    check(
        net.to("meta") is net and net.weight.is_meta, "module.to(device) moves the module in place"
    )
    check(
        x.to("meta") is not x and x.is_cpu,
        "tensor.to(device) leaves x where it is: use what it returns",
    )
    check_raises("an operation on operands on two devices", lambda: x + x.to("meta"))
    if device.type != "cpu":
        x.to(device).fill_(7)
        check(not (x == 7).any(), "x.to(device) is a copy: a write into it does not change x")


# --- checks and times


def check(holds: bool, statement: str) -> None:
    """Print a statement that holds. Raise AssertionError for one that does not."""
    assert holds, f"does not hold here: {statement}"
    print(f"- {statement}")


def check_raises(what: str, work: Callable[[], object]) -> None:
    """Check that `work` raises RuntimeError."""
    raised = False
    try:
        work()
    except RuntimeError:
        raised = True
    check(raised, f"{what} raises an error")


def size_for(sizes: dict[str, int], device: torch.device) -> int:
    return sizes.get(device.type, sizes["cpu"])


def run(
    what: str, first: Callable[[], object], second: Callable[[], object], device: torch.device
) -> dict:
    """Return a row: seconds per call of two functions, which take turns, and their ratio."""
    calls = size_for(CALLS, device)

    def repeated(work: Callable[[], object]) -> None:
        for _ in range(calls):
            work()

    steps = {"second": partial(repeated, second), "first": partial(repeated, first)}
    measured = measure.seconds_in_turns(steps, device, rounds=7)
    row = {"what": what}
    for prefix in ("", "min_", "max_"):
        row[f"{prefix}first_seconds"] = measured["first"][f"{prefix}seconds"] / calls
        row[f"{prefix}second_seconds"] = measured["second"][f"{prefix}seconds"] / calls
        row[f"{prefix}ratio"] = measured["first"][f"{prefix}time_ratio"]
    return row


COLUMNS = {
    "what": "work",
    "first_seconds": "NCHW, or of x.T",
    "second_seconds": "channels_last, or of x",
    "ratio": "first / second",
}


def main() -> int:
    args = lesson.parse_flags(__doc__)
    device = lesson.start(args.device)
    dimensions()
    views_and_copies()
    broadcasting()
    batch_bytes = layouts()
    rows = [
        convolution(3, 224, 2, device),
        convolution(64, 56, 1, device),
        contiguity(device),
    ]
    devices(device)
    checked = [
        "every statement above, by addresses, strides and writes through views",
        "both layouts give the same convolution",
    ]
    lesson.end(rows, columns=COLUMNS, checked=checked, args=args, device=device, **batch_bytes)
    return 0


if __name__ == "__main__":
    exits.run(main)
