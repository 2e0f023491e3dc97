"""The table and the checks of offload.py."""

COLUMNS = {
    "name": "in the CPU's memory",
    "after_forward_bytes": "on the device after forward",
    "peak_bytes": "peak of a step",
    "copied_down_bytes": "copied down",
    "time_ratio": "time",
}
# Relative. save_on_cpu makes contiguous copies, and other strides may be summed in another order.
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}


def check(rows: list[dict], dtype: str) -> list[str]:
    """Assert that training is the same, and that what was copied down has left the device."""
    nothing, torchs, overlapped = rows
    assert overlapped["gradient_relative_error"] == 0, (
        "overlapped: gradients differ from gradients without offloading"
    )
    assert overlapped["losses"] == nothing["losses"], (
        "overlapped: losses differ from losses without offloading"
    )
    assert torchs["gradient_relative_error"] <= TOLERANCE[dtype], "save_on_cpu: other gradients"
    copied = overlapped["copied_down_bytes"]
    freed = nothing["after_forward_bytes"] - overlapped["after_forward_bytes"]
    assert freed == copied, (
        f"overlapped: {copied:,} bytes were copied down, {freed:,} have left the device"
    )
    more = torchs["copied_down_bytes"] / copied
    assert more > 1, f"save_on_cpu copies {more:.2f} times as many bytes"
    return [
        "gradients equal the gradients without offloading to the bit, "
        "and with save_on_cpu within rounding",
        f"activations, overlapped: all {copied:,} bytes that were copied down have left the device "
        "after forward",
        f"save_on_cpu copies {more:.2f} times as many bytes: weights too, and a piece for each of "
        "its users",
    ]
