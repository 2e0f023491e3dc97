"""How far each number type reaches, how finely it counts, and where training notices.

With m mantissa bits there are 2^m steps from one power of two to the next. What is smaller than half a step is
lost when it is added: a sum stops growing, a weight stops learning. bf16 has the range of fp32 and 8 bits of
precision, fp16 has 11 bits and ends at 65,504, tf32 is what matrix units read of fp32, fp8 needs a scale. The
cures: a wider accumulator, a compensated (Kahan) sum, fp32 master weights, stochastic rounding.

    laptop    python 02_tensors_precision/precision.py
    one GPU   python 02_tensors_precision/precision.py --device cuda
    cluster   one process is all it uses

Look for: 1.1 per second drifts in fp32, and stands still in 16 bits; how many of 20 updates reach a bf16 weight.
Next: quantize.py for integers, 04_amp/train.py for training in bf16. The rounding itself: _precision_formats.py.
"""

import sys
import time
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common/, with nothing installed
from _precision_formats import FORMATS, limits, multiply_fp8, round_stochastically, round_to_tf32, scale_to_fp8

from common import cli, exits, hardware, report, runtime

ADDITIONS, SIZE, WEIGHTS, STEPS, LR = 10_000, 512, 65_536, 20, 3e-5


def types() -> dict:
    rows, found = [["type", "bits", "max", "epsilon", "smallest normal", "subnormal", "counts by 1 to"]], {}
    for name, (dtype, e, m) in FORMATS.items():
        own = found[name] = limits(e, m, infinity=not name.endswith("fn"))
        rows.append([name, f"1+{e}+{m}", *(f"{value:.8g}" for value in own.values())])
        if dtype:
            info, integer = torch.finfo(dtype), {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
            last_bit = torch.tensor(1, dtype=integer[dtype.itemsize]).view(dtype).item()
            assert [info.max, info.eps, info.smallest_normal, last_bit] == [*own.values()][:4], name
    print(report.table(rows) + "\nchecked: what the bits allow is what torch says\n")
    return found


def sums(dtype: torch.dtype, increments: Tensor, additions: int) -> dict[str, Tensor]:
    """Each increment added over and over: naively and Kahan's way in `dtype`, and into an fp32 accumulator."""
    held = torch.float32 if dtype.itemsize == 1 else dtype  # fp8 has no arithmetic: results are cast there and back

    def keep(x: Tensor) -> Tensor:  # e4m3fn has no infinity: of what is too large torch 2.11 makes NaN, 2.13 the max
        return (x.clamp(-448, 448) if dtype == torch.float8_e4m3fn else x).to(dtype).to(held)

    step = keep(increments.to(held))
    naive, kahan, lost = (torch.zeros_like(step) for _ in range(3))
    into_fp32, arrived = torch.zeros_like(step, dtype=torch.float32), torch.zeros_like(step, dtype=torch.int64)
    doublings = []  # the naive sums after 1, 2, 4, 8 ... additions
    for count in range(1, additions + 1):
        before, naive = naive, keep(naive + step)
        arrived += naive != before
        owed = keep(step - lost)  # what the last addition has lost is added with the next increment
        before, kahan = kahan, keep(kahan + owed)
        lost = keep(keep(kahan - before) - owed)
        into_fp32 += step
        if count.bit_count() == 1:
            doublings.append(naive)
    totals = {"naive": naive, "kahan": kahan, "into_fp32": into_fp32, "doublings": torch.stack(doublings)}
    return {"step": step, "arrived": arrived, **totals}


def accumulate(own: dict[str, dict]) -> dict:
    """1 per second, 1.1 per second and 62 other rates, in every type that something can be stored in."""
    increments = torch.cat((torch.tensor([1, 1.1], dtype=torch.float64), torch.rand(62, dtype=torch.float64) + 0.1))
    rows, found = [["type", "1.1 is", "its sum", "arrived", "error", "Kahan's", "into fp32"]], {}
    for name, (dtype, _, mantissa_bits) in FORMATS.items():
        if dtype is None:
            continue
        result = sums(dtype, increments, ADDITIONS)
        exact = [ADDITIONS * Fraction(step) for step in result["step"].tolist()]  # of what is stored; does not round
        errors = {
            way: [abs(float(Fraction(t) / e - 1)) for t, e in zip(result[way].tolist(), exact, strict=True)]
            for way in ("naive", "kahan", "into_fp32")
        }
        assert result["naive"][0] == min(ADDITIONS, own[name]["counts_by_1_to"]), name
        if mantissa_bits >= 7:
            assert max(errors["kahan"]) <= 2 * own[name]["epsilon"], name
        else:  # twice the digits, and then it stands still, too
            assert result["kahan"][0] == own[name]["counts_by_1_to"] ** 2, name
        step, total, arrived = (result[key][1].item() for key in ("step", "naive", "arrived"))
        doublings = result["doublings"][:, 1].tolist()
        ours = {f"{way}_relative_error": values[1] for way, values in errors.items()}
        rows.append([name, f"{step:.7g}", f"{total:.7g}", f"{arrived:,}", *(f"{e:.1e}" for e in ours.values())])
        found[name] = {"stored_increment": step, "naive_sum": total, "additions_arrived": arrived, **ours}
        found[name]["naive_share_after_doublings"] = [t / (2**i * step) for i, t in enumerate(doublings)]
    print(f"1.1 per second, added {ADDITIONS:,} times; errors against the exact sum of what 1.1 is stored as")
    print(report.table(rows) + "\nchecked: 1 per second is exact up to where the type counts by 1, and stands still")
    print("there; Kahan's sum is within 2 epsilon from bf16 on, and in fp8 stands still at the square of that\n")
    return found


def multiply(device: torch.device) -> dict:
    """The relative error of a matrix product in each type against fp64."""
    a, b = torch.randn(2, SIZE, SIZE)
    exact, products = a.double() @ b.double(), {}
    tf32 = device.type == "cuda" and torch.cuda.is_tf32_supported()
    cases = {"fp32": (a, b)} | ({"tf32": (a, b)} if tf32 else {"tf32 emulated": (round_to_tf32(a), round_to_tf32(b))})
    cases |= {"fp16": (a.half(), b.half()), "bf16": (a.bfloat16(), b.bfloat16())}
    fp8 = {name: [scale_to_fp8(x, FORMATS[name][0]) for x in (a, b)] for name in ("fp8 e4m3fn", "fp8 e5m2")}
    cases |= {f"{name} emulated": tuple(x.float() * scale for x, scale in both) for name, both in fp8.items()}
    for name, (x, y) in cases.items():
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        products[name] = x.to(device) @ y.to(device)
    for name, both in fp8.items() if device.type == "cuda" else ():  # no CPU has units for it
        try:
            products[name] = multiply_fp8(*(t.to(device) for pair in both for t in pair))
        except RuntimeError as refusal:
            print(f"not here: {name} times {name}: {str(refusal).splitlines()[0]}")
    errors = {name: ((p.cpu().double() - exact).norm() / exact.norm()).item() for name, p in products.items()}
    fp32, tf32, fp16, bf16, e4m3fn, e5m2, *_ = errors.values()
    assert fp32 < min(tf32, fp16) <= max(tf32, fp16) < bf16 < e4m3fn < e5m2
    assert all(abs(errors[name] / errors[f"{name} emulated"] - 1) < 0.1 for name in fp8 if name in errors)
    rows = [[f"matmul, {SIZE} x {SIZE}", "relative error"], *([name, f"{e:.2e}"] for name, e in errors.items())]
    print(f"{report.table(rows)}\nemulated: inputs rounded to that type (fp8: scaled first), multiplied in fp32")
    print("checked: fp32 < tf32, fp16 < bf16 < fp8 e4m3fn < fp8 e5m2; units for fp8, if any, within 10 % of emulated\n")
    return errors


def update() -> dict:
    """AdamW and a steady gradient: LR in every step, one way. What reaches a weight, by how it is kept?"""
    start, gradient, found = (0.02 * torch.randn(WEIGHTS)).bfloat16(), torch.randn(WEIGHTS), {}
    rows = [["weights", "bytes, with AdamW's", "updates arrived", "weights moved", "way gone", "deviation"]]
    for name in ("fp32", "bf16", "bf16 and fp32 master", "bf16, stochastic rounding"):
        updated = nn.Parameter(start.to(torch.bfloat16 if name == "bf16" else torch.float32, copy=True))
        updated.grad, weight, arrived = gradient.to(updated.dtype), start, 0
        optimizer = torch.optim.AdamW([updated], lr=LR, weight_decay=0)
        for _ in range(STEPS):
            before = weight
            optimizer.step()
            weight = updated.detach().to(torch.float32 if name == "fp32" else torch.bfloat16, copy=True)
            if "stochastic" in name:
                weight = round_stochastically(updated.detach())
                updated.data.copy_(weight)  # nothing finer goes on to the next step
            arrived += (weight != before).sum().item()
        way = (start.double() - weight.double()) * gradient.sign() / (STEPS * LR)  # 1: all of it
        arrived, moved = arrived / (STEPS * WEIGHTS), (way != 0).double().mean().item()
        gone, deviation = way.mean().item(), way.std().item()
        assert moved < 0.4 if name == "bf16" else min(moved, gone) > 0.98, name
        states = sum(t.element_size() for t in optimizer.state[updated].values() if t.ndim)
        nbytes = weight.element_size() + states + (4 if "master" in name else 0)
        rows.append([name, str(nbytes), *(f"{share:.1%}" for share in (arrived, moved, gone, deviation))])
        found[name] = {"bytes_per_weight": nbytes, "arrived_share": arrived, "moved_share": moved, "gone_share": gone}
        found[name]["gone_deviation"] = deviation
    values = 1 + torch.arange(128) / 2**14  # from 1 up to the next bf16, 1 + 2^-7
    bias = (round_stochastically(values.repeat(10_000, 1)).double().mean(0) - values).abs().max().item() * 2**7
    assert bias < 5 * 0.5 / 100  # five standard errors of a mean of 10,000 zeros and ones
    print(f"{STEPS} steps of AdamW at {LR:g}\n{report.table(rows)}")
    print(f"checked: stochastic rounding is unbiased: {bias:.1%} of a step over 10,000 roundings, 2.5 % allowed")
    return found


def plot(own: dict, summed: dict, file: Path) -> str | None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot (pip install matplotlib)")
        return None
    figure = Figure(figsize=(12, 4))
    left, right = figure.subplots(1, 2)
    left.set(xlim=(1e-50, 1e50), xscale="log", yscale="log", xlabel="smallest to largest number", ylabel="epsilon")
    colours = {name: f"C{i}" for i, name in enumerate(own)}
    for name, limit in own.items():
        left.plot([limit["smallest_subnormal"], limit["max"]], [limit["epsilon"]] * 2, "|-", label=name)  # C0, C1 ...
    right.set(xscale="log", xlabel="additions of 1.1", ylabel="naive sum, as a share of the exact sum")
    for name, one in summed.items():
        shares = one["naive_share_after_doublings"]
        right.plot([2**i for i in range(len(shares))], shares, color=colours[name])
    left.legend()
    figure.savefig(file, format="png", dpi=120, bbox_inches="tight")
    print(f"plot: {file}")
    return str(file)


def main() -> int:
    parser = cli.Parser(__doc__)
    parser.add_argument("--device", choices=("auto", "cuda", "mps", "cpu"), default="auto", help="for the products")
    parser.add_argument("--seed", type=cli.seed, default=0)
    parser.add_argument("--plot", type=cli.plot_file, metavar="PNG", default="runs/precision.png", help="(%(default)s)")
    parser.add_argument("--json", type=cli.writable_file, metavar="PATH", help="write the summary as one JSON object")
    args = parser.parse_args()
    device = runtime.single_device(args.device)
    runtime.seed(args.seed, deterministic=False)
    began, own = time.perf_counter(), types()
    measured = {"types": own, "sums": accumulate(own), "matmul_relative_error": multiply(device), "updates": update()}
    measured["plot"] = plot(own, measured["sums"], args.plot)
    measured |= {"device": hardware.device_name(device), "world_size": 1, "seconds": time.perf_counter() - began}
    report.write_json({**measured, "peak_memory_bytes": report.peak_memory_bytes(device)}, args.json)
    return 0


if __name__ == "__main__":
    exits.run(main)
