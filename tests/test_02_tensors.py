"""02_tensors_precision/tensors.py: bytes and times are reported, and a statement that does not hold ends the run."""

import json

import pytest
from support.harness import in_long, run, with_fault

SCRIPT = "02_tensors_precision/tensors.py"


def test_bytes_and_times(tmp_path):
    result = run(SCRIPT, tmp_path, "--device", "cpu", "--json", "s.json")
    assert result.code == 0, result.err
    summary = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    assert summary["batch_fp32_bytes"] == 19_267_584 == 32 * 3 * 224 * 224 * 4
    assert summary["batch_bf16_bytes"] == 9_633_792
    assert summary["rows"]
    for row in summary["rows"]:
        for way in ("first", "second"):
            assert (
                0 < row[f"min_{way}_seconds"] <= row[f"{way}_seconds"] <= row[f"max_{way}_seconds"]
            )


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("lambda: x.T.view(-1))", "lambda: x.T.reshape(-1))"),
        in_long("nhwc = nchw.to(memory_format=NHWC)", "nhwc = nchw.clone()"),
        in_long("places = y.storage_offset() + i", "places = i"),
        in_long('    "x.T.contiguous()",\n', '    "x.mT",\n'),
        in_long("w_nhwc = w.to(memory_format=NHWC)", "w_nhwc = -w.to(memory_format=NHWC)"),
    ],
)
def test_a_statement_that_does_not_hold_ends_the_run(tmp_path, line, wrong):
    result = run(with_fault(SCRIPT, tmp_path, line, wrong), tmp_path, "--device", "cpu")
    assert result.code not in (0, 2)
    assert "AssertionError" in result.err


def test_more_processes_are_refused(tmp_path):
    job = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    result = run(SCRIPT, tmp_path, **job)
    assert result.code == 2
    assert "one process" in result.err
