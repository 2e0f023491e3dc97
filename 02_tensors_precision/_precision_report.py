"""precision.py's tables and its plot."""

from pathlib import Path

import torch
from _precision_formats import FORMATS, stochastic_bias

from old import report


def print_types(allowed: dict[str, dict]) -> None:
    """What the bits of each type allow, held against what torch says."""
    rows = [["type", "bits", "largest", "epsilon", "smallest normal", "smallest", "counts by 1 to"]]
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for name, (dtype, exponent_bits, mantissa_bits) in FORMATS.items():
        own = allowed[name]
        rows.append([name, f"1+{exponent_bits}+{mantissa_bits}", *(f"{value:.8g}" for value in own.values())])
        if dtype is not None:
            info = torch.finfo(dtype)
            last_bit = torch.tensor(1, dtype=integers[dtype.itemsize]).view(dtype).item()
            assert info.max == own["max"], name
            assert info.eps == own["epsilon"], name
            assert info.smallest_normal == own["smallest_normal"], name
            assert last_bit == own["smallest_subnormal"], name
    print(report.table(rows))
    print("checked: what the bits allow is what torch says")
    print("rounding to nearest turns what is not above half of the smallest into zero: in fp16 2^-25 = 3.0e-8\n")


def signed(value: float) -> str:
    return f"{value:+,.1f}" if abs(value) >= 1 else f"{value:+.2g}"


def print_rates(rates: dict[str, dict]) -> None:
    rows = [["type", "1.1 is stored as", "error after a month"]]
    for name, found in rates.items():
        rows.append([name, f"{found['stored_increment']:.10g}", signed(found["month_error"])])
    print("1.1 per second over a month (2,592,000 s), if every addition were exact: the stored rate is biased")
    print(report.table(rows))
    print("checked: 1.1 stored as 1 loses 0.1 a second, 259,200 in a month: the error grows in a straight line\n")


def print_sums(added: dict[str, dict], additions: int) -> None:
    head = ["type", "sum", "error of the stored rate", "error of adding", "additions that changed the sum"]
    rows = [[*head, "relative error, Kahan", "relative error, fp32 accumulator"]]
    for name, found in added.items():
        row = [name, f"{found['naive_sum']:,.7g}"]
        row += [signed(found["stored_rate_error"]), signed(found["rounding_error"])]
        row += [f"{found['additions_arrived']:,}"]
        row += [f"{found['kahan_relative_error']:.1e}", f"{found['into_fp32_relative_error']:.1e}"]
        rows.append(row)
    print(f"1.1 per second, added {additions:,} times: 11,000 and two errors. Relative errors are those of adding:")
    print("no way of adding can know that the stored rate was meant to be 1.1")
    print(report.table(rows))
    print("checked: 1 per second is exact up to where the type counts by 1, and stands still there; Kahan's sum is")
    print("within 2 epsilon from bf16 on, and in fp8 stands still at the square of where the plain sum does\n")


def print_products(errors: dict[str, float], size: int) -> None:
    rows = [[f"matrix product, {size} x {size}", "relative error"]]
    for name, error in errors.items():
        rows.append([name, f"{error:.2e}"])
    print(report.table(rows))
    print("emulated: inputs rounded to that type (fp8: scaled first), multiplied in fp32")
    print("checked: fp32 < tf32, fp16 < bf16 < fp8 e4m3fn < fp8 e5m2; tensor cores for fp8, if any, within 10 % of")
    print("emulated (use_fast_accum=False)\n")


def print_updates(updates: dict[str, dict], steps: int, lr: float) -> None:
    head = ["weights", "bytes per weight, with AdamW's", "updates that changed a weight", "weights that moved"]
    rows = [[*head, "distance against fp32's", "standard deviation"]]
    for name, found in updates.items():
        shares = [found[key] for key in ("arrived_share", "moved_share", "gone_share", "gone_deviation")]
        rows.append([name, str(found["bytes_per_weight"]), *(f"{share:.1%}" for share in shares)])
    print(f"{steps} steps of AdamW at a learning rate of {lr:g}")
    print(report.table(rows))
    bias = stochastic_bias()
    print(f"checked: stochastic rounding is unbiased: {bias:.1%} of a step over 10,000 roundings, 2.5 % allowed")


def plot(allowed: dict[str, dict], added: dict[str, dict], file: Path) -> str | None:
    """Range against precision, and how far a plain sum of 1.1 gets in each type."""
    if (pyplot := report.pyplot()) is None:
        return None
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4))
    left.set(xlim=(1e-50, 1e50), xscale="log", yscale="log", xlabel="smallest to largest number", ylabel="epsilon")
    right.set(xscale="log", xlabel="additions of 1.1", ylabel="plain sum, as a share of the exact sum")
    for i, (name, own) in enumerate(allowed.items()):
        left.plot([own["smallest_subnormal"], own["max"]], [own["epsilon"]] * 2, "|-", label=name, color=f"C{i}")
        if name in added:
            shares = added[name]["naive_share_after_doublings"]
            right.plot([2**count for count in range(len(shares))], shares, color=f"C{i}")
    left.legend()
    figure.savefig(file, format="png", dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    print(f"plot: {file}")
    return str(file)
