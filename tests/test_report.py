"""common/report.py: what lessons print fits a terminal of 100 columns."""

import argparse

import pytest
import torch

from common import lesson


def end(rows: list[dict], columns: dict, checked: list[str]) -> None:
    args = argparse.Namespace(json=None, model="nano")
    device = torch.device("cpu")
    lesson.end(rows, columns=columns, checked=checked, args=args, device=device)


@pytest.fixture
def printed(capfd) -> list[str]:
    """Return the lines for rows that are too wide, and whose names repeat."""
    columns = {"name": "name", "rank": "rank"}
    row = {}
    for number in range(9):
        columns[f"value_{number}"] = f"a long heading {number}"
        row[f"value_{number}"] = number
    rows = [{"name": "one", "rank": rank, **row} for rank in range(2)]
    end(rows, columns, ["a sentence that is much longer than a terminal is wide, " * 3])
    return capfd.readouterr().out.splitlines()


def test_wide_tables_and_lines_are_split(printed):
    assert max(map(len, printed)) <= 100, printed
    for number in range(9):
        headings = [line for line in printed if f"a long heading {number}" in line]
        assert len(headings) == 1, "each column is shown once"
    for place, line in enumerate(printed):
        if "heading" in line:
            assert line.split()[1:4] == ["name", "|", "rank"], "rows can be told apart"
            assert printed[place + 2].startswith("| one  |    0 |")
    assert " ".join(" ".join(printed).split()).count("than a terminal is wide") == 3


def test_a_range_has_its_unit_once(capfd):
    rows = [
        {"name": "a", "seconds": 0.2, "min_seconds": 0.1, "max_seconds": 0.3},
        {"name": "b", "seconds": 0.2, "min_seconds": 0.1, "max_seconds": 1.5},
    ]
    end(rows, {"name": "name", "seconds": "time"}, [])
    out = capfd.readouterr().out
    assert "200.0 ms (100.0 to 300.0)" in out
    assert "200.0 ms (100.0 ms to 1.5 s)" in out
