"""training/meter.py: a Meter takes numbers, so it measures any model."""

import json
from pathlib import Path

import pytest
import torch

from training.meter import Meter, read_records


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
