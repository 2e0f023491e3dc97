"""How far each number type reaches, how finely it counts, and where training notices.

With m mantissa bits there are 2^m steps from one power of two to the next. What is smaller than half a step is lost
when it is added: a sum stops growing, a weight stops learning. bf16 has the range of fp32 and 8 bits of precision,
fp16 has 11 bits and ends at 65,504, tf32 is what tensor cores read of fp32, fp8 needs a scale. The cures: a wider
accumulator, a compensated (Kahan) sum, fp32 master weights, stochastic rounding. A rate that cannot be stored is
another matter: 1.1 stored as 1 loses 0.1 in every second, 259,200 in a month, and no way of adding mends that.

    laptop    python 02_tensors_precision/precision.py
    one GPU   python 02_tensors_precision/precision.py --device cuda
    cluster   one process is all it uses

Look for: the two errors of "1.1 per second" side by side; how many weights 20 steps move in bf16.
Before: tensors.py. Next: quantize.py for integers, 04_amp/train.py for training in bf16.
"""

import sys
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits, report

FORMATS = {  # type, exponent bits, mantissa bits
    "fp64": (torch.float64, 11, 52),
    "fp32": (torch.float32, 8, 23),
    "tf32": (None, 8, 10),  # nothing is stored in it
    "bf16": (torch.bfloat16, 8, 7),
    "fp16": (torch.float16, 5, 10),
    "fp8 e5m2": (torch.float8_e5m2, 5, 2),
    "fp8 e4m3fn": (torch.float8_e4m3fn, 4, 3),  # "fn": finite, and NaN
}
ADDITIONS = 10_000
RATE = Fraction("1.1")  # per second
MONTH_SECONDS = 30 * 24 * 3600
SIZE = 512  # of the matrices
WEIGHTS, STEPS, LR = 65_536, 20, 3e-5


def limits(exponent_bits: int, mantissa_bits: int, infinity: bool) -> dict[str, float]:
    """What the bits allow. Without infinity the largest exponent holds numbers too, but for one pattern, NaN."""
    bias = 2 ** (exponent_bits - 1) - 1
    epsilon = 2.0**-mantissa_bits
    return {
        "max": (2 - epsilon) * 2.0**bias if infinity else (2 - 2 * epsilon) * 2.0 ** (bias + 1),
        "epsilon": epsilon,  # from 1 to the next number
        "smallest_normal": 2.0 ** (1 - bias),
        # the exponent's bits are 0: no leading one
        "smallest_subnormal": 2.0 ** (1 - bias) * epsilon,
        "counts_by_1_to": 2 ** (mantissa_bits + 1),  # the next whole number is not there
    }


def add_up(step: Tensor) -> dict[str, Tensor]:
    """A number added to itself over and over in its own type, plainly and Kahan's way, and into an fp32 accumulator."""
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


def round_to_tf32(x: Tensor) -> Tensor:
    """To nearest, ties to even: add just under half of the last bit that stays, and one more if that bit is set."""
    bits = x.view(torch.int32)
    return (bits + 0xFFF + (bits >> 13 & 1) & -(1 << 13)).view(torch.float32)


def round_stochastically(x: Tensor) -> Tensor:
    """To bf16: add random bits below its mantissa, so that what is cut off is the chance of rounding up."""
    bits = x.view(torch.int32) + torch.randint(1 << 16, x.shape, dtype=torch.int32)
    return (bits & -(1 << 16)).view(torch.float32).to(torch.bfloat16)


def through_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to fp8 and back: scaled first, so that the largest value of x falls on the type's largest."""
    scale = x.abs().max() / torch.finfo(dtype).max
    return (x / scale).to(dtype).float() * scale


def update(way: str, start: Tensor, gradient: Tensor) -> dict:
    """AdamW and a steady gradient: LR in every step, one way. What reaches a weight, by how it is kept?"""
    updated = nn.Parameter(start.to(torch.bfloat16 if way == "bf16" else torch.float32, copy=True))
    updated.grad = gradient.to(updated.dtype)
    optimizer = torch.optim.AdamW([updated], lr=LR, weight_decay=0)
    for _ in range(STEPS):
        optimizer.step()
        weight = updated.detach()
        if way == "bf16, stochastic rounding":
            weight = round_stochastically(weight)
            updated.data.copy_(weight)  # nothing finer goes on to the next step
        elif way == "bf16 and fp32 master":
            weight = weight.bfloat16()
    # 1: as far as fp32 goes
    distance = (start.double() - weight.double()) * gradient.sign() / (STEPS * LR)
    moments = sum(t.element_size() for t in optimizer.state[updated].values() if t.ndim)
    return {
        "name": way,
        "bytes_per_weight": weight.element_size()
        + moments
        + (4 if way == "bf16 and fp32 master" else 0),
        "moved_share": (weight != start).double().mean().item(),
        "distance_share": distance.mean().item(),
        "distance_deviation": distance.std().item(),
    }


def stored(value: float, dtype: torch.dtype) -> float:
    return torch.tensor(value, dtype=torch.float64).to(dtype).item()


def sums(dtype: torch.dtype) -> dict:
    """1 and 1.1 per second: how far a month is off because of what is stored, and a sum because of what is added."""
    rate = Fraction(stored(1.1, dtype))
    month = (rate - RATE) * MONTH_SECONDS  # exact, as if no addition were ever rounded
    found = {
        "stored_rate": float(rate),
        "off_in_a_month": int(month) if month == int(month) else float(month),
    }
    if dtype.itemsize == 1:
        return found  # fp8 has no arithmetic
    exact = ADDITIONS * rate
    totals = add_up(torch.tensor([1, 1.1], dtype=torch.float64).to(dtype))
    for way, (_, total) in totals.items():
        found[f"{way}_relative_error"] = abs(float(Fraction(total.item()) / exact - 1))
    ones, total = totals["naive"].tolist()
    return {
        **found,
        "sum_of_ones": ones,
        "naive_sum": total,
        "sum_off": float(Fraction(total) - exact),
    }


def multiply(name: str, a: Tensor, b: Tensor, device: torch.device) -> dict[str, float]:
    """The error of a @ b on this device, and for tf32 and fp8 emulated: inputs rounded to the type, then fp32."""
    dtype, found = FORMATS[name][0], {}
    exact = a.double() @ b.double()
    a, b = a.to(device), b.to(device)
    if name == "tf32":
        found["emulated_matmul_error"] = round_to_tf32(a) @ round_to_tf32(b)
        if device.type == "cuda" and not torch.version.hip and torch.cuda.is_tf32_supported():
            torch.set_float32_matmul_precision("high")
            found["matmul_error"] = a @ b
            torch.set_float32_matmul_precision("highest")
    elif dtype.itemsize == 1:
        found["emulated_matmul_error"] = through_fp8(a, dtype) @ through_fp8(b, dtype)
    elif name != "fp64":
        found["matmul_error"] = a.to(dtype) @ b.to(dtype)
    return {
        key: ((result.cpu().double() - exact).norm() / exact.norm()).item()
        for key, result in found.items()
    }


def run(name: str, a: Tensor, b: Tensor, device: torch.device) -> dict:
    """One type: what its bits allow, what sums in it lose, how exact a matmul is."""
    dtype, exponent_bits, mantissa_bits = FORMATS[name]
    row = {"name": name, **limits(exponent_bits, mantissa_bits, infinity=not name.endswith("fn"))}
    return row | (sums(dtype) if dtype else {}) | multiply(name, a, b, device)


WAYS = ("fp32", "bf16", "bf16 and fp32 master", "bf16, stochastic rounding")
COLUMNS = {
    "name": "type",
    "max": "largest",
    "epsilon": "epsilon",
    "smallest_subnormal": "smallest",
    "counts_by_1_to": "counts by 1 to",
    "stored_rate": "1.1 stored as",
    "off_in_a_month": "off in a month",
    "sum_off": f"sum of {ADDITIONS:,} off by",
    "kahan_relative_error": "Kahan",
    "into_fp32_relative_error": "fp32 accumulator",
    "matmul_error": "matmul",
    "emulated_matmul_error": "emulated",
}


def check_type(row: dict) -> None:
    """The limits are torch's. 1 per second is exact up to where the type counts by 1, and stands still there."""
    name, smallest = row["name"], row["smallest_subnormal"]
    dtype = FORMATS[name][0]
    info = torch.finfo(dtype)
    assert (row["max"], row["epsilon"], row["smallest_normal"]) == (
        info.max,
        info.eps,
        info.smallest_normal,
    ), name
    assert (stored(smallest, dtype), stored(smallest / 2, dtype)) == (smallest, 0), (
        f"{name}: {smallest} is not that"
    )
    if "naive_sum" in row:
        assert row["sum_of_ones"] == min(ADDITIONS, row["counts_by_1_to"]), (
            f"{name}: ones are {row['sum_of_ones']}"
        )
        assert row["kahan_relative_error"] <= 2 * row["epsilon"], (
            f"{name}: Kahan's sum is off by more than that"
        )


def check_roundings() -> str:
    """tf32: no bits are left and none is nearer. Stochastic: the mean of 10,000 roundings is the number itself."""
    x = torch.randn(WEIGHTS)
    tf32 = round_to_tf32(x)
    assert not (tf32.view(torch.int32) & 0x1FFF).any(), "tf32 has 10 mantissa bits"
    assert ((tf32 - x).abs() <= 2.0 ** (torch.frexp(x).exponent - 12)).all(), (
        "tf32 does not round to nearest"
    )
    values = 1 + torch.arange(128) / 2**14  # from 1 up to the next bf16, 1 + 2^-7
    mean = round_stochastically(values.repeat(10_000, 1)).double().mean(0)
    bias = (mean - values).abs().max().item() * 2**7
    # five standard errors
    assert bias < 5 * 0.5 / 100, f"stochastic rounding is biased by {bias:.1%} of a step"
    return (
        f"stochastic rounding is unbiased: {bias:.1%} of a step over 10,000 roundings, 2.5% allowed"
    )


def check(rows: list[dict], updates: list[dict]) -> list[str]:
    by_name = {row["name"]: row for row in rows}
    for row in rows:
        if row["name"] != "tf32":
            check_type(row)
    assert by_name["fp8 e5m2"]["off_in_a_month"] == -259_200, (
        "1.1 stored as 1 loses 0.1 in every second"
    )
    errors = {
        name: row.get("matmul_error", row.get("emulated_matmul_error"))
        for name, row in by_name.items()
    }
    assert errors["fp32"] < 1e-6, (
        f"fp32 matmuls are off by {errors['fp32']:.1e}: this is tf32 (NVIDIA_TF32_OVERRIDE?)"
    )
    for ten_bits in ("tf32", "fp16"):
        order = [errors[other] for other in ("fp32", ten_bits, "bf16", "fp8 e4m3fn", "fp8 e5m2")]
        assert order == sorted([*order[:-1], min(order[-1], 0.1)]), errors  # e5m2 is within 10 %
    fp32, bf16, fp16 = (by_name[name]["naive_sum"] for name in ("fp32", "bf16", "fp16"))
    checked = [
        "the limits of each type are what torch says; 1 per second is exact up to where the type counts by 1",
        "1.1 stored as 1 (whole numbers, fp8 e5m2) loses 259,200 in a month: a straight line, and no sum mends it",
        f"1.1 added {ADDITIONS:,} times: fp32 {fp32:,.2f}, off by {by_name['fp32']['naive_relative_error']:.1e}; "
        f"bf16 stops at {bf16:,.0f} and fp16 at {fp16:,.0f}; counting by 1 bf16 stops at 256",
        "Kahan's sum is within 2 epsilon from bf16 on",
        f"errors of a {SIZE} x {SIZE} matmul: fp32 < tf32, fp16 < bf16 < fp8 e4m3fn < e5m2",
    ]
    for row in updates:
        moved, distance = row["moved_share"], row["distance_share"]
        if row["name"] == "bf16":
            assert moved < 0.4, f"bf16: {moved:.1%} of the weights moved"
        else:
            assert min(moved, distance) > 0.98, (
                f"{row['name']}: {moved:.1%} moved, {distance:.1%} as far as fp32's"
            )
        checked.append(
            f"{STEPS} AdamW steps of {LR:g}, {row['name']}, {row['bytes_per_weight']} bytes per weight: {moved:.1%} of "
            f"{WEIGHTS:,} weights moved, {distance:.1%} as far as in fp32 (deviation {row['distance_deviation']:.1%})"
        )
    return [*checked, check_roundings()]


def main() -> int:
    args = report.lesson_flags(__doc__)
    device = report.start_lesson(args.device)
    a, b = torch.randn(2, SIZE, SIZE)
    rows = [run(name, a, b, device) for name in FORMATS]
    start = (0.02 * torch.randn(WEIGHTS)).bfloat16()
    gradient = torch.randn(WEIGHTS)
    updates = [update(way, start, gradient) for way in WAYS]
    checked = check(rows, updates)
    report.end_lesson(
        rows, columns=COLUMNS, checked=checked, args=args, device=device, updates=updates
    )
    return 0


if __name__ == "__main__":
    exits.run(main)
