"""04_amp/compare.py: what the types save and lose, counted against numpy, by hand and against a float reference."""

import json

import pytest
from support.harness import TINY, run, with_fault

SCRIPT = "04_amp/compare.py"


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
    return found | {"rows": {row["dtype"]: row for row in found["rows"]}}


def test_the_same_start_for_every_type(summary):
    rows = summary["rows"]
    assert rows.keys() >= {"fp32", "bf16", "fp16", "fp16-unscaled", "fp8"}
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
        assert ("tokens_per_second" in row) == ("speed_ratio" in row) == row["native"]
        if row["native"]:
            assert row["min_tokens_per_second"] <= row["tokens_per_second"] <= row["max_tokens_per_second"]
            assert row["min_speed_ratio"] <= row["speed_ratio"] <= row["max_speed_ratio"]
    assert summary["rows"]["fp32"]["speed_ratio"] == 1
    assert summary["rows"]["fp8"]["native"] is False  # on no CPU


@pytest.mark.parametrize(
    "wrong",
    [
        "types.clip_grad_norm_ = lambda parameters, limit: None",
        "AUTOCAST.clear()",
        # with one micro-batch nothing vanishes from so small a model
        pytest.param("types.MICRO_BATCHES = 1", marks=pytest.mark.full),
        pytest.param("types.change = lambda run, net: torch.ones(1)", marks=pytest.mark.full),
    ],
)
def test_the_script_catches_what_is_wrong(tmp_path, wrong):
    line = "ROUNDS = 6 "
    script = with_fault(SCRIPT, tmp_path, line, f"{wrong}\n{line}")
    result = run(script, tmp_path, *flags(tmp_path), "--batch-size", 8)
    assert result.code not in (0, 2)
    assert "AssertionError" in result.err


@pytest.mark.parametrize(("wrong", "words"), [("--steps 20", ("--steps", "20")), ("--dtypes fp9", ("--dtypes", "fp9"))])
def test_what_cannot_run_is_one_line_and_code_2(tmp_path, wrong, words):
    result = run(SCRIPT, tmp_path, *flags(tmp_path), *wrong.split())
    assert (result.code, result.err.count("\n")) == (2, 1), result.err
    assert [word for word in words if word not in result.err] == []


@pytest.mark.gpu(n=1)
def test_gpu_runs_every_native_type(gpus, tmp_path):
    env = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
    result = run(SCRIPT, tmp_path, "--device", "cuda", "--steps", 12, "--json", "c.json", **env)
    assert result.code == 0, result.err[-3000:]
    rows = {row["dtype"]: row for row in json.loads((tmp_path / "c.json").read_text())["rows"]}
    assert {"fp32", "fp16"} <= set(rows)
    assert all(row["peak_bytes"] > row["kept_bytes"] for row in rows.values())
