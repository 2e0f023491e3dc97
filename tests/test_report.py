"""common/report.py: the same summary for people and for programs."""

import json
from pathlib import Path

import pytest
import torch

from common import report


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("peak_memory_bytes", 592 * 2**20, "592 MiB"),
        ("peak_memory_bytes", 139 * 2**30, "142,336 MiB"),
        ("bucket_bytes", [5278720, 4919296], "5.0 MiB, 4.7 MiB"),
        ("parameter_bytes_per_rank", [5278720, 4919296], "5.0 MiB, 4.7 MiB"),
        ("tokens_per_second", 4537.6, "4,538 tokens/s"),
        ("seconds", 34.5678, "34.6 s"),
        ("mfu", 0.4567, "45.7%"),
        ("mfu", None, "n/a"),
        ("parameters", 4_812_032, "4,812,032"),
        ("val_loss", 2.674999, "2.675"),
        ("model", "nano", "nano"),
    ],
)
def test_a_summary_for_people(name, value, shown):
    assert report.for_people(name, value) == shown


def test_lines_of_metrics_that_are_no_records_are_left_out(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 2.0}\n5\nnull\n[1]\n{"loss": 3.0}\n{"step": 2\n{"step": 3}\n{"step": 4}')
    assert report.read_records(file) == [{"step": 1, "loss": 2.0}, {"step": 3}]


def test_a_summary_for_programs_keeps_every_digit(tmp_path, capsys):
    file = Path(tmp_path, "s.json")
    report.report({"peak_memory_bytes": 620_756_993, "seconds": 34.56789}, file)
    written = json.loads(file.read_text())
    assert (written["peak_memory_bytes"], written["seconds"]) == (620_756_993, 34.56789)
    assert set(written) >= set(report.SUMMARY)
    assert written["torch"] == torch.__version__
    assert "592 MiB" in capsys.readouterr().out
