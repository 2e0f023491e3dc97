"""training/meter.py: a Meter takes numbers, so it measures any model."""

import json
from pathlib import Path

import pytest
import torch

from training.meter import Meter, _line, read_records


def measure(
    folder: Path, flops_per_token: float | None, peak_flops: float | None
) -> tuple[dict, dict]:
    """Log a step of 1,000 tokens. Return its record and the summary."""
    meter = Meter(
        folder,
        steps=1,
        start_step=0,
        tokens_per_step=1000,
        flops_per_token=flops_per_token,
        peak_flops=peak_flops,
        device=torch.device("cpu"),
        dtype="fp32",
    )
    meter.log(1, torch.tensor(2.5), torch.tensor(0.5), lr=1e-3)
    meter.finish(1, model="my model", parameters=None, json_path=folder / "summary.json", wins=3)
    (record,) = read_records(folder / "metrics.jsonl")
    return record, json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def test_mfu_is_achieved_over_peak_flops(tmp_path):
    record, summary = measure(tmp_path, flops_per_token=6e3, peak_flops=1e12)
    assert record["mfu"] == pytest.approx(record["tokens_per_second"] * 6e3 / 1e12)
    assert summary["mfu"] == record["mfu"]
    assert summary["peak_flops_per_device"] == 1e12


@pytest.mark.parametrize(("flops_per_token", "peak_flops"), [(None, 1e12), (6e3, None)])
def test_mfu_is_not_available_without_both_numbers(tmp_path, capfd, flops_per_token, peak_flops):
    record, summary = measure(tmp_path, flops_per_token, peak_flops)
    assert record["mfu"] is None
    assert summary["mfu"] is None
    assert "MFU" not in capfd.readouterr().out.partition("\n\n")[0], "a log line leaves it out"


def test_the_summary_of_a_model_without_a_config(tmp_path):
    _, summary = measure(tmp_path, None, None)
    assert summary["model"] == "my model"
    assert summary["parameters"] is None
    assert (summary["steps"], summary["tokens"]) == (1, 1000)
    assert summary["first_loss"] == summary["last_loss"] == 2.5
    assert summary["wins"] == 3


GIB = 2**30
RECORD = {
    "step": 100,
    "loss": 10.54321,
    "lr": 1.29e-3,
    "grad_norm": 123.456,
    "tokens_per_second": 123_456.0,
    "mfu": None,
    "data_wait_share": 0.001,
    "memory_active_bytes": None,
    "slowest_rank": None,
    "slowest_rank_lag": None,
    "skipped_steps": 0,
    "loss_scale": 1.0,
}
CPU = {"slowest_rank": 1, "slowest_rank_lag": 0.09}
GPU = {"mfu": 0.456, "memory_active_bytes": 71 * GIB}
SLOW = {"data_wait_share": 0.497, "slowest_rank": 12, "slowest_rank_lag": 1.25}
FP16 = {"grad_norm": None, "skipped_steps": 12, "loss_scale": 32768.0}


@pytest.mark.parametrize("steps", [100, 1_000_000])
def test_a_log_line_fits_80_columns(steps):
    for more in (CPU, GPU, SLOW, FP16, {**GPU, **SLOW}, {**GPU, **SLOW, **FP16}):
        lines = _line({**RECORD, **more}, {}, steps).splitlines()
        assert max(map(len, lines)) <= 80, lines
        assert lines[0].startswith("step ")
        assert all(line.startswith("  ") for line in lines[1:])


def test_a_log_line_shows_what_is_unusual():
    assert "rank" not in _line({**RECORD, **CPU}, {}, 100)
    slow = _line({**RECORD, **SLOW}, {}, 100)
    assert "rank 12 +125%" in slow
    assert "loader 49.7%" in slow
    on_gpu = {**RECORD, **GPU}
    assert "active 71.00 GiB" in _line(on_gpu, {}, 100)
    assert "active" not in _line(on_gpu, on_gpu, 100), "it is as before"
    in_fp16 = {**RECORD, **FP16}
    assert "12 skipped, scale 32768" in _line(in_fp16, RECORD, 100)
    assert "skipped" not in _line(in_fp16, in_fp16, 100)
    assert "\n" not in _line({**RECORD, "mfu": 0.456, "grad_norm": 1.5}, {}, 100), "one line"
