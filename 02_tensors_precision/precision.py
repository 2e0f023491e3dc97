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

import os
import sys
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common/, with nothing installed
from _precision import (
    FORMATS,
    check_limits,
    check_roundings,
    limits,
    multiply_fp8,
    round_stochastically,
    round_to_tf32,
    scale_to_fp8,
)

from common import exits, lesson

SINCE = {"tf32": (8, 0), "fp8 e5m2": (8, 9), "fp8 e4m3fn": (8, 9)}  # compute capability of NVIDIA's GPUs with units
ADDITIONS = 10_000
RATE = Fraction("1.1")  # per second
MONTH_SECONDS = 30 * 24 * 3600
SIZE = 512  # of the matrices
WEIGHTS, STEPS, LR = 65_536, 20, 3e-5


def sums(dtype: torch.dtype, increments: Tensor, additions: int) -> dict[str, Tensor]:
    """Each increment added over and over: plainly and Kahan's way in `dtype`, and into an fp32 accumulator."""
    held = torch.float32 if dtype.itemsize == 1 else dtype  # fp8 has no arithmetic: results are cast there and back

    def keep(x: Tensor) -> Tensor:
        if dtype == torch.float8_e4m3fn:  # it has no infinity: of what is too large torch 2.11 makes NaN, 2.13 the max
            x = x.clamp(-448, 448)
        return x.to(dtype).to(held)

    step = keep(increments.to(held))
    naive = torch.zeros_like(step)
    kahan = torch.zeros_like(step)
    lost = torch.zeros_like(step)
    into_fp32 = torch.zeros_like(step, dtype=torch.float32)
    for _ in range(additions):
        naive = keep(naive + step)

        owed = keep(step - lost)  # what the last addition has lost is added with the next increment
        before = kahan
        kahan = keep(kahan + owed)
        lost = keep(keep(kahan - before) - owed)

        into_fp32 += step
    return {"step": step, "naive": naive, "kahan": kahan, "into_fp32": into_fp32}


def added(dtype: torch.dtype, increments: Tensor) -> dict:
    """Sums of 1, 1.1 (these two are shown) and other rates; errors against exact sums of the rates as stored."""
    found = sums(dtype, increments, ADDITIONS)
    steps = [Fraction(step) for step in found["step"].tolist()]
    errors = {}
    for way in ("naive", "kahan", "into_fp32"):
        totals = zip(found[way].tolist(), steps, strict=True)
        errors[way] = [abs(float(Fraction(total) / (ADDITIONS * step) - 1)) for total, step in totals]
    month = (steps[1] - RATE) * MONTH_SECONDS  # exact, as if no addition were ever rounded
    return {
        "stored_rate": float(steps[1]),
        "off_in_a_month": int(month) if month.denominator == 1 else float(month),
        "naive_sum": found["naive"][1].item(),
        "sum_off": float(Fraction(found["naive"][1].item()) - ADDITIONS * steps[1]),
        "sum_of_ones": found["naive"][0].item(),
        "kahan_sum_of_ones": found["kahan"][0].item(),
        "naive_relative_error": errors["naive"][1],
        "kahan_relative_error": errors["kahan"][1],
        "worst_kahan_relative_error": max(errors["kahan"]),
        "into_fp32_relative_error": errors["into_fp32"][1],
    }


def has_units(name: str, device: torch.device) -> bool:
    """Whether matmuls in tf32 or fp8 run here. AMD's first fp8 is another format; and a variable can forbid tf32."""
    if device.type != "cuda" or torch.version.hip:
        return False
    if name == "tf32" and os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        return False
    return torch.cuda.get_device_capability(device) >= SINCE[name]


def multiply(name: str, a: Tensor, b: Tensor, device: torch.device) -> dict[str, float]:
    """The error of a @ b on this device, and emulated: inputs rounded to the type (fp8: scaled first), then fp32."""
    dtype, found = FORMATS[name][0], {}

    def matmul(x: Tensor, y: Tensor) -> Tensor:
        return x.to(device) @ y.to(device)

    if name == "tf32":
        found["emulated_matmul_error"] = matmul(round_to_tf32(a), round_to_tf32(b))
        if has_units(name, device):
            torch.set_float32_matmul_precision("high")
            found["matmul_error"] = matmul(a, b)
            torch.set_float32_matmul_precision("highest")
    elif name.startswith("fp8"):
        a8, a_scale = scale_to_fp8(a, dtype)
        b8, b_scale = scale_to_fp8(b, dtype)
        found["emulated_matmul_error"] = matmul(a8.float() * a_scale, b8.float() * b_scale)
        if has_units(name, device):
            try:
                found["matmul_error"] = multiply_fp8(*(t.to(device) for t in (a8, a_scale, b8, b_scale)))
            except (RuntimeError, ValueError) as error:  # torch raises ValueError for e5m2 times e5m2
                print(f"not supported: {name} times {name}: {str(error).splitlines()[0]}")
    elif name != "fp64":
        found["matmul_error"] = matmul(a.to(dtype), b.to(dtype))
    exact = a.double() @ b.double()
    return {key: ((result.cpu().double() - exact).norm() / exact.norm()).item() for key, result in found.items()}


def run(name: str, increments: Tensor, a: Tensor, b: Tensor, device: torch.device) -> dict:
    """One type: what its bits allow, what sums in it lose, how exact a matmul is."""
    dtype, exponent_bits, mantissa_bits = FORMATS[name]
    row = {"name": name, **limits(exponent_bits, mantissa_bits, infinity=not name.endswith("fn"))}
    return row | (added(dtype, increments) if dtype else {}) | multiply(name, a, b, device)


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
    distance = (start.double() - weight.double()) * gradient.sign() / (STEPS * LR)  # 1: as far as fp32 goes
    moments = sum(t.element_size() for t in optimizer.state[updated].values() if t.ndim)
    return {
        "name": way,
        "bytes_per_weight": weight.element_size() + moments + (4 if way == "bf16 and fp32 master" else 0),
        "moved_share": (weight != start).double().mean().item(),
        "distance_share": distance.mean().item(),
        "distance_deviation": distance.std().item(),
    }


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


def check_sums(row: dict) -> None:
    """1 per second is exact up to where the type counts by 1, and stands still there."""
    name, stop = row["name"], row["counts_by_1_to"]
    assert row["sum_of_ones"] == min(ADDITIONS, stop), f"{name}: a sum of ones is {row['sum_of_ones']}"
    if FORMATS[name][0].itemsize > 1:
        assert row["worst_kahan_relative_error"] <= 2 * row["epsilon"], f"{name}: Kahan's sum is off by more than that"
    else:  # Kahan's sum carries twice the digits, and then it stands still, too
        assert row["kahan_sum_of_ones"] == stop**2, f"{name}: Kahan's sum of ones is {row['kahan_sum_of_ones']}"


def check(rows: list[dict], updates: list[dict]) -> list[str]:
    by_name = {row["name"]: row for row in rows}
    for row in rows:
        if row["name"] != "tf32":
            check_limits(row["name"], row)
            check_sums(row)
    assert by_name["fp8 e5m2"]["off_in_a_month"] == -259_200, "1.1 stored as 1 loses 0.1 in every second"
    best = {name: row.get("matmul_error", row.get("emulated_matmul_error")) for name, row in by_name.items()}
    emulated = {name: by_name[name]["emulated_matmul_error"] for name in ("fp8 e4m3fn", "fp8 e5m2")}
    assert best["fp32"] < 1e-6, f"fp32 matmuls are off by {best['fp32']:.1e}: this is tf32 (NVIDIA_TF32_OVERRIDE=1?)"
    assert best["fp32"] < min(best["tf32"], best["fp16"]), best
    assert max(best["tf32"], best["fp16"]) < best["bf16"] < emulated["fp8 e4m3fn"] < emulated["fp8 e5m2"], best
    assert emulated["fp8 e5m2"] < 0.1, f"emulated fp8 is off by {emulated['fp8 e5m2']:.1e}"
    for name, error in emulated.items():
        assert abs(best[name] / error - 1) < 0.1, f"{name}: units {best[name]:.1e}, emulated {error:.1e}"
    fp32, bf16, fp16 = (by_name[name]["naive_sum"] for name in ("fp32", "bf16", "fp16"))
    checked = [
        "the limits of each type are what torch says; 1 per second is exact up to where the type counts by 1",
        "1.1 stored as 1 (whole numbers, fp8 e5m2) loses 259,200 in a month: a straight line, and no sum mends it",
        f"1.1 added {ADDITIONS:,} times: fp32 {fp32:,.2f}, off by {by_name['fp32']['naive_relative_error']:.1e}; "
        f"bf16 stops at {bf16:,.0f} and fp16 at {fp16:,.0f}; counting by 1 bf16 stops at 256",
        "Kahan's sum is within 2 epsilon from bf16 on; in fp8 it stops at the square of where the plain one does",
        f"errors of a {SIZE} x {SIZE} matmul: fp32 < tf32, fp16 < bf16 < fp8 e4m3fn < e5m2; "
        "units for fp8, if any, within 10% of emulated (use_fast_accum=False)",
    ]
    for row in updates:
        moved, distance = row["moved_share"], row["distance_share"]
        if row["name"] == "bf16":
            assert moved < 0.4, f"bf16: {moved:.1%} of the weights moved"
        else:
            assert min(moved, distance) > 0.98, f"{row['name']}: {moved:.1%} moved, {distance:.1%} as far as fp32's"
        checked.append(
            f"{STEPS} AdamW steps of {LR:g}, {row['name']}, {row['bytes_per_weight']} bytes per weight: {moved:.1%} of "
            f"{WEIGHTS:,} weights moved, {distance:.1%} as far as in fp32 (deviation {row['distance_deviation']:.1%})"
        )
    return [*checked, check_roundings()]


def main() -> int:
    args = lesson.flags(__doc__)
    device = lesson.start(args.device)
    increments = torch.cat((torch.tensor([1, 1.1], dtype=torch.float64), torch.rand(62, dtype=torch.float64) + 0.1))
    a, b = torch.randn(2, SIZE, SIZE)
    rows = [run(name, increments, a, b, device) for name in FORMATS]
    start = (0.02 * torch.randn(WEIGHTS)).bfloat16()
    gradient = torch.randn(WEIGHTS)
    updates = [update(way, start, gradient) for way in WAYS]
    checked = check(rows, updates)
    lesson.end(rows, columns=COLUMNS, checked=checked, args=args, device=device, updates=updates)
    return 0


if __name__ == "__main__":
    exits.run(main)
