"""04_amp/compare.py: what the types save and lose, compared with fp32."""

import json

import pytest
from support.harness import TINY, assert_refused, in_long, run, with_fault

SCRIPT = "04_amp/compare.py"


def flags(folder) -> list:
    folder.mkdir(exist_ok=True)
    (folder / "tiny.json").write_text(json.dumps(TINY), encoding="utf-8")
    return ["--model", "tiny.json", "--device", "cpu", "--steps", 12, "--json", "c.json"]


@pytest.fixture(scope="module")
def summary(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("compare")
    result = run(SCRIPT, folder, *flags(folder))
    assert result.code == 0, result.err[-3000:]
    found = json.loads((folder / "c.json").read_text(encoding="utf-8"))
    return found | {"rows": {row["dtype"]: row for row in found["rows"]}}


def test_the_same_start_for_every_type(summary):
    rows = summary["rows"]
    assert rows.keys() >= {"fp32", "bf16", "fp16"}
    fp32 = rows["fp32"]
    for name, row in rows.items():
        assert len(row["losses"]) == 12
        assert row["losses"][0] == pytest.approx(fp32["losses"][0], rel=1e-2)
        off = max(abs(a - b) for a, b in zip(row["losses"], fp32["losses"], strict=True))
        assert row["largest_loss_difference"] == pytest.approx(off)
        # each type has arithmetic of its own
        assert (row["losses"] == fp32["losses"]) == (name == "fp32")
        assert row["last_loss"] < row["losses"][0]
        assert 12 * summary["parameters"] <= row["kept_bytes"] == fp32["kept_bytes"]


def test_speed_is_of_native_types_only(summary):
    for row in summary["rows"].values():
        assert ("tokens_per_second" in row) == ("speed_ratio" in row) == row["native"]
        if row["native"]:
            assert (
                row["min_tokens_per_second"]
                <= row["tokens_per_second"]
                <= row["max_tokens_per_second"]
            )
            assert row["min_speed_ratio"] <= row["speed_ratio"] <= row["max_speed_ratio"]
    assert summary["rows"]["fp32"]["speed_ratio"] == 1


@pytest.mark.parametrize(
    "wrong",
    [
        "AUTOCAST.clear()",
        in_long("clip_grad_norm_ = lambda parameters, limit: None"),
        # with one micro-batch nothing vanishes from so small a model
        in_long("MICRO_BATCHES = 1"),
        in_long("GradScaler = partial(GradScaler, backoff_factor=1.0)"),
    ],
)
def test_the_script_catches_what_is_wrong(tmp_path, wrong):
    line = "ROUNDS = 6 "
    script = with_fault(SCRIPT, tmp_path, line, f"{wrong}\n{line}")
    result = run(script, tmp_path, *flags(tmp_path), "--batch-size", 8)
    assert result.code not in (0, 2)
    assert "AssertionError" in result.err


def test_steps_that_are_no_multiple_of_the_rounds_are_refused(tmp_path):
    assert_refused(run(SCRIPT, tmp_path, *flags(tmp_path), "--steps", 20), "--steps 20", "24")


@pytest.mark.gpu(n=1)
def test_gpu_runs_every_native_type(gpu_run, tmp_path):
    result = gpu_run(SCRIPT, tmp_path, "--device", "cuda", "--steps", 12, "--json", "c.json")
    assert result.code == 0, result.err[-3000:]
    rows = {
        row["dtype"]: row
        for row in json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))["rows"]
    }
    assert {"fp32", "fp16"} <= set(rows)
    assert all(row["activation_bytes"] > 0 for row in rows.values())
