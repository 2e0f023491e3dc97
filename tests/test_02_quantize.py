"""02_tensors_precision/quantize.py and qat.py: bytes, losses of a small model, checks that can fail."""

import json
from pathlib import Path

import pytest
import torch
from support.chapter import load
from support.checkpoints import write_folder
from support.harness import TINY, config_of, run, with_fault

QUANTIZE, QAT = "02_tensors_precision/quantize.py", "02_tensors_precision/qat.py"


def on_folder(folder: Path, script: str | Path, *flags: str):
    """The script on a small model in folder/tiny, which has not been trained."""
    write_folder(folder / "tiny", config_of(TINY))
    return run(script, folder, "--model", "tiny", "--device", "cpu", "--json", "s.json", *flags)


def test_quantize_on_the_model_of_a_folder(tmp_path):
    result = on_folder(tmp_path, QUANTIZE)
    assert result.code == 0, result.err
    summary = json.loads((tmp_path / "s.json").read_text())
    rows = {(row["scheme"], row["multiplied"]): row for row in summary["rows"]}
    fp32, int4 = rows["fp32", "fp32"], next(row for (scheme, _), row in rows.items() if scheme == "int4 per channel")
    assert fp32["delta"] == fp32["standard_error"] == 0
    assert int4["delta"] == pytest.approx(int4["val_loss"] - fp32["val_loss"], abs=1e-5)
    matrices = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
    assert fp32["weight_bytes"] == 4 * matrices
    assert int4["weight_bytes"] == matrices // 2 + 2 * 2 * (32 + 16 + 16 + 32 + 64 + 64 + 32)
    assert summary["val_loss"] == pytest.approx(fp32["val_loss"], abs=1e-5)


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


FAULTS = [
    (QUANTIZE, "return (weight / scale).round() * scale", "return (weight / scale).floor() * scale"),
    (QUANTIZE, "w = quantize(weight, bits, group)", "w = quantize(weight, bits, group, 0.8)"),
    (QUANTIZE, "- zero * row_sums)", "- 2 * zero * row_sums)"),
    (QAT, "return gradient * ctx.saved_tensors[0], None, None", "return gradient * 0.9, None, None"),
    (QAT, "trained_with = net(inputs)", "trained_with = net(inputs) * 1.0001"),
]


@pytest.mark.full
@pytest.mark.parametrize(("script", "line", "wrong"), FAULTS)
def test_a_planted_error_ends_the_run(tmp_path, script, line, wrong):
    if "row_sums" in line and not load("02_tensors_precision/_quantize.py").has_int8_units(torch.device("cpu")):
        pytest.skip("a CPU without int8 units")
    file = with_fault(script, tmp_path, line, wrong)
    result = on_folder(tmp_path, file, *(["--steps", "1", "--seeds", "1"] if script == QAT else []))
    assert result.code not in (0, 2)
    assert "AssertionError" in result.err


REFUSED = [
    (QUANTIZE, "--train-steps 0"),
    (QAT, "--bits 5"),
    (QUANTIZE, "--model nowhere"),
    (QAT, "--run-dir /proc/x"),
]


@pytest.mark.parametrize(("script", "flags"), REFUSED)
def test_a_wrong_flag_is_one_line_and_code_2(tmp_path, script, flags):
    result = run(script, tmp_path, *flags.split())
    assert (result.code, result.err.strip().count("\n")) == (2, 0), result.err
    assert [word for word in flags.split() if word not in result.err] == []


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
