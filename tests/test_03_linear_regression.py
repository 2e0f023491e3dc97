"""03_linear_regression/train.py."""

import json

import torch
from support.harness import run

SCRIPT = "03_linear_regression/train.py"


def test_recovers_the_line(tmp_path):
    result = run(
        SCRIPT, tmp_path, "--device", "cpu", "--json", "s.json", "--run-dir", "run", "--seed", 5
    )
    assert result.code == 0, result.err
    summary = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    assert abs(summary["slope"] - 2) < 0.05
    assert abs(summary["intercept"] + 3) < 0.05
    assert abs(summary["slope"] - summary["least_squares_slope"]) < 0.05
    assert abs(summary["least_squares_slope"] - 2) < 0.01
    for name in ("val_loss", "test_loss"):
        assert 0.23 < summary[name] < 0.27  # the variance of the noise is 0.25
    assert summary["first_loss"] > 10 * summary["val_loss"]
    weights = torch.load(tmp_path / "run/line.pt")
    assert weights["weight"].item() == summary["slope"]


def test_a_line_that_was_not_fitted_is_no_success(tmp_path):
    for flags in (["--lr", 100], ["--epochs", 1, "--lr", 1e-6]):
        result = run(SCRIPT, tmp_path, "--device", "cpu", *flags)
        assert result.code == 2
        assert len(result.err.splitlines()) == 1
        assert "--lr" in result.err
