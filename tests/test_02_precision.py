"""02_tensors_precision/precision.py: its figures against numpy's and ml_dtypes', and what its own checks must catch."""

import json
import math
from fractions import Fraction

import numpy as np
import pytest
from support.harness import in_long, run, with_fault

ml_dtypes = pytest.importorskip("ml_dtypes")
SCRIPT = "02_tensors_precision/precision.py"
STORED = {
    "fp64": np.float64,
    "fp32": np.float32,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp8 e5m2": ml_dtypes.float8_e5m2,
    "fp8 e4m3fn": ml_dtypes.float8_e4m3fn,
}


@pytest.fixture(scope="module")
def summary(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("precision")
    result = run(SCRIPT, folder, "--device", "cpu", "--json", "s.json")
    assert result.code == 0, result.err
    found = json.loads((folder / "s.json").read_text(encoding="utf-8"))
    return found | {"rows": {row["name"]: row for row in found["rows"]}}


def test_limits_are_those_of_numpy_and_ml_dtypes(summary):
    rows = summary["rows"]
    for name, dtype in STORED.items():
        info, own = ml_dtypes.finfo(dtype), rows[name]
        limits = [
            float(info.max),
            float(info.eps),
            float(info.smallest_normal),
            float(info.smallest_subnormal),
        ]
        assert [
            own[key] for key in ("max", "epsilon", "smallest_normal", "smallest_subnormal")
        ] == limits, name
        count = own["counts_by_1_to"]
        assert [int(dtype(whole)) for whole in (count - 1, count)] == [count - 1, count], name
        assert int(dtype(count + 1)) != count + 1, name
    assert rows["tf32"]["epsilon"] == rows["fp16"]["epsilon"]
    assert rows["tf32"]["smallest_normal"] == rows["fp32"]["smallest_normal"]


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "fp8 e5m2"])
def test_sums_are_those_of_numpy(summary, name):
    """The same chain in numpy's scalars: each operation rounds to the type."""
    dtype, row = STORED[name], summary["rows"][name]
    step, total, kahan, lost = float(dtype(1.1)), 0.0, 0.0, 0.0
    assert row["stored_rate"] == step
    assert row["off_in_a_month"] == pytest.approx(
        float(Fraction(step) * 2_592_000 - Fraction(2_851_200)), rel=1e-12
    )
    if name.startswith("fp8"):
        return  # it has no arithmetic
    for _ in range(10_000):
        total = float(dtype(total + step))
        owed = float(dtype(step - lost))
        new = float(dtype(kahan + owed))
        lost = float(dtype(float(dtype(new - kahan)) - owed))
        kahan = new
    exact = 10_000 * Fraction(step)
    assert row["naive_sum"] == total
    assert row["sum_off"] == pytest.approx(float(Fraction(total) - exact), rel=1e-12)
    assert row["kahan_relative_error"] == pytest.approx(
        abs(float(Fraction(kahan) / exact - 1)), rel=1e-9
    )


def test_sums_stop_and_what_mends_that(summary):
    rows = summary["rows"]
    assert [rows[name]["naive_sum"] for name in ("bf16", "fp16")] == [512, 4096]
    assert rows["bf16"]["sum_of_ones"] == 256
    for name in ("bf16", "fp16"):
        assert (
            rows[name]["into_fp32_relative_error"] < 1e-3 < 0.5 < rows[name]["naive_relative_error"]
        )


def test_matmuls(summary):
    rows = summary["rows"]
    assert rows["fp32"]["matmul_error"] < 1e-6
    # emulated, and said so
    assert not any("matmul_error" in rows[name] for name in ("tf32", "fp8 e4m3fn", "fp8 e5m2"))
    # two inputs rounded to m bits, each off by about 2^-(m+1) * 0.41 (root mean square); bf16 also rounds the result
    assert rows["tf32"]["emulated_matmul_error"] == pytest.approx(2**-11 * 0.41 * 2**0.5, rel=0.1)
    assert rows["bf16"]["matmul_error"] == pytest.approx(2**-8 * 0.41 * 3**0.5, rel=0.1)


def test_updates(summary):
    fp32, bf16, master, stochastic = summary["updates"]
    # 3e-5 is more than half a step of bf16 for |w| < 2^-7 alone: that share of weights of deviation 0.02
    assert bf16["moved_share"] == pytest.approx(math.erf(2**-7 / 0.02 / 2**0.5), abs=0.01)
    assert fp32["moved_share"] == 1
    for way in (fp32, master, stochastic):
        assert way["moved_share"] > 0.98
        assert way["distance_share"] == pytest.approx(1, abs=0.02)
    # without a master each of the 20 roundings stays in the weight, with one only the last
    assert stochastic["distance_deviation"] > 2 * master["distance_deviation"] > 0
    assert [way["bytes_per_weight"] for way in summary["updates"]] == [12, 6, 14, 10]


FAULTS = [
    ("owed = step - lost", "owed = step + lost"),
    ("totals = add_up(torch.tensor([1, 1.1]", "totals = add_up(torch.tensor([1.01, 1.1]"),
    ("rounded = bits + 0xFFF + last_kept_bit", "rounded = bits"),
    ("bits = x.view(torch.int32) + random_bits", "bits = x.view(torch.int32) + (1 << 15)"),
]


@pytest.mark.parametrize(
    ("line", "wrong"),
    [FAULTS[0], *(in_long(*fault) for fault in FAULTS[1:])],
)
def test_the_script_catches_what_is_wrong(tmp_path, line, wrong):
    result = run(with_fault(SCRIPT, tmp_path, line, wrong), tmp_path, "--device", "cpu")
    assert result.code not in (0, 2)
    assert "AssertionError" in result.err


@pytest.mark.gpu(n=1)
@pytest.mark.parametrize("allow", ["0", "1"])
def test_on_a_gpu(gpus, tmp_path, allow):
    """Units for tf32 where there are any. NVIDIA's images set the variable, and fp32 is fp32 all the same."""
    env = {
        "CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"],
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": allow,
    }
    result = run(SCRIPT, tmp_path, "--device", "cuda", "--json", "s.json", **env)
    assert result.code == 0, result.err[-4000:]
    rows = {
        row["name"]: row
        for row in json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))["rows"]
    }
    assert rows["fp32"]["matmul_error"] < 1e-5
    if "matmul_error" in rows["tf32"]:
        assert (
            10 * rows["fp32"]["matmul_error"]
            < rows["tf32"]["matmul_error"]
            < rows["bf16"]["matmul_error"] / 2
        )
