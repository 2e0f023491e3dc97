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
