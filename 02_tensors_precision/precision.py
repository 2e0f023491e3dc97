"""How far each number type reaches, how finely it counts, and where training notices.

With m mantissa bits there are 2^m steps from one power of two to the next. What is smaller than half a step is lost
when it is added: a sum stops growing, a weight stops learning. bf16 has the range of fp32 and 8 bits of precision,
fp16 has 11 bits and ends at 65,504, tf32 is what tensor cores read of fp32, fp8 needs a scale. The cures: a wider
accumulator, a compensated (Kahan) sum, fp32 master weights, stochastic rounding. A rate that cannot be stored is
another matter: 1.1 stored as 1 loses 0.1 in every second, 259,200 in a month, and no way of adding mends that.

    laptop    python 02_tensors_precision/precision.py
    one GPU   python 02_tensors_precision/precision.py --device cuda
    cluster   one process is all it uses

Look for: the two errors of "1.1 per second" side by side; how many of 20 updates reach a bf16 weight. The rounding
itself: _precision_formats.py. Next: quantize.py for integers, 04_amp/train.py for training in bf16.
"""

import os
import sys
import time
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # old/, with nothing installed
from _precision_formats import FORMATS, limits, multiply_fp8, round_stochastically, round_to_tf32, scale_to_fp8
from _precision_report import plot, print_products, print_rates, print_sums, print_types, print_updates

from old import cli, exits, hardware, report, runtime

ADDITIONS = 10_000
RATE = Fraction("1.1")  # per second
MONTH_SECONDS = 30 * 24 * 3600
SIZE = 512  # of the matrices
WEIGHTS, STEPS, LR = 65_536, 20, 3e-5
STORED = {name: dtype for name, (dtype, _, _) in FORMATS.items() if dtype}  # nothing is stored in tf32


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
    arrived = torch.zeros_like(step, dtype=torch.int64)
    doublings = []  # the plain sums after 1, 2, 4, 8 ... additions
    for count in range(1, additions + 1):
        before = naive
        naive = keep(naive + step)
        arrived += naive != before

        owed = keep(step - lost)  # what the last addition has lost is added with the next increment
        before = kahan
        kahan = keep(kahan + owed)
        lost = keep(keep(kahan - before) - owed)

        into_fp32 += step
        if count.bit_count() == 1:
            doublings.append(naive)
    return {
        "step": step,
        "arrived": arrived,
        "naive": naive,
        "kahan": kahan,
        "into_fp32": into_fp32,
        "doublings": torch.stack(doublings),
    }


def biased_rates() -> dict[str, dict[str, float]]:
    """1.1 per second over a month, added without any rounding: what is wrong is the stored rate, in every second."""
    stored = {"integer": 1}
    for name, dtype in STORED.items():
        stored[name] = torch.tensor(float(RATE), dtype=torch.float64).to(dtype).double().item()
    found = {}
    for name, rate in stored.items():
        error = (Fraction(rate) - RATE) * MONTH_SECONDS
        found[name] = {"stored_increment": rate, "month_error": float(error)}
    assert found["fp8 e5m2"] == found["integer"] == {"stored_increment": 1, "month_error": -259_200}
    return found


def accumulate(allowed: dict[str, dict]) -> dict[str, dict]:
    """1 per second, 1.1 per second and 62 other rates, in every type that something can be stored in."""
    increments = torch.cat((torch.tensor([1, 1.1], dtype=torch.float64), torch.rand(62, dtype=torch.float64) + 0.1))
    found = {}
    for name, dtype in STORED.items():
        result = sums(dtype, increments, ADDITIONS)
        exact = [ADDITIONS * Fraction(step) for step in result["step"].tolist()]  # of what is stored; does not round
        errors = {}
        for way in ("naive", "kahan", "into_fp32"):
            pairs = zip(result[way].tolist(), exact, strict=True)
            errors[way] = [abs(float(Fraction(total) / target - 1)) for total, target in pairs]

        counts_by_1_to = allowed[name]["counts_by_1_to"]
        assert result["naive"][0] == min(ADDITIONS, counts_by_1_to), name
        if dtype.itemsize > 1:
            assert max(errors["kahan"]) <= 2 * allowed[name]["epsilon"], name
        else:  # Kahan's sum carries twice the digits, and then it stands still, too
            assert result["kahan"][0] == counts_by_1_to**2, name

        step = result["step"][1].item()  # of 1.1
        total = result["naive"][1].item()
        doublings = result["doublings"][:, 1].tolist()
        found[name] = {
            "stored_increment": step,
            "naive_sum": total,
            "additions_arrived": result["arrived"][1].item(),
            "stored_rate_error": float(exact[1] - ADDITIONS * RATE),
            "rounding_error": float(Fraction(total) - exact[1]),
            "naive_relative_error": errors["naive"][1],
            "kahan_relative_error": errors["kahan"][1],
            "into_fp32_relative_error": errors["into_fp32"][1],
            "naive_share_after_doublings": [total / (2**i * step) for i, total in enumerate(doublings)],
        }
    return found


def multiply(device: torch.device) -> dict[str, float]:
    """The relative error of a matrix product in each type against fp64. Emulated: rounded, multiplied in fp32."""
    native, _ = hardware.native_types(device)
    a, b = torch.randn(2, SIZE, SIZE)
    scaled = {}
    for name in ("fp8 e4m3fn", "fp8 e5m2"):
        scaled[name] = (*scale_to_fp8(a, FORMATS[name][0]), *scale_to_fp8(b, FORMATS[name][0]))

    def product(x: Tensor, y: Tensor) -> Tensor:
        return x.to(device) @ y.to(device)

    torch.set_float32_matmul_precision("highest")
    products = {"fp32": product(a, b)}
    if "tf32" in native and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0":
        torch.set_float32_matmul_precision("high")
        products["tf32"] = product(a, b)
        torch.set_float32_matmul_precision("highest")
    else:
        products["tf32 emulated"] = product(round_to_tf32(a), round_to_tf32(b))
    products["fp16"] = product(a.half(), b.half())
    products["bf16"] = product(a.bfloat16(), b.bfloat16())
    for name, (a8, a_scale, b8, b_scale) in scaled.items():
        products[f"{name} emulated"] = product(a8.float() * a_scale, b8.float() * b_scale)
    for name, operands in scaled.items():
        if "fp8" not in native or torch.version.hip:  # AMD's first fp8 is another format
            continue
        try:
            products[name] = multiply_fp8(*(t.to(device) for t in operands))
        except (RuntimeError, ValueError) as error:  # torch raises ValueError for e5m2 times e5m2
            print(f"not supported: {name} times {name}: {str(error).splitlines()[0]}")

    exact = a.double() @ b.double()
    errors = {name: ((p.cpu().double() - exact).norm() / exact.norm()).item() for name, p in products.items()}
    tf32 = errors.get("tf32", errors.get("tf32 emulated"))
    assert errors["fp32"] < min(tf32, errors["fp16"])
    assert max(tf32, errors["fp16"]) < errors["bf16"]
    assert errors["bf16"] < errors["fp8 e4m3fn emulated"] < errors["fp8 e5m2 emulated"]
    for name in ("fp8 e4m3fn", "fp8 e5m2"):
        if name in errors:
            assert abs(errors[name] / errors[f"{name} emulated"] - 1) < 0.1, name
    return errors


def update() -> dict[str, dict]:
    """AdamW and a steady gradient: LR in every step, one way. What reaches a weight, by how it is kept?"""
    start = (0.02 * torch.randn(WEIGHTS)).bfloat16()
    gradient = torch.randn(WEIGHTS)
    found = {}
    for name in ("fp32", "bf16", "bf16 and fp32 master", "bf16, stochastic rounding"):
        updated = nn.Parameter(start.to(torch.bfloat16 if name == "bf16" else torch.float32, copy=True))
        updated.grad = gradient.to(updated.dtype)
        optimizer = torch.optim.AdamW([updated], lr=LR, weight_decay=0)
        weight = start
        arrived = 0
        for _ in range(STEPS):
            before = weight
            optimizer.step()
            if name == "bf16, stochastic rounding":
                weight = round_stochastically(updated.detach())
                updated.data.copy_(weight)  # nothing finer goes on to the next step
            else:
                weight = updated.detach().to(torch.float32 if name == "fp32" else torch.bfloat16, copy=True)
            arrived += (weight != before).sum().item()

        progress = (start.double() - weight.double()) * gradient.sign() / (STEPS * LR)  # 1: as far as fp32 goes
        moments = sum(t.element_size() for t in optimizer.state[updated].values() if t.ndim)
        master = 4 if name == "bf16 and fp32 master" else 0
        found[name] = {
            "bytes_per_weight": weight.element_size() + moments + master,
            "arrived_share": arrived / (STEPS * WEIGHTS),
            "moved_share": (progress != 0).double().mean().item(),
            "gone_share": progress.mean().item(),
            "gone_deviation": progress.std().item(),
        }
        if name == "bf16":
            assert found[name]["moved_share"] < 0.4
        else:
            assert min(found[name]["moved_share"], found[name]["gone_share"]) > 0.98, name
    return found


def main() -> int:
    parser = cli.Parser(__doc__)
    parser.add_argument("--device", choices=("auto", "cuda", "mps", "cpu"), default="auto", help="for the products")
    parser.add_argument("--seed", type=cli.natural, default=0)
    parser.add_argument("--plot", type=cli.plot_file, metavar="PNG", default="runs/precision.png", help="(%(default)s)")
    parser.add_argument("--json", type=cli.writable_file, metavar="PATH", help="write the summary as one JSON object")
    args = parser.parse_args()
    device = runtime.single_device(args.device)
    runtime.seed(args.seed, deterministic=False)
    runtime.exact_fp32(device)
    start = time.perf_counter()
    allowed = {name: limits(e, m, infinity=not name.endswith("fn")) for name, (_, e, m) in FORMATS.items()}
    print_types(allowed)
    rates = biased_rates()
    print_rates(rates)
    added = accumulate(allowed)
    print_sums(added, ADDITIONS)
    errors = multiply(device)
    print_products(errors, SIZE)
    updates = update()
    print_updates(updates, STEPS, LR)
    summary = {
        "types": allowed,
        "biased_rates": rates,
        "sums": added,
        "matmul_relative_error": errors,
        "updates": updates,
        "plot": plot(allowed, added, args.plot),
        "device": hardware.device_name(device),
        "world_size": 1,
        "seconds": time.perf_counter() - start,
        "peak_memory_bytes": report.peak_memory_bytes(device),
    }
    report.write_json(summary, args.json)
    return 0


if __name__ == "__main__":
    exits.run(main)
