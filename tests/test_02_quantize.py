"""02_tensors_precision/quantize.py and qat.py: bytes, losses of a small model, checks that can fail."""

import json
from pathlib import Path

import pytest
from support.checkpoints import write_folder
from support.harness import TINY, assert_refused, config_of, run, with_fault

QUANTIZE, QAT = "02_tensors_precision/quantize.py", "02_tensors_precision/qat.py"


def on_folder(folder: Path, script: str | Path, *flags: str):
    """The script on a small model in folder/tiny, which has not been trained."""
    write_folder(folder / "tiny", config_of(TINY))
    return run(script, folder, "--model", "tiny", "--device", "cpu", "--json", "s.json", *flags)


def test_quantize_on_the_model_of_a_folder(tmp_path):
    result = on_folder(tmp_path, QUANTIZE)
    assert result.code == 0, result.err
    summary = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    rows = {row["scheme"]: row for row in summary["rows"]}
    fp32, int4 = rows["fp32"], rows["int4 per channel"]
    assert fp32["delta"] == fp32["standard_error"] == 0
    assert int4["delta"] == pytest.approx(int4["val_loss"] - fp32["val_loss"], abs=1e-5)
    matrices = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
    assert fp32["weight_bytes"] == 4 * matrices
    assert int4["weight_bytes"] == matrices // 2 + 2 * 2 * (32 + 16 + 16 + 32 + 64 + 64 + 32)
    assert summary["val_loss"] == pytest.approx(fp32["val_loss"], abs=1e-5)


def test_qat_on_the_model_of_a_folder(tmp_path):
    result = on_folder(tmp_path, QAT, "--seeds", "2", "--steps", "2", "--bits", "3", "2")
    assert result.code == 0, result.err
    summary = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    first, _, second, _ = summary["rows"]
    assert first["base_loss"] == second["base_loss"]  # one model
    assert first["baseline_loss"] != second["baseline_loss"]  # and two orders of the data
    gains = [
        min(row["ptq_largest_loss"], row["ptq_least_squares_loss"]) - row["qat_loss"]
        for row in (first, second)
    ]
    verdict = summary["verdicts"][0]
    assert [verdict["lowest_gain"], verdict["highest_gain"]] == pytest.approx(
        sorted(gains), abs=1e-5
    )


FAULTS = [
    (
        QUANTIZE,
        "return (weight / scale).round() * scale",
        "return (weight / scale).floor() * scale",
    ),
    (
        QUANTIZE,
        "scale = (largest / limit).bfloat16()",
        "scale = (0.8 * largest / limit).bfloat16()",
    ),
    (QUANTIZE, "return (products - zero *", "return (products - 2 * zero *"),
    (
        QAT,
        "return gradient * passed, None, None",
        "return gradient * 0.9, None, None",
    ),
    (
        QAT,
        "deployed = losses(qat, export(qat, bits, clips)",
        "deployed = losses(qat, export(qat, 8, clips)",
    ),
]


@pytest.mark.full
@pytest.mark.parametrize(("script", "line", "wrong"), FAULTS)
def test_a_planted_error_ends_the_run(tmp_path, script, line, wrong):
    file = with_fault(script, tmp_path, line, wrong)
    result = on_folder(tmp_path, file, *(["--steps", "1", "--seeds", "1"] if script == QAT else []))
    assert result.code not in (0, 2)
    assert "AssertionError" in result.err


REFUSED = [(QUANTIZE, "--train-steps 0"), (QAT, "--bits 5"), (QUANTIZE, "--model nowhere")]


def test_a_wrong_flag_is_one_line_and_code_2(tmp_path):
    for script, flags in REFUSED:
        assert_refused(run(script, tmp_path, *flags.split()), *flags.split())


def on_gpu(gpu_run, folder: Path, script: str, *flags: str) -> dict:
    """The summary of a short run of the script on cuda."""
    short = ["--device", "cuda", "--train-steps", "30", "--json", "s.json"]
    result = gpu_run(script, folder, *short, *flags)
    assert result.code == 0, result.err[-4000:]
    return json.loads((folder / "s.json").read_text(encoding="utf-8"))


@pytest.mark.gpu(n=1)
def test_quantize_on_the_gpu(gpu_run, tmp_path):
    """int8 units multiply there what is multiplied in int32 on a CPU."""
    rows = {row["scheme"]: row for row in on_gpu(gpu_run, tmp_path, QUANTIZE)["rows"]}
    assert rows["W8A8, min-max of text"]["val_loss"] == pytest.approx(
        rows["fp32"]["val_loss"], abs=0.05
    )


@pytest.mark.gpu(n=1)
def test_qat_on_the_gpu(gpu_run, tmp_path):
    summary = on_gpu(gpu_run, tmp_path, QAT, "--bits", "2")  # its checks hold on cuda
    assert len(summary["rows"]) == 2
    assert summary["device"] not in ("cpu", "mps")
