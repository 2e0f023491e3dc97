"""02_tensors_precision: precision.py and the roundings of _precision_formats.py."""

import json
import math
import sys
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from support.chapter import load
from support.harness import run

from old import runtime

ml_dtypes = pytest.importorskip("ml_dtypes")
CPU = torch.device("cpu")
STORED = {
    "fp64": (torch.float64, np.float64),
    "fp32": (torch.float32, np.float32),
    "bf16": (torch.bfloat16, ml_dtypes.bfloat16),
    "fp16": (torch.float16, np.float16),
    "fp8 e5m2": (torch.float8_e5m2, ml_dtypes.float8_e5m2),
    "fp8 e4m3fn": (torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
}


formats = load("02_tensors_precision/_precision_formats.py")
precision = load("02_tensors_precision/precision.py")


def own_limits(name: str) -> dict[str, float]:
    _, exponent_bits, mantissa_bits = formats.FORMATS[name]
    return formats.limits(exponent_bits, mantissa_bits, infinity=not name.endswith("fn"))


def fp32(*patterns: int) -> torch.Tensor:
    return torch.tensor(np.array(patterns, dtype=np.uint32).view(np.int32)).view(torch.float32)


def patterns(x: torch.Tensor) -> list[int]:
    return (x.view(torch.int32).long() & 0xFFFFFFFF).tolist()


# limits


@pytest.mark.parametrize("name", STORED)
def test_limits_are_those_of_numpy_and_ml_dtypes(name):
    dtype = STORED[name][1]
    info, own = ml_dtypes.finfo(dtype), own_limits(name)
    assert own["max"] == float(info.max)
    assert own["epsilon"] == float(info.eps)
    assert own["smallest_normal"] == float(info.smallest_normal)
    assert own["smallest_subnormal"] == float(info.smallest_subnormal)
    count = int(own["counts_by_1_to"])
    assert [int(dtype(whole)) for whole in (count - 1, count)] == [count - 1, count]
    assert int(dtype(count + 1)) != count + 1


def test_published_limits():
    assert own_limits("fp8 e4m3fn")["max"] == 448
    assert own_limits("fp8 e5m2")["max"] == 57344
    assert own_limits("fp16")["max"] == 65504
    assert own_limits("fp32")["counts_by_1_to"] == 2**24


def test_e4m3fn_has_no_infinity():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert not every.isinf().any()
    assert every.isnan().sum() == 2
    assert every.nan_to_num().max() == own_limits("fp8 e4m3fn")["max"]


def test_tf32_limits_are_the_ends_of_what_its_rounding_keeps():
    own = own_limits("tf32")
    for value in own.values():
        assert formats.round_to_tf32(torch.tensor(value)).item() == value
    step = own["epsilon"]
    assert formats.round_to_tf32(torch.tensor(1 + 0.49 * step)).item() == 1
    assert formats.round_to_tf32(torch.tensor(1 + 0.51 * step)).item() == 1 + step
    assert formats.round_to_tf32(torch.tensor(own["counts_by_1_to"] + 1)).item() != own["counts_by_1_to"] + 1
    assert formats.round_to_tf32(torch.tensor(own["smallest_subnormal"] * 0.49)).item() == 0


# tf32


def test_tf32_rounding_bit_by_bit():
    cases = {
        0x3F800000: 0x3F800000,  # 1
        0x3F800FFF: 0x3F800000,  # just under half: down
        0x3F801000: 0x3F800000,  # half, even: down
        0x3F801001: 0x3F802000,  # just over half: up
        0x3F802000: 0x3F802000,
        0x3F803000: 0x3F804000,  # half, odd: up to the even
        0x3F805000: 0x3F804000,  # half, even: down
        0xBF803000: 0xBF804000,  # the sign has no say
        0x3FFFF000: 0x40000000,  # the carry goes into the exponent
        0x00000000: 0x00000000,
        0x80000000: 0x80000000,  # -0
        0x00000001: 0x00000000,  # the smallest subnormal of fp32
        0x00001000: 0x00000000,  # half of the smallest of tf32, even
        0x00001001: 0x00002000,
        0x00003000: 0x00004000,
        0x807FF000: 0x80800000,  # from the subnormals into the normals
        0x7F7FE000: 0x7F7FE000,  # the largest
        0x7F7FEFFF: 0x7F7FE000,
        0x7F7FF000: 0x7F800000,  # past the largest by half: inf
        0xFF7FFFFF: 0xFF800000,
        0x7F800000: 0x7F800000,  # inf
        0xFF800000: 0xFF800000,
    }
    assert patterns(formats.round_to_tf32(fp32(*cases))) == list(cases.values())
    assert formats.round_to_tf32(fp32(0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF)).isnan().all()


def test_tf32_rounding_is_nearest_even_everywhere():
    """Against the nearest multiple of the step in float64, which is exact for fp32."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-(2**31), 2**31, (200_000,), generator=generator, dtype=torch.int64).to(torch.int32)
    x = x.view(torch.float32)
    x = x[x.isfinite()]
    rounded = formats.round_to_tf32(x).double()
    exponent = torch.frexp(x.double()).exponent.clamp(min=-125)
    step = torch.ldexp(torch.ones(len(x), dtype=torch.float64), exponent - 11)
    expected = torch.round(x.double() / step) * step
    expected[expected.abs() > own_limits("tf32")["max"]] *= torch.inf
    assert torch.equal(rounded, expected)


# sums


ADDITIONS = 10_000
RATES = torch.cat((torch.tensor([1, 1.1, 0.1], dtype=torch.float64), torch.linspace(0.1, 1.1, 61, dtype=torch.float64)))


@cache
def sums(name: str, additions: int) -> dict[str, torch.Tensor]:
    return precision.sums(STORED[name][0], RATES, additions)


def relative_errors(name: str, way: str, additions: int) -> list[Fraction]:
    pairs = zip(sums(name, additions)[way].tolist(), sums(name, additions)["step"].tolist(), strict=True)
    return [abs(Fraction(value) / (additions * Fraction(one)) - 1) for value, one in pairs]


def ulps(name: str, way: str, additions: int) -> list[Fraction]:
    """How far each sum is from the exact one, in steps that the type has there."""
    found = []
    exact = [additions * Fraction(one) for one in sums(name, additions)["step"].tolist()]
    for value, target in zip(sums(name, additions)[way].tolist(), exact, strict=True):
        step = Fraction(2) ** (math.frexp(float(target))[1] - 1 - formats.FORMATS[name][2])
        found.append(abs(Fraction(value) - target) / step)
    return found


@pytest.mark.parametrize("name", ["fp64", "fp32", "fp16", "bf16"])
def test_kahan_is_within_one_ulp_whatever_the_length(name):
    for additions in (1, 10, 100, 1_000):
        assert max(ulps(name, "kahan", additions)) <= 1, additions
    # n·epsilon² grows with the length: in bf16 it is no longer small beside epsilon
    assert max(ulps(name, "kahan", ADDITIONS)) <= (4 if name == "bf16" else 2)
    assert max(relative_errors(name, "kahan", ADDITIONS)) <= 2 * own_limits(name)["epsilon"]


@pytest.mark.parametrize(("name", "least"), [("fp64", 100), ("fp32", 100), ("fp16", 1000), ("bf16", 100)])
def test_naive_sums_are_not(name, least):
    assert max(ulps(name, "naive", ADDITIONS)) > least


def test_kahan_is_the_sum_written_out():
    """Three types, one chain, in numpy's scalars: each operation rounds to the type."""
    for name in ("fp32", "bf16", "fp16"):
        torch_type, numpy_type = STORED[name]
        step, total, lost, naive = numpy_type(1.1), numpy_type(0), numpy_type(0), numpy_type(0)
        for _ in range(1_500):
            owed = numpy_type(step - lost)
            new = numpy_type(total + owed)
            lost = numpy_type(numpy_type(new - total) - owed)
            total, naive = new, numpy_type(naive + step)
        result = precision.sums(torch_type, torch.tensor([1.1], dtype=torch.float64), 1_500)
        assert result["kahan"].item() == float(total)
        assert result["naive"].item() == float(naive)


@pytest.mark.parametrize(("name", "stop"), [("bf16", 256), ("fp16", 2048), ("fp8 e4m3fn", 16), ("fp8 e5m2", 8)])
def test_counting_by_ones_stands_still(name, stop):
    result = precision.sums(STORED[name][0], torch.ones(1), 4096)
    assert result["naive"].item() == stop
    assert result["arrived"].item() == stop
    assert result["into_fp32"].item() == 4096
    assert result["kahan"].item() == min(4096, stop**2)  # Kahan carries twice the digits, no more
    assert result["doublings"][:, 0].tolist() == [min(2**i, stop) for i in range(13)]


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_an_fp32_accumulator_holds_what_16_bits_cannot(name):
    assert max(relative_errors(name, "into_fp32", ADDITIONS)) < 1e-3
    assert min(relative_errors(name, "naive", ADDITIONS)) > 0.5


# stochastic rounding


def test_stochastic_rounding_is_unbiased():
    torch.manual_seed(0)
    for start in (1.0, -1.0, 3e-5, -(2.0**100), 2.0**-130):  # the last is subnormal
        step = abs(start) * 2.0**-7 if start != 2.0**-130 else 2.0**-133
        values = (start + step * torch.arange(32, dtype=torch.float64) / 32).float()
        mean = formats.round_stochastically(values.repeat(20_000, 1)).double().mean(0)
        assert ((mean - values.double()).abs() / step).max() < 5 * 0.5 / 20_000**0.5, start


def test_stochastic_rounding_goes_to_a_neighbour_and_no_further():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator, dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32)
    keep = x.isfinite() & (x.abs() < torch.finfo(torch.bfloat16).max)
    x, bits = x[keep], bits[keep]
    torch.manual_seed(0)
    rounded = formats.round_stochastically(x).float()
    toward_zero = (bits & -65536).view(torch.float32)
    away = ((bits & -65536) + 65536).view(torch.float32)
    down, up = rounded == toward_zero, rounded == away
    assert (down | up).all()
    assert 0.45 < up.double().mean() < 0.55  # both happen


def test_stochastic_rounding_leaves_what_bf16_has():
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    rounded = formats.round_stochastically(every.float())
    numbers = ~every.isnan()
    assert torch.equal(rounded[numbers].view(torch.int16), every[numbers].view(torch.int16))
    assert rounded[~numbers].isnan().all()
    assert formats.round_stochastically(fp32(0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001)).isnan().all()


@pytest.mark.parametrize(("noise", "expected"), [("least", 0x3F800000), ("most", 0x3F810000)])
def test_stochastic_rounding_at_the_ends_of_its_noise(noise, expected, monkeypatch):
    def randint(low, high, shape, **options):
        return torch.full(shape, low if noise == "least" else high - 1, **options)

    monkeypatch.setattr(formats.torch, "randint", randint)
    rounded = formats.round_stochastically(fp32(0x3F800000, 0x3F800001, 0x3F80FFFF))
    assert patterns(rounded.float()) == [0x3F800000, expected, expected]


# the scripts


def report_of(script: str, folder, *flags) -> dict:
    result = run(
        f"02_tensors_precision/{script}", folder, "--device", "cpu", "--json", "report.json", *flags, warm=False
    )
    assert result.code == 0, result.err
    return json.loads((folder / "report.json").read_text()) | {"printed": result.out}


def test_precision_reports_what_it_measured(tmp_path):
    summary = report_of("precision.py", tmp_path, "--plot", "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    for name, own in summary["types"].items():
        assert own == own_limits(name)

    added = summary["sums"]
    assert set(added) == set(STORED)
    assert [added[name]["naive_sum"] for name in ("bf16", "fp16", "fp8 e5m2", "fp8 e4m3fn")] == [512, 4096, 8, 32]
    assert added["bf16"]["additions_arrived"] == 380
    assert 4e-5 < added["fp32"]["naive_relative_error"] < 5e-5
    for name, found in added.items():  # what was meant, and the two errors, are the sum
        total = 11_000 + found["stored_rate_error"] + found["rounding_error"]
        assert total == pytest.approx(found["naive_sum"], rel=1e-12), name
    assert abs(added["bf16"]["rounding_error"]) > 100 * abs(added["bf16"]["stored_rate_error"])
    assert added["fp32"]["kahan_relative_error"] < 6e-8

    errors = summary["matmul_relative_error"]
    assert errors["fp32"] < 1e-6
    assert not {"fp8 e4m3fn", "fp8 e5m2"} & errors.keys()  # no CPU has units for these
    # two inputs rounded to m bits, each off by about 2^-(m+1) * 0.41 (root mean square); bf16 also rounds the result
    assert errors["tf32 emulated"] == pytest.approx(2**-11 * 0.41 * 2**0.5, rel=0.1)
    assert errors["bf16"] == pytest.approx(2**-8 * 0.41 * 3**0.5, rel=0.1)

    ways = ("fp32", "bf16", "bf16 and fp32 master", "bf16, stochastic rounding")
    fp32, bf16, master, stochastic = (summary["updates"][way] for way in ways)
    # 3e-5 is more than half a step of bf16 for |w| < 2^-7 alone: that share of weights of deviation 0.02
    share = math.erf(2**-7 / 0.02 / 2**0.5)
    assert bf16["moved_share"] == pytest.approx(share, abs=0.01)
    assert bf16["arrived_share"] == pytest.approx(share, abs=0.02)
    assert fp32["moved_share"] == fp32["arrived_share"] == 1
    for way in (fp32, master, stochastic):
        assert way["moved_share"] > 0.98
        assert way["gone_share"] == pytest.approx(1, abs=0.02)
    # without a master each of the 20 roundings stays in the weight, with one only the last
    assert stochastic["gone_deviation"] > 2 * master["gone_deviation"] > 0
    assert [way["bytes_per_weight"] for way in (fp32, bf16, master, stochastic)] == [12, 6, 14, 10]


def test_fp8_is_scaled_to_its_largest_and_back():
    generator = torch.Generator().manual_seed(0)
    x = 1e-4 * torch.randn(64, 32, generator=generator)
    for name in ("fp8 e4m3fn", "fp8 e5m2"):
        torch_type, numpy_type = STORED[name]
        codes, scale = formats.scale_to_fp8(x, torch_type)
        assert codes.float().abs().max() == own_limits(name)["max"]
        expected = (x / scale).numpy().astype(numpy_type).astype(np.float32)
        assert np.array_equal(codes.float().numpy(), expected)
        # half a step of what is normal, half of the smallest subnormal below that
        smallest = own_limits(name)["smallest_subnormal"] * scale
        allowed = torch.maximum(x.abs() * own_limits(name)["epsilon"], smallest) / 2
        assert ((codes.float() * scale - x).abs() <= allowed * 1.001).all()


has_scaled_mm = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm", "CPU")


@pytest.mark.skipif(not has_scaled_mm, reason=f"torch {torch.__version__} has no _scaled_mm for CPUs")
def test_fp8_units_are_given_what_the_emulation_multiplies(monkeypatch):
    """A CPU takes the same call as a GPU, and sums in fp32: scales and shape must be right; and the layout, by rows
    and by columns, which only a GPU insists on."""
    scaled_mm = torch._scaled_mm

    def strict(x, y, *args, **kwargs):
        assert x.is_contiguous()
        assert y.t().is_contiguous()
        return scaled_mm(x, y, *args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", strict)
    x, y = torch.randn(32, 64), torch.randn(64, 48) * 1e-3
    both = [formats.scale_to_fp8(t, torch.float8_e4m3fn) for t in (x, y)]
    product = formats.multiply_fp8(*both[0], *both[1])
    expected = (both[0][0].double() * both[0][1]) @ (both[1][0].double() * both[1][1])
    assert product.dtype == torch.float32
    assert (product - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize(("factor", "refusal"), [(1, RuntimeError), (1, ValueError), (2, ValueError)])
def test_units_for_fp8_are_held_against_the_emulation(monkeypatch, factor, refusal, capsys):
    """The CPU in the place of a GPU with units for e4m3fn only; twice the product is an error of 1."""

    def units(x, x_scale, y, y_scale):
        if x.dtype == torch.float8_e5m2:
            raise refusal("no such units\nand more")
        return factor * (x.double() * x_scale) @ (y.double() * y_scale)

    monkeypatch.setattr(precision, "multiply_fp8", units)
    native = {"fp32", "fp16", "bf16", "fp8"}
    monkeypatch.setattr(precision.hardware, "native_types", lambda device: (native, "a test"))
    if factor == 1:
        errors = precision.multiply(CPU)
        assert errors["fp8 e4m3fn"] == pytest.approx(errors["fp8 e4m3fn emulated"], rel=0.01)
        assert "fp8 e5m2" not in errors
        assert "not supported: fp8 e5m2 times fp8 e5m2: no such units\n" in capsys.readouterr().out
    else:
        with pytest.raises(AssertionError):
            precision.multiply(CPU)


def test_precision_depends_on_the_seed_alone():
    def errors(seed: int) -> dict:
        torch.manual_seed(seed)
        return precision.multiply(CPU)

    assert errors(1) == errors(1) != errors(2)


@pytest.mark.parametrize("override", [None, "0"])
def test_tf32_that_the_environment_switches_off_is_emulated(monkeypatch, override):
    monkeypatch.setattr(precision.hardware, "native_types", lambda device: ({"fp32", "tf32"}, "a test"))
    if override is None:
        monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
        with pytest.raises(AssertionError):  # this CPU has no tf32: the product is that of fp32, and not passed off
            precision.multiply(CPU)
    else:
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", override)
        assert "tf32 emulated" in precision.multiply(CPU)
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_biased_rate_is_wrong_in_a_straight_line():
    """The stored rate's error is per second, and no sum in that type can be right about it."""
    rates = precision.biased_rates()
    assert rates["integer"]["month_error"] == pytest.approx(-0.1 * 2_592_000, abs=1e-6)
    for name, (_, numpy_type) in STORED.items():
        stored = float(numpy_type(1.1))
        assert rates[name]["stored_increment"] == stored
        expected = Fraction(stored) * 2_592_000 - Fraction(2_851_200)
        assert rates[name]["month_error"] == pytest.approx(float(expected), rel=1e-12)


def test_precision_refuses_a_wrong_seed(tmp_path):
    result = run("02_tensors_precision/precision.py", tmp_path, "--seed", 2**63)
    assert result.code == 2
    assert len(result.err.splitlines()) == 1
    assert "--seed" in result.err


def test_more_processes_are_refused(monkeypatch):
    job = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["script"])
    with pytest.raises(runtime.UserError, match="one process"):
        precision.main()


# on a GPU


def on_gpu(script: str, gpus: dict[str, str], folder: Path) -> dict:
    flags = ["--device", "cuda", "--json", "report.json"]
    result = run(f"02_tensors_precision/{script}", folder, *flags, CUDA_VISIBLE_DEVICES=gpus["CUDA_VISIBLE_DEVICES"])
    assert result.code == 0, result.err[-4000:]
    return json.loads((folder / "report.json").read_text()) | {"printed": result.out}


@pytest.mark.gpu(n=1)
def test_real_tf32_lies_between_fp32_and_bf16(gpus, tmp_path):
    errors = on_gpu("precision.py", gpus, tmp_path)["matmul_relative_error"]
    assert errors["fp32"] < 1e-6  # fp32 means fp32
    if "tf32" not in errors:
        pytest.skip("this GPU has no tf32")
    assert 10 * errors["fp32"] < errors["tf32"] < errors["bf16"] / 2


@pytest.mark.gpu(n=1)
def test_fp32_is_fp32_in_a_container_that_asks_for_tf32(gpus, tmp_path):
    """TORCH_ALLOW_TF32_CUBLAS_OVERRIDE is set in NVIDIA's images; torch's own setting stands above it."""
    env = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"], "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    flags = ["--device", "cuda", "--json", "report.json"]
    result = run("02_tensors_precision/precision.py", tmp_path, *flags, **env)
    assert result.code == 0, result.err[-4000:]
    assert json.loads((tmp_path / "report.json").read_text())["matmul_relative_error"]["fp32"] < 1e-6


@pytest.mark.gpu(n=1)
def test_real_fp8_beside_its_emulation(gpus, tmp_path):
    """That the two are within 10 % is asserted by the script."""
    summary = on_gpu("precision.py", gpus, tmp_path)
    errors = summary["matmul_relative_error"]
    if "fp8 e4m3fn" not in errors and "not supported: fp8 e4m3fn" not in summary["printed"]:
        pytest.skip("this GPU does not multiply fp8")
    assert errors["bf16"] < errors["fp8 e4m3fn"] < errors["fp8 e5m2 emulated"]
    assert "fp8 e5m2" in errors or "not supported: fp8 e5m2 times fp8 e5m2" in summary["printed"]
