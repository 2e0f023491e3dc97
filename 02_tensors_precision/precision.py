"""How far each number type reaches, how finely it counts, and where training notices.

With m mantissa bits there are 2^m steps from one power of two to the next. What is smaller than
half a step is lost when it is added: a sum stops growing, a weight stops learning. bf16 has the
range of fp32 and 8 bits of precision, with the implicit one. fp16 has 11 bits and ends at 65,504.
tf32 is what tensor cores read of fp32. fp8 needs a scale. The cures are a wider accumulator, a
compensated (Kahan) sum, fp32 master weights, and stochastic rounding.

A rate that cannot be stored is a different error: 1.1 stored as 1 loses 0.1 in every second, and
259,200 in a month, however the sum is computed.

    laptop    python 02_tensors_precision/precision.py
    one GPU   python 02_tensors_precision/precision.py --device cuda
    cluster   it uses one process only

What to look at: the two errors of "1.1 per second" side by side. How many weights 20 AdamW steps
move in bf16. On a GPU: what each type's matmul costs beside its error. Expected on an H100 from its
data sheet, for 4,096 x 4,096 matrices: at least 2.0 ms in fp32, 0.27 ms in tf32, 0.13 ms in bf16
and fp16, with about the errors of the CPU.
Previous: tensors.py. Next: quantize.py for integers, 04_amp/train.py for training in bf16.
"""

import sys
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import torch
from torch import Tensor, nn

from common import lesson, measure

FORMATS = {  # torch's dtype, exponent bits, mantissa bits
    "fp64": (torch.float64, 11, 52),
    "fp32": (torch.float32, 8, 23),
    "tf32": (None, 8, 10),  # no tensor is stored in it
    "bf16": (torch.bfloat16, 8, 7),
    "fp16": (torch.float16, 5, 10),
    "fp8 e5m2": (torch.float8_e5m2, 5, 2),
    "fp8 e4m3fn": (torch.float8_e4m3fn, 4, 3),  # "fn": it has no infinity, only NaN
}
ADDITIONS = 10_000
RATE = Fraction("1.1")  # per second
MONTH_SECONDS = 30 * 24 * 3600
# Sizes of what runs on the device. On a GPU the work must take longer than its launches.
MATRIX_SIZE = {"cpu": 512, "cuda": 4096}
WEIGHTS = {"cpu": 65_536, "cuda": 2**25}
STEPS = 20
LR = 3e-5

# --- 1. what the bits allow


def limits(exponent_bits: int, mantissa_bits: int, infinity: bool) -> dict[str, float]:
    """Return the range and the precision of a type with these bits.

    Without infinity the largest exponent holds numbers, too. Only its last pattern is NaN.
    """
    bias = 2 ** (exponent_bits - 1) - 1
    epsilon = 2.0**-mantissa_bits
    largest = (2 - epsilon) * 2.0**bias
    if not infinity:
        largest = (2 - 2 * epsilon) * 2.0 ** (bias + 1)
    smallest_normal = 2.0 ** (1 - bias)
    return {
        "max": largest,
        "epsilon": epsilon,  # from 1 to the next number
        "smallest_normal": smallest_normal,
        # subnormal: the exponent bits are 0, and there is no implicit one
        "smallest_subnormal": smallest_normal * epsilon,
        # the next whole number cannot be stored
        "counts_by_1_to": 2 ** (mantissa_bits + 1),
    }


# --- 2. sums that stop growing


def add_up(step: Tensor) -> dict[str, Tensor]:
    """Add numbers to themselves ADDITIONS times: plainly, as Kahan does, and into fp32."""
    naive = torch.zeros_like(step)
    kahan = torch.zeros_like(step)
    lost = torch.zeros_like(step)
    into_fp32 = torch.zeros_like(step, dtype=torch.float32)
    for _ in range(ADDITIONS):
        naive = naive + step

        owed = step - lost  # what the last addition has lost is added with the next number
        before = kahan
        kahan = kahan + owed
        lost = (kahan - before) - owed

        into_fp32 += step
    return {"naive": naive, "kahan": kahan, "into_fp32": into_fp32}


def stored(value: float, dtype: torch.dtype) -> float:
    """Return the number that is stored for `value`."""
    return torch.tensor(value, dtype=torch.float64).to(dtype).item()


def sums(dtype: torch.dtype) -> dict:
    """Add up 1 and 1.1 per second, and return two errors of the latter.

    off_in_a_month is the error of the stored rate, as if every addition were exact. sum_off is the
    error of the additions. This runs on the CPU, and every device rounds alike.
    """
    rate = Fraction(stored(1.1, dtype))
    off_in_a_month = (rate - RATE) * MONTH_SECONDS
    is_whole = off_in_a_month == int(off_in_a_month)
    found = {
        "stored_rate": float(rate),
        "off_in_a_month": int(off_in_a_month) if is_whole else float(off_in_a_month),
    }
    if dtype.itemsize == 1:
        return found  # fp8 has no arithmetic
    totals = add_up(torch.tensor([1, 1.1], dtype=torch.float64).to(dtype))
    exact = ADDITIONS * rate
    for method, (_, total) in totals.items():
        ratio = Fraction(total.item()) / exact
        found[f"{method}_relative_error"] = abs(float(ratio - 1))
    sum_of_ones, sum_of_rates = totals["naive"].tolist()
    found["sum_of_ones"] = sum_of_ones
    found["naive_sum"] = sum_of_rates
    found["sum_off"] = float(Fraction(sum_of_rates) - exact)
    return found


# --- 3. weights that stop learning


def round_stochastically(x: Tensor) -> Tensor:
    """Round fp32 to bf16, up with a probability that is the part that is cut off.

    Random bits are added below bf16's mantissa, and carry into it with that probability.
    """
    random_bits = torch.randint(1 << 16, x.shape, dtype=torch.int32, device=x.device)
    bits = x.view(torch.int32) + random_bits
    kept = bits & ~0xFFFF
    return kept.view(torch.float32).to(torch.bfloat16)


METHODS = ("fp32", "bf16", "bf16 and fp32 master", "bf16, stochastic rounding")


def update(method: str, start: Tensor, gradient: Tensor) -> dict:
    """Take STEPS steps of AdamW with a steady gradient, and return how far the weights moved.

    AdamW then moves a weight by LR in each step. `method` is how the weights are kept.
    """
    dtype = torch.bfloat16 if method == "bf16" else torch.float32
    parameter = nn.Parameter(start.to(dtype, copy=True))
    parameter.grad = gradient.to(dtype)
    optimizer = torch.optim.AdamW([parameter], lr=LR, weight_decay=0)
    for _ in range(STEPS):
        optimizer.step()
        weight = parameter.detach()
        if method == "bf16, stochastic rounding":
            weight = round_stochastically(weight)
            parameter.data.copy_(weight)  # nothing finer is kept for the next step
        elif method == "bf16 and fp32 master":
            weight = weight.bfloat16()  # the model computes with these

    bytes_per_weight = weight.element_size()
    for value in optimizer.state[parameter].values():
        if value.ndim > 0:  # the two moments, without the step count
            bytes_per_weight += value.element_size()
    if method == "bf16 and fp32 master":
        bytes_per_weight += 4
    # 1: as far as LR in each step
    distance = (start.double() - weight.double()) * gradient.sign() / (STEPS * LR)
    return {
        "name": method,
        "bytes_per_weight": bytes_per_weight,
        "moved_share": (weight != start).double().mean().item(),
        "distance_share": distance.mean().item(),
        "distance_deviation": distance.std().item(),
    }


# --- 4. matmuls


def round_to_tf32(x: Tensor) -> Tensor:
    """Round fp32 to 10 mantissa bits, to nearest, ties to even."""
    bits = x.view(torch.int32)
    last_kept_bit = (bits >> 13) & 1
    # just under half of the last kept bit, and one more if that bit is set
    rounded = bits + 0xFFF + last_kept_bit
    return (rounded & ~0x1FFF).view(torch.float32)


def through_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to fp8 and back. A scale puts the largest value of x on the type's largest."""
    scale = x.abs().max() / torch.finfo(dtype).max
    return (x / scale).to(dtype).float() * scale


def multiply(name: str, a: Tensor, b: Tensor, exact: Tensor, device: torch.device) -> dict:
    """Return the error of a @ b in a type, and the time where this device computes in it.

    tf32 and fp8 are emulated: the inputs are rounded to the type and multiplied in fp32.
    """
    dtype, _, _ = FORMATS[name]
    found = {}
    if name == "fp64":
        return found
    if name == "tf32":
        emulated = round_to_tf32(a) @ round_to_tf32(b)
        found["emulated_matmul_error"] = error(emulated, exact)
        if device.type == "cuda" and not torch.version.hip and torch.cuda.is_tf32_supported():
            torch.set_float32_matmul_precision("high")
            found.update(timed_matmul(a, b, exact, device))
            torch.set_float32_matmul_precision("highest")
    elif dtype.itemsize == 1:
        emulated = through_fp8(a, dtype) @ through_fp8(b, dtype)
        found["emulated_matmul_error"] = error(emulated, exact)
    else:
        found.update(timed_matmul(a.to(dtype), b.to(dtype), exact, device))
    return found


def timed_matmul(a: Tensor, b: Tensor, exact: Tensor, device: torch.device) -> dict:
    """Return the error and the seconds of a @ b on this device."""
    matmul: Callable[[], Tensor] = partial(torch.matmul, a, b)
    timing = measure.seconds_in_turns({"matmul": matmul}, device, rounds=5)["matmul"]
    return {
        "matmul_error": error(matmul(), exact),
        "matmul_seconds": timing["seconds"],
        "min_matmul_seconds": timing["min_seconds"],
        "max_matmul_seconds": timing["max_seconds"],
    }


def error(result: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference over the norm of the fp64 result."""
    difference = result.to(exact.device).double() - exact
    return (difference.norm() / exact.norm()).item()


# --- one row per type


def run(name: str, a: Tensor, b: Tensor, exact: Tensor, device: torch.device) -> dict:
    dtype, exponent_bits, mantissa_bits = FORMATS[name]
    row = {"name": name}
    row.update(limits(exponent_bits, mantissa_bits, infinity=not name.endswith("fn")))
    if dtype is not None:
        row.update(sums(dtype))
    row.update(multiply(name, a, b, exact, device))
    return row


LIMITS = {
    "name": "type",
    "max": "largest",
    "epsilon": "epsilon",
    "smallest_subnormal": "smallest",
    "counts_by_1_to": "counts by 1 to",
    "stored_rate": "1.1 stored as",
}
SUMS = {
    "name": "type",
    "off_in_a_month": "off in a month",
    "sum_off": f"sum of {ADDITIONS:,} off by",
    "kahan_relative_error": "Kahan",
    "into_fp32_relative_error": "fp32 accumulator",
}
MATMULS = {
    "name": "type",
    "matmul_error": "error of a matmul",
    "emulated_matmul_error": "emulated",
    "matmul_seconds": "time of the matmul",
}

# --- checks


def check_type(row: dict) -> None:
    """Assert that the limits are torch's, and that 1 per second stops where counting by 1 ends."""
    name = row["name"]
    dtype, _, _ = FORMATS[name]
    info = torch.finfo(dtype)
    found = (row["max"], row["epsilon"], row["smallest_normal"])
    assert found == (info.max, info.eps, info.smallest_normal), name
    smallest = row["smallest_subnormal"]
    assert stored(smallest, dtype) == smallest, f"{name}: {smallest} cannot be stored"
    assert stored(smallest / 2, dtype) == 0, f"{name}: {smallest} is not the smallest"
    if "naive_sum" in row:
        expected = min(ADDITIONS, row["counts_by_1_to"])
        assert row["sum_of_ones"] == expected, f"{name}: ones are {row['sum_of_ones']}"
        within_bound = row["kahan_relative_error"] <= 2 * row["epsilon"]
        assert within_bound, f"{name}: Kahan's sum is off by more than 2 epsilon"


def check_roundings() -> str:
    """Assert that tf32 rounds to nearest, and that stochastic rounding is right on average."""
    x = torch.randn(65_536)
    tf32 = round_to_tf32(x)
    dropped_bits = tf32.view(torch.int32) & 0x1FFF
    assert not dropped_bits.any(), "tf32 has 10 mantissa bits"
    half_a_step = 2.0 ** (torch.frexp(x).exponent - 12)
    assert ((tf32 - x).abs() <= half_a_step).all(), "tf32 does not round to nearest"

    values = 1 + torch.arange(128) / 2**14  # from 1 up to the next bf16, 1 + 2^-7
    mean = round_stochastically(values.repeat(10_000, 1)).double().mean(0)
    bias = (mean - values).abs().max().item() * 2**7
    five_standard_errors = 5 * 0.5 / 100
    assert bias < five_standard_errors, f"stochastic rounding is biased by {bias:.1%} of a step"
    return (
        f"stochastic rounding is unbiased: {bias:.1%} of a step over 10,000 roundings, "
        f"{five_standard_errors:.1%} allowed"
    )


def check_matmuls(rows: dict[str, dict]) -> None:
    """Assert that fewer mantissa bits make larger errors."""
    errors = {}
    for name, row in rows.items():
        errors[name] = row.get("matmul_error", row.get("emulated_matmul_error"))
    assert errors["fp32"] < 1e-5, (
        f"fp32 matmuls are off by {errors['fp32']:.1e}: this is tf32 (NVIDIA_TF32_OVERRIDE?)"
    )
    for name in ("tf32", "fp16"):
        assert errors["fp32"] < errors[name] < errors["bf16"], errors
    assert errors["bf16"] < errors["fp8 e4m3fn"] < errors["fp8 e5m2"] < 0.1, errors


def check_update(row: dict, weights: int) -> str:
    """Assert that bf16 alone leaves most weights where they are, and that the cures work."""
    name = row["name"]
    moved = row["moved_share"]
    distance = row["distance_share"]
    if name == "bf16":
        assert moved < 0.4, f"bf16: {moved:.1%} of the weights moved"
    else:
        assert min(moved, distance) > 0.98, f"{name}: {moved:.1%} moved, {distance:.1%} as far"
    return (
        f"{STEPS} AdamW steps of {LR:g}, {name}, {row['bytes_per_weight']} bytes per weight: "
        f"{moved:.1%} of {weights:,} weights moved, {distance:.1%} as far as in fp32 "
        f"(deviation {row['distance_deviation']:.1%})"
    )


def check(rows: list[dict], updates: list[dict], matrix_size: int, weights: int) -> list[str]:
    by_name = {row["name"]: row for row in rows}
    for row in rows:
        if row["name"] != "tf32":
            check_type(row)
    off = by_name["fp8 e5m2"]["off_in_a_month"]
    assert off == -259_200, f"1.1 stored as 1 loses 0.1 in every second, not {off}"
    check_matmuls(by_name)

    fp32 = by_name["fp32"]
    bf16_sum = by_name["bf16"]["naive_sum"]
    fp16_sum = by_name["fp16"]["naive_sum"]
    return [
        "the limits of each type are torch's; 1 per second is exact up to where it counts by 1",
        "1.1 stored as 1 (whole numbers, fp8 e5m2) loses 259,200 in a month: a straight line",
        f"1.1 added {ADDITIONS:,} times: fp32 {fp32['naive_sum']:,.2f}, off by "
        f"{fp32['naive_relative_error']:.1e}; bf16 stops at {bf16_sum:,.0f} and fp16 at "
        f"{fp16_sum:,.0f}; counting by 1 bf16 stops at 256",
        "Kahan's sum is within 2 epsilon from bf16 on",
        f"errors of a {matrix_size} x {matrix_size} matmul: "
        "fp32 < tf32, fp16 < bf16 < fp8 e4m3fn < e5m2",
        *[check_update(row, weights) for row in updates],
        check_roundings(),
    ]


def main() -> int:
    args = lesson.parse_flags(__doc__)
    device = lesson.start(args.device)
    size = "cuda" if device.type == "cuda" else "cpu"
    place = device if size == "cuda" else torch.device("cpu")  # mps has no fp64

    matrix_size = MATRIX_SIZE[size]
    a, b = torch.randn(2, matrix_size, matrix_size, device=place)
    exact = a.double() @ b.double()
    rows = [run(name, a.to(device), b.to(device), exact, device) for name in FORMATS]

    weights = WEIGHTS[size]
    start = (0.02 * torch.randn(weights, device=place)).bfloat16()
    gradient = torch.randn(weights, device=place)
    updates = [update(method, start, gradient) for method in METHODS]

    checked = check(rows, updates, matrix_size, weights)
    lesson.end(
        rows,
        columns=[LIMITS, SUMS, MATMULS],
        checked=checked,
        args=args,
        device=device,
        updates=updates,
    )
    return 0


if __name__ == "__main__":
    exits.run(main)
