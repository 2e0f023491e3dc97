"""07_memory_tricks/gradient_accumulation.py: k micro-batches are one batch, whatever their lengths and on any ranks."""

import json
from pathlib import Path

import pytest
from support.harness import TINY, assert_refused, config_of, in_long, run

from lm import shapes

SCRIPT = "07_memory_tricks/gradient_accumulation.py"
ODD = {**TINY, "vocab_size": 257, "hidden_size": 36, "intermediate_size": 50, "head_dim": 10}
MICRO_BATCHES = 4


def finish(folder: Path, ranks: int | None) -> dict:
    (folder / "odd.json").write_text(json.dumps(ODD), encoding="utf-8")
    flags = (
        "--model",
        "odd.json",
        "--seq-len",
        21,
        "--batch-size",
        8,
        "--micro-batches",
        MICRO_BATCHES,
        "--rounds",
        1,
    )
    result = run(SCRIPT, folder, *flags, "--device", "cpu", "--json", "summary.json", nproc=ranks)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    return result.summary


@pytest.mark.parametrize("ranks", [None, 2, in_long(3)])
def test_micro_batches_are_one_batch_of_all_ranks(once, ranks):
    summary = once("07 accumulation", finish, ranks)
    assert summary["world_size"] == (ranks or 1)
    rows = {row["name"]: row for row in summary["rows"]}
    mean = rows.pop("mean of means")
    assert all(max(row["error"], row["uneven_error"]) < 1e-6 for row in rows.values())
    assert mean["error"] < 1e-6
    assert mean["uneven_error"] > 0.01
    buckets = mean["all_reduces"] / MICRO_BATCHES
    # the last: how many tokens there are
    assert {row["all_reduces"] for row in rows.values()} == {buckets + 1}
    if ranks == 2:  # each rank then sends as many bytes as there are
        assert {row["sent_bytes"] for row in rows.values()} == {
            4 * shapes.parameter_count(config_of(ODD)) + 8
        }


def assert_memory_falls(summary: dict) -> None:
    rows = [row for row in summary["rows"] if row["name"] != "mean of means"]
    peaks = [row["peak_bytes"] for row in sorted(rows, key=lambda row: row["micro_batches"])]
    assert len(set(peaks)) > 1
    assert peaks == sorted(peaks, reverse=True)


def test_less_memory_with_more_micro_batches(once):
    assert_memory_falls(once("07 accumulation", finish, None))


@pytest.mark.gpu(n=1)
def test_on_a_gpu(gpu_run, tmp_path):
    flags = ("--device", "cuda", "--rounds", 1, "--json", "summary.json")
    result = gpu_run(SCRIPT, tmp_path, *flags)
    assert result.code == 0, result.err[-3000:]
    assert_memory_falls(result.summary)


REFUSED = {  # flags: words of the line, where these are not the flag and its value
    "--batch-size 9": "--batch-size 9 --micro-batches 4",
    "--seq-len 1 --batch-size 2 --micro-batches 2": "--seq-len 1 2",
    "--batch-size 999999996": "sequences tokens",  # the sizes are those of the epoch
    "--model nonsense": "",
}


def test_bad_input_is_refused_in_one_line(tmp_path):
    for flags, words in REFUSED.items():
        assert_refused(run(SCRIPT, tmp_path, *flags.split()), *(words or flags).split())
