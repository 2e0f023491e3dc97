"""What a tensor is: a block of memory, and a shape and strides that say how to walk through it.

Transposing, slicing and expanding change only the walk: the result is a view and costs nothing. Other operations
copy. Which is which decides the memory that training takes, and most surprises with `view` and `contiguous`.
A batch of images can lie channel by channel (NCHW) or pixel by pixel (channels_last, NHWC): another speed.

    laptop    python 02_tensors_precision/tensors.py
    one GPU   python 02_tensors_precision/tensors.py --device cuda
    cluster   one process is all it uses

Look for: every statement is checked before it is printed, by addresses and by writing through views; the times at the
end are this device's, median (lowest to highest) of 7 rounds in turn. Next: precision.py.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import conv2d

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits, measure, report

NHWC = torch.channels_last


def check(holds: bool, statement: str) -> None:
    """Print a statement that holds; end the script at one that does not."""
    if not holds:
        raise AssertionError(f"does not hold here: {statement}")
    print(f"- {statement}")


def check_raises(what: str, work: Callable[[], object]) -> None:
    try:
        work()
    except RuntimeError:
        check(True, f"{what} raises an error")
    else:
        check(False, f"{what} raises an error")


def dimensions() -> None:
    print("\nThe stride says how many elements to skip for one more along a dimension")
    for name, shape in {
        "loss": (),
        "bias": (768,),
        "weight": (2048, 768),
        "images": (32, 3, 224, 224),
    }.items():
        t = torch.zeros(shape)
        print(
            f"  {name}: {t.ndim}-D, shape {shape}, stride {t.stride()}, {t.nbytes:,} bytes in fp32"
        )
    # each value is its own place in the storage
    y = torch.arange(120).reshape(2, 3, 4, 5)[1:, ::2, :, 1].mT
    i, j, k = torch.meshgrid(*map(torch.arange, y.shape), indexing="ij")
    places = y.storage_offset() + i * y.stride(0) + j * y.stride(1) + k * y.stride(2)
    walk = f"y[i, j, k] lies at {y.storage_offset()} + (i, j, k)·{y.stride()}"
    check(torch.equal(y, places), f"x of (2, 3, 4, 5), y = x[1:, ::2, :, 1].mT: {walk}")


def views_and_copies() -> None:
    print(
        "\nView or copy? x is (3, 4). A view has the storage of x, and a write into it is seen in x"
    )
    views = [
        "x[1:]",
        "x[:, ::2]",
        "x.T",
        "x.view(4, 3)",
        "x.reshape(4, 3)",
        "x.contiguous()",
        "x.detach()",
    ]
    copies = [
        "x.T.reshape(12)",
        "x.T.contiguous()",
        "x[[0, 2]]",
        "x[x > 5]",
        "x.double()",
        "x.clone()",
    ]
    for code in (*views, *copies):
        x = torch.arange(12.0).reshape(3, 4)
        y = eval(code)  # what the table shows is what ran
        shared = y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        y.fill_(-1)
        assert shared == bool((x == -1).any()) == (code in views), code
        print(
            f"  {code} is a {'view' if shared else 'copy'}: shape {tuple(y.shape)}, stride {y.stride()}"
        )
    check(
        x[0].untyped_storage().nbytes() == 48,
        "x[0] keeps all 48 bytes of x alive; x[0].clone() would not",
    )


def broadcasting() -> None:
    print("\nBroadcasting: a dimension of stride 0 is stored once and read again and again")
    bias = torch.randn(64, 1, 1)
    images = torch.randn(32, 64, 56, 56)
    wide = bias.expand_as(images)
    check(
        wide.stride() == (0, 1, 0, 0),
        "a bias of (64, 1, 1) expanded to (32, 64, 56, 56): stride (0, 1, 0, 0)",
    )
    check(
        (wide.nbytes, wide.untyped_storage().nbytes()) == (25_690_112, 256),
        "read as 25,690,112 bytes, stored as 256",
    )
    check(
        torch.equal(images + bias, images + wide.contiguous()),
        "images + bias is equal to the bit to the stored way",
    )
    check_raises("writing into the expanded bias", lambda: wide.add_(1))
    check(
        (torch.zeros(8, 1) - torch.zeros(8)).shape == (8, 8),
        "(8, 1) - (8) is (8, 8): a wrong loss and no error",
    )


def layouts() -> dict:
    print(
        "\n32 x 3 x 224 x 224 images, channel by channel (NCHW) and pixel by pixel (channels_last)"
    )
    nchw = torch.randn(32, 3, 224, 224)
    nhwc = nchw.to(memory_format=NHWC)
    fp32, bf16 = nhwc.untyped_storage().nbytes(), nhwc.bfloat16().untyped_storage().nbytes()
    check(
        fp32 == 4 * 4_816_896 == 19_267_584, "4,816,896 values of 4 bytes in fp32: 19,267,584 bytes"
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
        "channels_last is not is_contiguous(): that asks for NCHW without an argument",
    )
    return {"batch_fp32_bytes": fp32, "batch_bf16_bytes": bf16}


def convolution(channels: int, side: int, stride: int, device: torch.device) -> dict:
    """A row: the same convolution in both layouts, equal up to rounding."""
    dtype, tolerance = (torch.float16, 0.05) if device.type == "cuda" else (torch.float32, 1e-4)
    x = torch.randn(32, channels, side, side).to(device, dtype)
    w = (torch.randn(64, channels, 3, 3) / (9 * channels) ** 0.5).to(device, dtype)
    x_nhwc = x.to(memory_format=NHWC)
    w_nhwc = w.to(memory_format=NHWC)
    channel_first = partial(conv2d, x, w, stride=stride, padding=1)
    pixel_first = partial(conv2d, x_nhwc, w_nhwc, stride=stride, padding=1)
    assert pixel_first().is_contiguous(memory_format=NHWC), "the convolution has changed the layout"
    torch.testing.assert_close(pixel_first(), channel_first(), rtol=0, atol=tolerance)
    what = f"3 x 3 convolution of 32 x {channels} x {side} x {side}, {dtype}: NCHW, channels_last"
    return run(what, channel_first, pixel_first, device)


def contiguity(device: torch.device) -> dict:
    print("\nContiguous: what view() needs, and what it costs to get there")
    # larger than a GPU's cache
    x = torch.randn(8192 if device.type == "cuda" else 4096, 4096, device=device)
    check_raises("x.T.view(-1)", lambda: x.T.view(-1))
    x.T.reshape(-1).zero_()
    check(
        bool(x.any()), "x.T.reshape(-1).zero_() leaves x as it was: reshape copied, without a word"
    )
    check(x.contiguous() is x, "x.contiguous() of a contiguous x is x itself, and free")
    return run(
        f"a copy of {x.nbytes / 2**20:.0f} MiB: x.T.contiguous(), x.clone()",
        x.T.contiguous,
        x.clone,
        device,
    )


def devices(device: torch.device) -> None:
    print("\nWhere data lives")
    x, net = torch.randn(3), nn.Linear(3, 3)
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
    check_raises("an operation on operands in two places", lambda: x + x.to("meta"))
    if device.type != "cpu":
        x.to(device).fill_(7)
        check(not (x == 7).any(), "x.to(device) is a copy: a write into it is not seen in x")


def run(
    what: str, first: Callable[[], object], second: Callable[[], object], device: torch.device
) -> dict:
    """Seconds of two ways to do the same, which take turns, and their ratio."""
    # one call alone would be over before the next is launched
    calls = 20 if device.type == "cuda" else 1

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
    "what": "this, that",
    "first_seconds": "this",
    "second_seconds": "that",
    "ratio": "this / that",
}


def main() -> int:
    args = report.lesson_flags(__doc__)
    device = report.start_lesson(args.device)
    dimensions()
    views_and_copies()
    broadcasting()
    batch = layouts()
    rows = [convolution(3, 224, 2, device), convolution(64, 56, 1, device)]
    rows.append(contiguity(device))
    devices(device)
    checked = [
        "every statement above, by addresses, strides and writes through views",
        "both layouts give the same convolution",
    ]
    report.end_lesson(rows, columns=COLUMNS, checked=checked, args=args, device=device, **batch)
    return 0


if __name__ == "__main__":
    exits.run(main)
