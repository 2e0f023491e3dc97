"""04_amp/compare.py: what the types save and lose, counted against numpy, by hand and against a float reference."""

import json
import math

import numpy as np
import pytest
import torch
from support.chapter import load
from support.harness import TINY, run, with_fault
from torch import nn

from common import model, shapes

SCRIPT = "04_amp/compare.py"
helper = load("04_amp/_compare.py")
compare = load(SCRIPT)
CPU = torch.device("cpu")
ON_CPU = ["fp32", "bf16", "fp16", "fp16-unscaled", "fp8"]


def tiny() -> nn.Module:
    return model.build("tiny", shapes.parse_config(TINY, "tiny"), seed=0, device=CPU)


def tokens(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(0, 256, (4, 33), generator=torch.Generator().manual_seed(seed))
    return text[:, :-1], text[:, 1:]


def flags(folder) -> list:
    folder.mkdir(exist_ok=True)
    (folder / "tiny.json").write_text(json.dumps(TINY))
    return ["--model", "tiny.json", "--device", "cpu", "--steps", 12, "--json", "c.json"]


@pytest.fixture(scope="module")
def summary(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("compare")
    result = run(SCRIPT, folder, *flags(folder), "--dtypes", "all", warm=False)
    assert result.code == 0, result.err[-3000:]
    found = json.loads((folder / "c.json").read_text())
    return found | {"rows": {row["dtype"]: row for row in found["rows"]}, "printed": result.out}


def test_the_same_start_for_every_type(summary):
    rows = summary["rows"]
    assert [*rows] == ON_CPU
    fp32 = rows["fp32"]
    for name, row in rows.items():
        assert len(row["losses"]) == 12
        assert row["losses"][0] == pytest.approx(fp32["losses"][0], rel=1e-2)
        off = max(abs(a - b) for a, b in zip(row["losses"], fp32["losses"], strict=True))
        assert row["largest_loss_difference"] == pytest.approx(off)
        assert (row["losses"] == fp32["losses"]) == (name == "fp32")  # each type has arithmetic of its own
        assert row["last_loss"] < row["losses"][0]
        assert 12 * summary["parameters"] <= row["kept_bytes"] == fp32["kept_bytes"] < row["peak_bytes"]


def test_speed_is_of_native_types_only(summary):
    for row in summary["rows"].values():
        assert row["n"] == 5
        assert ("tokens_per_second" in row) == ("speed_ratio" in row) == row["native"]
        if row["native"]:
            assert row["min_tokens_per_second"] <= row["tokens_per_second"] <= row["max_tokens_per_second"]
            assert row["min_speed_ratio"] <= row["speed_ratio"] <= row["max_speed_ratio"]
    assert summary["rows"]["fp32"]["speed_ratio"] == 1
    assert summary["rows"]["fp8"]["name"] == "fp8 (emulated)"  # native on no CPU


def test_failures_happen_and_are_cured(summary):
    for name in ("overflowing gradients", "vanishing gradients", "clipping scaled gradients", "softmax by hand"):
        assert any(line.startswith(f"{name}:") for line in summary["checked"])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("MICRO_BATCHES = 1", "with the loss divided by 1"),  # then nothing vanishes from so small a model
        ("clip_grad_norm_ = lambda parameters, limit: None", "clipped to"),
        ("AUTOCAST.clear()", "of fp32's activations"),
        ("change = lambda run, net: torch.ones(1)", "weights NaN"),
    ],
)
def test_the_script_catches_what_is_wrong(tmp_path, wrong, said):
    line = "ROUNDS = 6 "
    where = "" if wrong.startswith("AUTOCAST") else "types."
    script = with_fault(SCRIPT, tmp_path, line, f"{where}{wrong}\n{line}")
    result = run(script, tmp_path, *flags(tmp_path), "--batch-size", 8)
    assert result.code not in (0, 2)
    assert "AssertionError" in result.err
    assert said in result.err


def test_what_cannot_run_is_one_line(tmp_path):
    for more, said in ((["--steps", 20], "use 24"), (["--dtypes", "fp9"], "fp9")):
        result = run(SCRIPT, tmp_path, *flags(tmp_path), *more)
        assert (result.code, result.err.count("\n")) == (2, 1), result.err
        assert said in result.err


class Chain(nn.Module):
    """Two matmuls and nothing else; the second item of a batch multiplies the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32, bias=False), nn.Linear(32, 48, bias=False)

    def forward(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).float().sum() * factor


def test_matmul_inputs_are_saved_in_half_the_bytes():
    batch = (torch.randn(10, 16), torch.tensor(1.0))
    runs = {name: compare.Run(name, Chain()) for name in ("fp32", "bf16", "fp16")}
    sizes = {name: helper.measure_memory(run, batch)[0] for name, run in runs.items()}
    inputs, scalars = 10 * (16 + 32), 4  # and the factor of the loss
    assert sizes["fp32"] == 4 * inputs + scalars
    assert sizes["bf16"] == 2 * inputs + scalars
    assert sizes["fp16"] == 2 * inputs + 2 * scalars  # and the loss scale


def test_underflow_is_what_numpy_rounds_to_zero():
    generator = torch.Generator().manual_seed(3)
    gradients = torch.randn(50_000, generator=generator) * 2.0 ** (torch.rand(50_000, generator=generator) * 60 - 40)
    edges = [0.0, 2.0**-25, -(2.0**-25) * (1 + 2**-20), 2.0**-24, 2.0**-14, 2.0**-14 * (1 - 2**-11), 65519.0, 65520.0]
    gradients = torch.cat((gradients, torch.tensor(edges)))
    for factor in (1.0, 65536.0, 1 / 1024):
        with np.errstate(over="ignore"):
            half = (gradients.numpy() * np.float32(factor)).astype(np.float16)
        subnormal = (half != 0) & (np.abs(half) < np.finfo(np.float16).smallest_normal)
        counts = {"zero_share": (half == 0) & (gradients.numpy() != 0), "fewer_bits_share": subnormal}
        counts["infinite_share"] = np.isinf(half)
        shares = {key: int(found.sum()) / len(half) for key, found in counts.items()}
        assert helper.underflow(gradients, factor) == {"factor": factor, **shares}


def test_skipped_steps_are_counted_and_change_nothing():
    x, plain, huge = torch.ones(4, 16), torch.tensor(1e-3), torch.tensor(1e30)
    batches = [(x, factor) for factor in (plain, huge, plain, huge, huge, plain)]
    run, moved = compare.Run("fp16", Chain()), []
    for _ in batches:
        before = [p.detach().clone() for p in run.net.parameters()]
        run.train(batches, 1)
        moved.append(not all(torch.equal(p, old) for p, old in zip(run.net.parameters(), before, strict=True)))
    assert moved == [True, False, True, False, False, True]
    measured = {f"{prefix}{key}": 1 for prefix in ("", "min_", "max_") for key in ("seconds", "time_ratio")}
    assert compare.summarize(run, run, (0, 0), {"n": 1, **measured}, 1)["skipped_steps"] == 3
    assert run.scaler.get_scale() == compare.INITIAL_SCALE / 2**3


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_the_clip_sees_true_gradients(monkeypatch, name):
    net, seen = tiny(), []
    net(*tokens()).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()]).item()
    monkeypatch.setattr(
        compare, "clip_grad_norm_", lambda parameters, _: seen.extend(p.grad.clone() for p in parameters)
    )
    compare.Run(name, tiny()).train([tokens()], 1)
    assert torch.nn.utils.get_total_norm(seen).item() == pytest.approx(expected, rel=0.02)
    assert all(gradient.dtype == torch.float32 for gradient in seen)


@pytest.mark.parametrize("name", ON_CPU)
def test_no_step_reads_a_number_off_the_device(monkeypatch, name):
    """On a GPU that would wait for it: one type would be timed with a wait in each step and the others without."""
    run = compare.Run(name, tiny())
    with monkeypatch.context() as patch:
        for reader in ("item", "tolist", "cpu", "__bool__", "__float__", "__int__", "numpy"):
            patch.setattr(torch.Tensor, reader, lambda *_: pytest.fail("a number was read"))
        run.train([tokens(), tokens(2)], 2)
    assert all(math.isfinite(loss) for loss in run.losses)


def test_emulated_fp16_is_summed_in_fp32_and_rounded_once():
    a, b = (torch.randn(24, 512).half(), torch.randn(512, 16).half())
    with helper.EmulatedFp16():
        found = torch.mm(a, b)
        ones = torch.mm(torch.ones(1, 4096).half(), torch.ones(4096, 1).half())
    exact = a.double() @ b.double()
    assert found.dtype == torch.float16
    assert (found.double() - exact).abs().max() <= 2.0**-11 * exact.abs().max() * 1.01  # half a unit in the last place
    assert ones.item() == 4096  # summed in fp16 it would stop at 2048


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(n=1))])
def test_fp8_linear_against_a_dequantised_reference(device):
    """Forward and backward of the fp8 layer are those of the numbers that it rounded to."""
    if not helper.is_native("fp8", torch.device(device)) and device == "cuda":
        pytest.skip("GPU: it does not multiply fp8")
    generator = torch.Generator().manual_seed(0)
    x, w, grad = (torch.randn(*s, generator=generator).to(device) for s in ((32, 48), (64, 48), (32, 64)))
    grad *= 1e-9  # the scale brings this into range
    x.requires_grad_()
    w.requires_grad_()
    y = helper.Fp8Linear.apply(x, w)
    y.backward(grad)

    def rounded(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        scale = t.detach().abs().max().double() / torch.finfo(dtype).max
        return (t.detach().double() / scale).float().to(dtype).double() * scale

    x8, w8, g8 = rounded(x, torch.float8_e4m3fn), rounded(w, torch.float8_e4m3fn), rounded(grad, torch.float8_e5m2)
    products = ((y, x8 @ w8.T, x @ w.T), (x.grad, g8 @ w8, grad @ w), (w.grad, g8.T @ x8, grad.T @ x))
    for got, expected, exact in products:
        # a value on the edge between two fp8 numbers may fall either way, the scale being fp32 there and fp64 here
        assert (got - expected).norm() < 2e-3 * expected.norm()
        assert 5e-3 < (got - exact).norm() / exact.norm() < 0.1


@pytest.mark.parametrize(
    ("capability", "hip", "override", "native"),
    [
        ((6, 1), None, None, {"fp32"}),
        ((7, 5), None, None, {"fp32", "fp16"}),
        ((8, 0), None, None, {"fp32", "fp16", "tf32", "bf16"}),
        ((8, 9), None, None, {"fp32", "fp16", "tf32", "bf16", "fp8"}),
        ((8, 0), None, "0", {"fp32", "fp16", "bf16"}),  # it would stand in the table as tf32 and be fp32
        ((9, 4), "6.4", None, {"fp32", "fp16", "bf16"}),  # AMD's is not NVIDIA's capability
    ],
)
def test_the_types_that_run_are_the_native_ones_and_fp16(monkeypatch, capability, hip, override, native):
    gpu = torch.device("cuda")
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    if override:
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", override)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    helper.is_native.cache_clear()
    names = helper.choose("native", tiny(), gpu, 128)
    of_odd_sizes = helper.choose("all", tiny(), gpu, 120)
    helper.is_native.cache_clear()
    assert set(names) == native | {"fp16", "fp16-unscaled"}
    assert names[0] == "fp32"
    assert set(of_odd_sizes) == (native | {"bf16", "fp16", "fp16-unscaled"}) - {"fp8"}


@pytest.mark.gpu(n=1)
def test_gpu_runs_every_native_type(gpus, tmp_path):
    env = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
    result = run(SCRIPT, tmp_path, "--device", "cuda", "--steps", 12, "--json", "c.json", **env)
    assert result.code == 0, result.err[-3000:]
    rows = {row["dtype"]: row for row in json.loads((tmp_path / "c.json").read_text())["rows"]}
    assert {"fp32", "fp16"} <= set(rows)
    assert all(row["peak_bytes"] > row["kept_bytes"] for row in rows.values())
