"""04_amp/compare.py: what the types save and lose, counted against numpy, by hand and against a float reference."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.chapter import load
from support.harness import ROOT, TINY, clean_env, run
from torch import nn

from old import hardware, model, runtime, shapes
from old.exits import UserError

compare = load("04_amp/compare.py")
dtypes = load("04_amp/_compare_dtypes.py")
fp16_limits = load("04_amp/_compare_fp16_limits.py")
comparison = load("04_amp/_compare_report.py")

CPU = torch.device("cpu")
ON_CPU = ["fp32", "bf16", "fp16", "fp16-unscaled", "fp8"]


def tiny(**other_sizes: int) -> nn.Module:
    shape = {name: size for name, size in TINY.items() if name != "model_type"} | other_sizes
    net = model.Transformer(shapes.Config(**shape, head_dim=8))
    net.init_weights(0)
    return net


@pytest.fixture
def nothing_remembered():
    """What is native is asked once per device: a planted device must not be taken for one of before, nor stay."""
    dtypes.is_native.cache_clear()
    yield
    dtypes.is_native.cache_clear()


def tokens(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(0, 256, (4, 33), generator=torch.Generator().manual_seed(seed))
    return text[:, :-1], text[:, 1:]


@pytest.fixture(scope="module")
def summary(once) -> dict:
    return once("04 compare", compare_types)


def compare_types(folder: Path) -> dict:
    (folder / "tiny.json").write_text(json.dumps(TINY))
    flags = ["--model", "tiny.json", "--device", "cpu", "--steps", 12, "--dtypes", ",".join(ON_CPU)]
    result = run("04_amp/compare.py", folder, *flags, "--json", "c.json", "--plot", "c.png", warm=False)
    assert result.code == 0, result.err[-3000:]
    assert (folder / "c.png").read_bytes().startswith(b"\x89PNG")

    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads((folder / "c.json").read_text(), parse_constant=refuse)


def test_the_same_start_for_every_type(summary):
    runs = {entry["name"]: entry for entry in summary["runs"]}
    assert [*runs] == ON_CPU
    first = runs["fp32"]["losses"][0]
    for name, entry in runs.items():
        assert len(entry["losses"]) == 12
        assert entry["losses"][0] == pytest.approx(first, rel=comparison.FIRST_LOSS_TOLERANCE[name])
        off = max(abs(a - b) for a, b in zip(entry["losses"], runs["fp32"]["losses"], strict=True))
        assert entry["largest_loss_difference"] == pytest.approx(off)
        assert (entry["losses"] == runs["fp32"]["losses"]) == (name == "fp32")  # each type has arithmetic of its own
        assert entry["losses"][-1] < first
        assert entry["scaler"] == (name == "fp16")
        assert entry["kept_bytes"] == runs["fp32"]["kept_bytes"] >= 12 * summary["parameters"]


def test_speed_is_of_native_types_only(summary):
    for entry in summary["runs"]:
        if entry["native"]:
            speed, speedup = entry["tokens_per_second"], entry["speedup"]
            assert speed["min"] <= speed["median"] <= speed["max"]
            assert speed["n"] == speedup["n"] == 5
        else:
            assert (entry["tokens_per_second"], entry["speedup"]) == (None, None)
    assert set(summary["runs"][0]["speedup"].values()) == {1.0, 5}
    assert not next(entry for entry in summary["runs"] if entry["name"] == "fp8")["native"]  # on no CPU


def test_failures_happen_and_are_cured(summary):
    overflow, vanishing, clipping, softmax = summary["instabilities"]
    assert overflow["provoked"]["nan_weights"] > 0 == overflow["cured"]["nan_weights"]
    assert overflow["cured"]["scale"] == overflow["provoked"]["scale"] / 2 ** overflow["cured"]["skipped_steps"]
    assert vanishing["provoked"]["unmoved_weights_share"] > 0.1 > 0.01 > vanishing["cured"]["unmoved_weights_share"]
    limit, scale = clipping["cured"]["clip_norm"], clipping["cured"]["scale"]
    assert clipping["cured"]["gradient_norm"] == pytest.approx(limit, rel=1e-3)
    assert clipping["provoked"]["gradient_norm"] == pytest.approx(limit / scale, rel=1e-3)
    assert clipping["provoked"]["update_norm"] < clipping["cured"]["update_norm"]
    assert softmax["provoked"]["nan_tokens_share"] > 0
    assert softmax["cured"]["largest_error"] < 1e-6


def test_a_failure_that_does_not_happen_is_told(monkeypatch):
    monkeypatch.setattr(fp16_limits, "MICRO_BATCHES", 1)  # then nothing vanishes from so small a model
    assert not fp16_limits.vanishing_gradients(tiny(), tokens(), 1024.0)["holds"]
    monkeypatch.setattr(fp16_limits, "clip_grad_norm_", lambda parameters, limit: None)
    assert not fp16_limits.clipping_scaled_gradients(tiny(), tokens(), 1024.0)["holds"]


def test_a_check_that_fails_ends_the_run():
    row = {"name": "fp32", "losses": [2.0], "saved_activation_bytes": 100, "kept_bytes": 12}
    good = {**row, "name": "bf16", "losses": [2.001], "saved_activation_bytes": 60}
    assert all(holds for holds, _ in comparison.checks([row, good], []))
    for wrong in ({"losses": [2.1]}, {"losses": [None]}, {"saved_activation_bytes": 90}, {"kept_bytes": 6}):
        assert not all(holds for holds, _ in comparison.checks([row, {**good, **wrong}], []))
    failed = [{"holds": False, "name": "a failure", "text": ""}]
    assert not all(holds for holds, _ in comparison.checks([row], failed))
    with pytest.raises(AssertionError, match="a failure"):
        comparison.check([row], failed, required=True)
    comparison.check([row], failed, required=False)


class Chain(nn.Module):
    """Two matrix products and nothing else; the second item of a batch multiplies the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32, bias=False), nn.Linear(32, 48, bias=False)

    def forward(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).float().sum() * factor


def test_matmul_inputs_are_saved_in_half_the_bytes():
    batch = (torch.randn(10, 16), torch.tensor(1.0))
    sizes = {name: compare.saved_bytes(Chain(), batch, name) for name in ("fp32", "bf16", "fp16")}
    inputs, scalars = 10 * (16 + 32), 4  # and the factor of the loss
    assert sizes["fp32"] == (4 * inputs + scalars, 0)
    assert sizes["bf16"] == sizes["fp16"] == (2 * inputs + scalars, 2 * 32 * 48)  # and a copy of the second weight


def test_a_model_saves_less_in_16_bits_and_least_in_fp8():
    # bf16 layers with one input share its copy, fp8 layers do not: the wide feed-forward of real models decides
    nets = {name: tiny(intermediate_size=96) for name in ("fp32", "bf16", "fp8")}
    dtypes.use_fp8(nets["fp8"])
    fp32, bf16, fp8 = (compare.saved_bytes(net, tokens(), name)[0] for name, net in nets.items())
    assert 0.5 * fp32 < bf16 < 0.8 * fp32
    assert fp8 < bf16


def test_underflow_is_what_numpy_rounds_to_zero():
    generator = torch.Generator().manual_seed(3)
    gradients = torch.randn(50_000, generator=generator) * 2.0 ** (torch.rand(50_000, generator=generator) * 60 - 40)
    edges = [0.0, 2.0**-25, -(2.0**-25) * (1 + 2**-20), 2.0**-24, 2.0**-14, 2.0**-14 * (1 - 2**-11), 65519.0, 65520.0]
    gradients = torch.cat((gradients, torch.tensor(edges)))
    for factor in (1.0, 65536.0, 1 / 1024):
        with np.errstate(over="ignore"):
            half = (gradients.numpy() * np.float32(factor)).astype(np.float16)
        assert fp16_limits.underflow(gradients, factor) == {
            "zero": int(((half == 0) & (gradients.numpy() != 0)).sum()),
            "subnormal": int(((half != 0) & (np.abs(half) < np.finfo(np.float16).smallest_normal)).sum()),
            "infinite": int(np.isinf(half).sum()),
        }


def test_counts_are_of_the_models_gradients():
    net, batch = tiny(), tokens()
    gradients, counted, _ = fp16_limits.show_limits(net, batch, 65536.0)
    net(*batch).backward()
    by_hand = torch.cat([p.grad.flatten() for p in net.parameters()])
    assert torch.equal(gradients, by_hand)
    assert counted["elements"] == by_hand.numel()
    divided = (by_hand.numpy() / np.float32(1024)).astype(np.float16)
    assert counted["divided"]["zero"] == int(((divided == 0) & (by_hand.numpy() != 0)).sum()) > 0


def test_skipped_steps_are_counted_and_change_nothing():
    x, plain, huge = torch.ones(4, 16), torch.tensor(1e-3), torch.tensor(1e30)
    run = compare.new_run("fp16", Chain(), (x, plain))
    moved = []
    for factor in (plain, huge, plain, huge, huge, plain):
        before = [p.detach().clone() for p in run.net.parameters()]
        compare.train(run, [(x, factor)])
        moved.append(not all(torch.equal(p, old) for p, old in zip(run.net.parameters(), before, strict=True)))
    assert moved == [True, False, True, False, False, True]
    assert comparison.skipped_steps(run) == 3
    assert run.scaler.get_scale() == compare.INITIAL_SCALE / 2**3
    assert len(run.losses) == 6


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_the_clip_sees_true_gradients(monkeypatch, name):
    net = tiny()
    net(*tokens()).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()]).item()
    seen = []

    def note(parameters, limit):
        seen.extend(p.grad.clone() for p in parameters)

    monkeypatch.setattr(compare, "clip_grad_norm_", note)
    run = compare.new_run(name, tiny(), tokens())
    compare.train(run, [tokens()])
    assert torch.nn.utils.get_total_norm(seen).item() == pytest.approx(expected, rel=0.02)
    assert all(gradient.dtype == torch.float32 for gradient in seen)


@pytest.mark.parametrize("name", ON_CPU)
def test_no_step_reads_a_number_off_the_device(monkeypatch, name):
    """On a GPU that would wait for it: one type would be timed with a wait in each step and the others without."""
    run = compare.new_run(name, tiny(), tokens())
    with monkeypatch.context() as patch:
        for reader in ("item", "tolist", "cpu", "__bool__", "__float__", "__int__", "numpy"):
            patch.setattr(torch.Tensor, reader, lambda *_: pytest.fail("a number was read"))
        compare.train(run, [tokens(), tokens(2)])
    assert len(run.losses) == 2
    assert comparison.skipped_steps(run) == 0


def test_emulated_fp16_is_summed_in_fp32_and_rounded_once():
    a, b = (torch.randn(24, 512).half(), torch.randn(512, 16).half())
    with dtypes.EmulatedFp16():
        product = torch.mm(a, b)
        ones = torch.mm(torch.ones(1, 4096).half(), torch.ones(4096, 1).half())
    exact = a.double() @ b.double()
    assert product.dtype == torch.float16
    assert (
        product.double() - exact
    ).abs().max() <= 2.0**-11 * exact.abs().max() * 1.01  # half a unit in the last place
    assert ones.item() == 4096  # summed in fp16 it would stop at 2048


def check_fp8(device: str) -> None:
    """Forward and backward of the fp8 layer are those of the numbers that it rounded to."""
    generator = torch.Generator().manual_seed(0)
    x, w, grad = (torch.randn(*s, generator=generator).to(device) for s in ((32, 48), (64, 48), (32, 64)))
    grad *= 1e-9  # the scale brings this into range
    x.requires_grad_()
    w.requires_grad_()
    y = dtypes.Fp8Linear.apply(x, w)
    y.backward(grad)

    def rounded(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        scale = t.detach().abs().max().double() / torch.finfo(dtype).max
        return (t.detach().double() / scale).float().to(dtype).double() * scale

    x8, w8 = (rounded(t, torch.float8_e4m3fn) for t in (x, w))
    g8 = rounded(grad, torch.float8_e5m2)
    for got, expected, exact in (
        (y, x8 @ w8.T, x @ w.T),
        (x.grad, g8 @ w8, grad @ w),
        (w.grad, g8.T @ x8, grad.T @ x),
    ):
        # a value on the edge between two fp8 numbers may fall either way, the scale being fp32 there and fp64 here
        assert (got - expected).norm() < 2e-3 * expected.norm()
        assert 5e-3 < (got - exact).norm() / exact.norm() < 0.1


has_scaled_mm = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm", "CPU")


@pytest.mark.skipif(not has_scaled_mm, reason=f"torch {torch.__version__} has no _scaled_mm for CPUs")
def test_fp8_linear_against_a_dequantised_reference():
    check_fp8("cpu")


def test_fp8_is_accumulated_as_its_row_says(summary, monkeypatch):
    """Fast accumulation is faster and less exact: the speed of one must not stand beside the losses of the other."""
    asked = []

    def scaled_mm(a, b, a_scale, b_scale, *, out_dtype, use_fast_accum):
        asked.append(use_fast_accum)
        return ((a.float() * a_scale) @ (b.float() * b_scale)).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    net = tiny()
    dtypes.use_fp8(net)
    net(*tokens()).backward()
    assert set(asked) == {False}
    assert len(asked) == 3 * len(dtypes.linear_layers(net))  # forward, and the gradients of input and weight
    notes = {entry["name"]: entry["note"] for entry in summary["runs"]}
    assert notes["fp8"] == "use_fast_accum=False"
    assert comparison.cells(summary["runs"][-1])[0] == "fp8 (emulated), use_fast_accum=False"


def test_fp8_rounds_as_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 3
    for ours, theirs in ((torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn), (torch.float8_e5m2, ml_dtypes.float8_e5m2)):
        x8, scale = dtypes.to_fp8(x, ours)
        assert x8.float().abs().max() == torch.finfo(ours).max
        assert np.array_equal(x8.view(torch.uint8).numpy(), (x / scale).numpy().astype(theirs).view(np.uint8))
    zeros, _ = dtypes.to_fp8(torch.zeros(16), torch.float8_e4m3fn)
    assert not zeros.float().any()  # and no NaN


@pytest.mark.parametrize(
    ("capability", "native"),
    [
        ((6, 1), {"fp32"}),
        ((7, 5), {"fp32", "fp16"}),
        ((8, 0), {"fp32", "fp16", "tf32", "bf16"}),
        ((8, 9), {"fp32", "fp16", "tf32", "bf16", "fp8"}),
        ((12, 0), {"fp32", "fp16", "tf32", "bf16", "fp8"}),
    ],
)
@pytest.mark.usefixtures("nothing_remembered")
def test_the_types_that_run_are_the_native_ones_and_fp16(monkeypatch, capability, native):
    gpu = torch.device("cuda")
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert {name for name in dtypes.NAMES if dtypes.is_native(name, gpu)} - {"fp16-unscaled"} == native
    names, left_out = dtypes.choose(None, tiny(), gpu, 128)
    assert set(names) == native | {"fp32", "fp16"} | {"fp16-unscaled"}
    assert {*names, *left_out} == set(dtypes.NAMES)
    assert names[0] == "fp32"


@pytest.mark.usefixtures("nothing_remembered")
def test_tf32_that_the_environment_switches_off_is_left_out(monkeypatch):
    """It would stand in the table as tf32 and be fp32."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(hardware, "native_types", lambda device: ({"fp32", "fp16", "bf16", "tf32"}, "a test"))
    for override, runs in (("0", False), ("1", True)):
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", override)
        names, left_out = dtypes.choose(None, tiny(), torch.device("cuda"), 128)
        assert ("tf32" in names) == runs
        assert ("NVIDIA_TF32_OVERRIDE" in left_out.get("tf32", "")) != runs


@pytest.mark.usefixtures("nothing_remembered")
def test_an_amd_gpu_is_not_taken_for_nvidias(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(
        hardware, "native_types", lambda device: ({"fp32", "fp16", "bf16", "tf32", "fp8"}, "AMD gfx942")
    )
    names, left_out = dtypes.choose(None, tiny(), torch.device("cuda"), 128)
    assert names == ["fp32", "bf16", "fp16", "fp16-unscaled"]
    assert set(left_out) == {"tf32", "fp8"}


@pytest.mark.parametrize("variable", ["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "nothing"])
def test_the_baseline_is_fp32_whatever_the_container_says(variable):
    """torch reads the variable when it is imported, so each case has a process of its own."""
    code = (
        "import torch\n"
        "from old import runtime\n"
        "print(torch.get_float32_matmul_precision())\n"
        "runtime.exact_fp32(torch.device('cpu'))\n"
        "print(torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32)\n"
    )
    env = {**clean_env(), variable: "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600)
    before = "high" if variable.startswith("TORCH") else "highest"
    assert result.stdout.splitlines() == [before, "highest False"], result.stderr


def test_products_in_tf32_are_refused_as_a_baseline(monkeypatch):
    """As on a GPU where NVIDIA_TF32_OVERRIDE=1 stands above torch's own setting."""
    precise = torch.Tensor.__matmul__

    def in_tf32(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float32:
            x = (x.view(torch.int32) & -8192).view(torch.float32)  # 10 bits of fraction
        return precise(x, y)

    runtime.exact_fp32(CPU)
    monkeypatch.setattr(torch.Tensor, "__matmul__", in_tf32)
    with pytest.raises(UserError, match="NVIDIA_TF32_OVERRIDE"):
        runtime.exact_fp32(CPU)


def test_tf32_is_switched_off_again(monkeypatch):
    with dtypes.multiplying_in("tf32", CPU):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "highest"
    with pytest.raises(ZeroDivisionError), dtypes.multiplying_in("tf32", CPU):
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == "highest"


def test_what_cannot_run_is_refused_when_asked_for():
    net = tiny()
    for asked, tokens_per_batch, named in (("tf32", 128, "tf32"), ("fp8", 120, "120"), ("fp9", 128, "fp9")):
        with pytest.raises(UserError, match=f"--dtypes {asked}.*{named}"):
            dtypes.choose(asked, net, CPU, tokens_per_batch)
    assert dtypes.choose("fp8,bf16", net, CPU, 128) == (["fp32", "bf16", "fp8"], {})
    assert "tf32" in dtypes.choose(None, net, CPU, 128)[1]


def test_wrong_steps_are_one_line(tmp_path):
    result = run("04_amp/compare.py", tmp_path, "--steps", 20)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "--steps 20" in result.err
    assert "use 24" in result.err


@pytest.mark.gpu(n=1)
def test_gpu_runs_every_native_type(gpus, tmp_path):
    command = [sys.executable, "04_amp/compare.py", "--device", "cuda", "--steps", "12"]
    command += ["--json", str(tmp_path / "c.json"), "--plot", str(tmp_path / "c.png")]
    result = subprocess.run(command, cwd=ROOT, env=gpus, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    code = "import torch; from old import hardware; print(*hardware.native_types(torch.device('cuda', 0))[0])"
    probe = run_code(code, gpus)
    assert probe.returncode == 0, probe.stderr[-3000:]
    native = set(probe.stdout.split())
    assert "fp32" in native
    runs = {entry["name"]: entry for entry in json.loads((tmp_path / "c.json").read_text())["runs"]}
    assert native & {"fp32", "tf32", "bf16", "fp16", "fp8"} <= set(runs)
    if "fp8" in runs:
        assert "use_fast_accum=False" in result.stdout
    for entry in runs.values():
        assert entry["peak_memory_bytes"] > entry["kept_bytes"]
    if "bf16" in runs:
        assert runs["bf16"]["saved_activation_bytes"] < 0.8 * runs["fp32"]["saved_activation_bytes"]


def run_code(code: str, gpus: dict[str, str]) -> subprocess.CompletedProcess:
    """In a process that sees only the GPU that is locked for the test, and can import this file."""
    env = {**gpus, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.gpu(n=1)
def test_gpu_steps_wait_for_nothing(gpus):
    code = (
        "import torch, test_04_compare as t\n"
        "from _compare_dtypes import choose\n"
        "net, batches = t.tiny().cuda(), [[x.cuda() for x in t.tokens(seed)] for seed in range(3)]\n"
        "for name in choose(None, net, torch.device('cuda'), 128)[0]:\n"
        "    run = t.compare.new_run(name, net, batches[0])\n"
        "    t.compare.train(run, batches[:1])  # what is loaded or allocated once may wait\n"
        "    torch.cuda.set_sync_debug_mode('error')\n"
        "    t.compare.train(run, batches[1:])\n"
        "    torch.cuda.set_sync_debug_mode('default')\n"
        "    assert t.comparison.skipped_steps(run) < 3, name\n"
    )
    result = run_code(code, gpus)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.gpu(n=1)
def test_gpu_fp8_linear_against_a_dequantised_reference(gpus):
    code = (
        "import sys, torch\n"
        "import test_04_compare\n"
        "if 'fp8' not in test_04_compare.hardware.native_types(torch.device('cuda', 0))[0]: sys.exit(77)\n"
        "test_04_compare.check_fp8('cuda')"
    )
    result = run_code(code, gpus)
    if result.returncode == 77:
        pytest.skip("GPU: it does not multiply fp8")
    assert result.returncode == 0, result.stderr[-3000:]
