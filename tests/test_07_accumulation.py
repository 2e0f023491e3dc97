"""07_memory_tricks/gradient_accumulation.py: k micro-batches are one batch, whatever their lengths and on any ranks."""

import json
from pathlib import Path

import pytest
import torch
from support.harness import TINY, config_of, run

from common import shapes

SCRIPT = "07_memory_tricks/gradient_accumulation.py"
ODD = {**TINY, "vocab_size": 257, "hidden_size": 36, "intermediate_size": 50, "head_dim": 10}
MICRO_BATCHES = 4


def finish(folder: Path, ranks: int | None) -> dict:
    (folder / "odd.json").write_text(json.dumps(ODD))
    flags = ("--model", "odd.json", "--seq-len", 21, "--batch-size", 8, "--micro-batches", MICRO_BATCHES, "--rounds", 1)
    result = run(SCRIPT, folder, *flags, "--device", "cpu", "--json", "s.json", nproc=ranks)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    assert result.out.count("checked: ") == 4
    return json.loads((folder / "s.json").read_text())


@pytest.mark.parametrize("ranks", [None, 2, pytest.param(3, marks=pytest.mark.full)])
def test_micro_batches_are_one_batch_of_all_ranks(once, ranks):
    summary = once("07 accumulation", finish, ranks)
    assert summary["world_size"] == (ranks or 1)
    rows = {row["name"]: row for row in summary["rows"]}
    mean = rows.pop("mean of means")
    assert all(max(row["error"], row["uneven_error"]) < 1e-6 for row in rows.values())
    assert mean["error"] < 1e-6
    assert mean["uneven_error"] > 0.01
    assert [row["micro_batches"] for row in rows.values()] == [1, 2, 4]
    buckets = mean["all_reduces"] / MICRO_BATCHES
    assert {row["all_reduces"] for row in rows.values()} == {buckets + 1}  # the last: how many tokens there are
    if ranks == 2:  # each rank then sends as many bytes as there are
        assert {row["sent_bytes"] for row in rows.values()} == {4 * shapes.parameter_count(config_of(ODD)) + 8}


def test_less_memory_with_more_micro_batches(once):
    one, _, two, four = (row["peak_bytes"] for row in once("07 accumulation", finish, None)["rows"])
    assert one > two > four


def test_the_usual_loop_leaves_the_last_group_out(once):
    """10 micro-batches of 2 rows, lengths from 2 to 21: the last two have the longest four."""
    lengths = torch.linspace(2, 21, 20).long()
    used = (lengths[:16].sum() / lengths.sum()).item()
    assert once("07 accumulation", finish, None)["usual_tokens_share"] == pytest.approx(used)


@pytest.mark.gpu(n=1)
def test_on_a_gpu(gpus, tmp_path):
    visible = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
    flags = ("--device", "cuda", "--rounds", 1, "--json", "s.json")
    result = run(SCRIPT, tmp_path, *flags, warm=False, **visible)
    assert result.code == 0, result.err[-3000:]
    one, _, two, four = (row["peak_bytes"] for row in json.loads((tmp_path / "s.json").read_text())["rows"])
    assert one > two > four


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--micro-batches", 1), "--batch-size 8 does not divide into --micro-batches 1, 2 or more"),
        (("--batch-size", 9), "--batch-size 9 does not divide into --micro-batches 4"),
        (("--seq-len", 1, "--batch-size", 2, "--micro-batches", 2), "--seq-len 1: sequences of one token cannot"),
        (("--batch-size", 999999996), "--batch-size"),
        (("--model", "nonsense"), "--model nonsense"),
        (("--seq-len", 2000), "--seq-len 2000 is over the limit"),
    ],
)
def test_wrong_flags_are_named(tmp_path, flags, told):
    result = run(SCRIPT, tmp_path, *flags)
    assert result.code == 2
    assert told in result.err
    assert len(result.err.strip().splitlines()) == 1
