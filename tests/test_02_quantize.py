"""02_tensors_precision/quantize.py and qat.py: half a step of error at most, exact packing, checks that can fail."""

import argparse
import json
import re
from pathlib import Path

import pytest
import torch
from support.chapter import load
from support.checkpoints import write_folder
from support.harness import TINY, config_of, run, with_fault

from common import model

QUANTIZE, QAT = "02_tensors_precision/quantize.py", "02_tensors_precision/qat.py"
shared = load("02_tensors_precision/_shared.py")
quantize, qat = load(QUANTIZE), load(QAT)
CPU = torch.device("cpu")


@pytest.fixture
def weight() -> torch.Tensor:
    torch.manual_seed(0)
    weight = torch.randn(32, 176) * torch.logspace(-3, 2, 32)[:, None]  # 176 = 128 + 48 = 5 · 32 + 16
    weight[3, 7] = 50.0
    weight[5] = 0.0
    return weight


@pytest.mark.parametrize("group", ["tensor", "channel", 128, 32])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_no_weight_is_off_by_more_than_half_its_scale(weight, bits, group):
    w = shared.quantize(weight, bits, group)
    # scales of our own, value by value: the largest of what shares one, over the largest integer
    limit = 2 ** (bits - 1) - 1
    expected = torch.empty_like(weight)
    for row in range(len(weight)):
        width = group if isinstance(group, int) else 176
        for first in range(0, 176, width):
            largest = (weight if group == "tensor" else weight[row, first : first + width]).abs().max()
            expected[row, first : first + width] = largest / limit
    error = (shared.dequantize(w) - weight).abs()
    assert (error <= expected * 0.5 * (1 + 2**-8)).all()  # the scale itself is bf16
    assert error.max() > 0
    scales = {"tensor": 1, "channel": 32, 128: 32 * 2, 32: 32 * 6}[group]
    assert w.nbytes == 32 * 176 // (2 if bits <= 4 else 1) + 2 * scales


def test_int4_packing_is_exact_for_every_byte():
    every = torch.arange(256, dtype=torch.uint8)[None]
    values = shared.unpack(every)
    low = [(byte & 15) - 16 * ((byte & 15) > 7) for byte in range(256)]
    high = [(byte >> 4) - 16 * ((byte >> 4) > 7) for byte in range(256)]
    assert values[0, ::2].tolist() == low
    assert values[0, 1::2].tolist() == high
    assert torch.equal(shared.pack(values), every)


@pytest.mark.parametrize(("bits", "share"), [(2, 1.0), (4, 1.0), (2, 0.4), (4, 0.7)])
def test_straight_through_gradient_is_that_of_torchs_fake_quantize(bits, share):
    torch.manual_seed(0)
    limit = 2 ** (bits - 1) - 1
    weight = torch.randn(6, 64, requires_grad=True)
    gradient = torch.randn(6, 64)
    clip = torch.full((6, 1, 1), share)
    ours = qat.FakeQuantize.apply(weight, bits, clip)
    (mine,) = torch.autograd.grad(ours, weight, gradient)
    scale = shared.quantize(weight.detach(), bits, "channel", clip).scale[:, 0].float()
    zeros = torch.zeros(6, dtype=torch.int32)
    theirs = torch.fake_quantize_per_channel_affine(weight, scale, zeros, 0, -limit, limit)
    (expected,) = torch.autograd.grad(theirs, weight, gradient)
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(mine, expected)
    assert torch.equal(mine, gradient) == (share == 1)  # of a clipped weight it is 0


def test_activation_codes_are_within_half_a_step_and_zero_is_exact():
    x = torch.linspace(-0.69, 2.29, 1001)
    codes, scale, zero = quantize.activation_codes(x, -0.7, 2.3)
    assert ((codes - zero) * scale - x).abs().max() <= scale * 0.5001
    codes, _, zero = quantize.activation_codes(torch.zeros(1), 0.5, 2.0)
    assert codes.item() == zero
    codes, _, _ = quantize.activation_codes(torch.tensor([-9.0, 9.0]), -1.0, 1.0)
    assert codes.tolist() == [-128, 127]


@pytest.mark.parametrize(
    ("gains", "standard_error", "verdict"),
    [
        ([0.034, 0.025, 0.036], 0.002, "QAT is better"),
        ([-0.034, -0.025, -0.036], 0.002, "QAT is worse"),
        ([-0.0004, -0.0007, -0.0003], 0.001, "no gain shown"),  # all seeds alike, and within chance
        ([0.034, -0.025, 0.036], 0.002, "no gain shown"),  # seeds differ
        ([0.034, 0.025, 0.036], 0.02, "no gain shown"),
    ],
)
def test_a_gain_within_chance_is_no_gain(gains, standard_error, verdict):
    assert qat.judge(gains, [standard_error] * 3) == verdict


def test_nano_is_trained_once_for_each_seed_and_length(tmp_path, capsys):
    args = argparse.Namespace(model="nano", run_dir=tmp_path, train_steps=1)
    first, again, other = (model.digest(shared.starting_model(args, seed, CPU)[0]) for seed in (0, 0, 1))
    assert first == again != other
    assert capsys.readouterr().out.count("training 1 steps") == 2
    assert [file.suffix for file in tmp_path.iterdir()] == [".pt"] * 2  # nothing under a temporary name is left


def on_folder(folder: Path, script: str | Path, *flags: str):
    """The script on a small model in folder/tiny, which has not been trained."""
    write_folder(folder / "tiny", config_of(TINY))
    return run(script, folder, "--model", "tiny", "--device", "cpu", "--json", "s.json", *flags)


def test_quantize_on_the_model_of_a_folder(tmp_path):
    result = on_folder(tmp_path, QUANTIZE)
    assert result.code == 0, result.err
    assert not (tmp_path / "runs").exists()
    summary = json.loads((tmp_path / "s.json").read_text())
    rows = {(row["scheme"], row["multiplied"]): row for row in summary["rows"]}
    fp32, int4 = rows["fp32", "fp32"], rows["int4 per channel", "fp32, dequantized"]
    assert fp32["delta"] == fp32["standard_error"] == 0
    assert int4["delta"] == pytest.approx(int4["val_loss"] - fp32["val_loss"], abs=1e-5)
    matrices = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
    assert fp32["weight_bytes"] == 4 * matrices
    assert int4["weight_bytes"] == matrices // 2 + 2 * 2 * (32 + 16 + 16 + 32 + 64 + 64 + 32)
    assert len(summary["sensitivity"]) == 14
    assert "int3 per channel, 2 most sensitive int8" in {scheme for scheme, _ in rows}
    assert fp32["at_1_time_ratio"] == 1
    # the loss is the model's own, over the half of the held-out text that nothing was chosen on
    args = argparse.Namespace(model=str(tmp_path / "tiny"))
    net, corpus = shared.starting_model(args, 0, CPU)
    _, evaluation_set = shared.held_out_sets(corpus, CPU)
    with torch.no_grad():
        expected = torch.stack([net(*batch) for batch in evaluation_set]).mean().item()
    assert summary["val_loss"] == pytest.approx(expected, abs=1e-5)
    # C5: Llama 2's weights alone
    found = re.findall(r"Llama 2 7B .* parameters; weights alone: (.*)", result.out)
    assert found == ["13.5 GB in bf16, 6.7 to 7.0 GB in int8, 3.5 to 4.2 GB in int4"]


def test_qat_on_the_model_of_a_folder(tmp_path):
    result = on_folder(tmp_path, QAT, "--seeds", "2", "--steps", "2", "--bits", "3", "2")
    assert result.code == 0, result.err
    summary = json.loads((tmp_path / "s.json").read_text())
    first, _, second, _ = summary["rows"]
    assert first["base_loss"] == second["base_loss"]  # one model
    assert first["baseline_loss"] != second["baseline_loss"]  # and two orders of the data
    gains = [min(row["ptq_largest_loss"], row["ptq_least_squares_loss"]) - row["qat_loss"] for row in (first, second)]
    verdict = summary["verdicts"][0]
    assert [verdict["lowest_gain"], verdict["highest_gain"]] == pytest.approx(sorted(gains), abs=1e-5)
    assert verdict["seeds_won"] == sum(gain > 0 for gain in gains)
    assert f"at 3 bits: {verdict['verdict']}" in result.out


@pytest.mark.parametrize(
    ("script", "line", "wrong", "said"),
    [
        (
            QUANTIZE,
            "w = quantize(weight, bits, group)",
            "w = quantize(weight, bits, group, 0.8)",
            "more than scale / 2",
        ),
        (QUANTIZE, "return (weight / scale).round() * scale", "return (weight / scale).floor() * scale", "as rounded"),
        (QUANTIZE, "- zero * row_sums)", "- 2 * zero * row_sums)", "differ"),
        (
            QAT,
            "return gradient * ctx.saved_tensors[0], None, None",
            "return gradient * 0.9, None, None",
            "straight-through",
        ),
        (QAT, "trained_with = net(inputs)", "trained_with = net(inputs) * 1.0001", "not what was trained"),
    ],
)
def test_a_planted_error_ends_the_run(tmp_path, script, line, wrong, said):
    if said == "differ" and not quantize._quantize.has_int8_units(CPU):
        pytest.skip("a CPU without int8 units")
    file = with_fault(script, tmp_path, line, wrong)
    result = on_folder(tmp_path, file, *(["--steps", "1", "--seeds", "1"] if script == QAT else []))
    assert result.code not in (0, 2)
    assert said in result.err


@pytest.mark.parametrize(
    ("script", "flags", "said"),
    [
        (QUANTIZE, ["--train-steps", "0"], "--train-steps"),
        (QAT, ["--bits", "5"], "--bits"),
        (QUANTIZE, ["--model", "nowhere"], "--model nowhere"),
        (QAT, ["--run-dir", "/proc/x"], "--run-dir /proc/x"),
    ],
)
def test_a_wrong_flag_is_one_line(tmp_path, script, flags, said):
    result = run(script, tmp_path, *flags)
    assert result.code == 2
    assert said in result.err
    assert len(result.err.splitlines()) == 1


def on_gpu(gpus: dict[str, str], folder: Path, script: str, *flags: str) -> dict:
    """The summary of a short run of the script on cuda."""
    short = ["--device", "cuda", "--train-steps", "30", "--run-dir", "models", "--json", "s.json"]
    env = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
    result = run(script, folder, *short, *flags, **env)
    assert result.code == 0, result.err[-4000:]
    return json.loads((folder / "s.json").read_text())


@pytest.mark.gpu(n=1)
def test_integer_kernels_on_the_gpu(gpus, tmp_path):
    rows = on_gpu(gpus, tmp_path, QUANTIZE)["rows"]
    assert ("W8A8, min-max of text", "torch's kernel, int8") in {(row["scheme"], row["multiplied"]) for row in rows}
    exact = {row["scheme"]: row["val_loss"] for row in rows if "dequantized" in row["multiplied"]}
    fast = {row["scheme"]: row["val_loss"] for row in rows if "kernel, bf16" in row["multiplied"]}
    assert "int4 per 32" in fast
    assert fast == pytest.approx({scheme: exact[scheme] for scheme in fast}, abs=0.01)


@pytest.mark.gpu(n=1)
def test_qat_on_the_gpu(gpus, tmp_path):
    summary = on_gpu(gpus, tmp_path, QAT, "--bits", "2")  # its checks hold on cuda
    assert len(summary["rows"]) == 2
    assert summary["device"] not in ("cpu", "mps")
