"""07_memory_tricks/gradient_accumulation.py: k micro-batches are one batch, whatever their lengths and on any ranks."""

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.chapter import load
from support.harness import TINY, config_of, run

from common import shapes
from common.data import PADDING

SCRIPT = "07_memory_tricks/gradient_accumulation.py"
script = load(SCRIPT)
ODD = {**TINY, "vocab_size": 257, "hidden_size": 36, "intermediate_size": 50, "head_dim": 10}
MICRO_BATCHES = 4


def finish(folder: Path, ranks: int | None) -> dict:
    (folder / "odd.json").write_text(json.dumps(ODD))
    flags = ("--model", "odd.json", "--seq-len", 21, "--batch-size", 8, "--micro-batches", MICRO_BATCHES, "--rounds", 1)
    result = run(SCRIPT, folder, *flags, "--device", "cpu", "--json", "s.json", nproc=ranks)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    assert result.out.count("checked: ") == 4
    return json.loads((folder / "s.json").read_text())


@pytest.mark.parametrize("ranks", [None, 2, pytest.param(3, marks=pytest.mark.long)])
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


SPOILED = {
    "are not those of the whole batch": lambda rows: rows[-1].update(uneven_error=2e-6),
    "the mean of means is right": lambda rows: rows[1].update(uneven_error=1e-7),
    "all-reduces of a step": lambda rows: rows[-1].update(all_reduces=8),
}


@pytest.mark.parametrize("message", SPOILED)
def test_a_claim_that_does_not_hold_fails(once, message):
    rows = copy.deepcopy(once("07 accumulation", finish, None)["rows"])
    script.check(rows, 0.0, 1e-6)
    SPOILED[message](rows)
    with pytest.raises(AssertionError, match=message):
        script.check(rows, 0.0, 1e-6)
    with pytest.raises(AssertionError, match="are not those of the whole batch"):
        script.check(rows, 2e-6, 1e-6)  # of the last, partial group


@pytest.mark.parametrize("count", range(8))
def test_no_micro_batch_is_lost(count):
    grouped = list(script.groups(iter(range(count)), 3))
    assert [item for group in grouped for item in group] == list(range(count))
    assert all(len(group) == 3 for group in grouped[:-1])
    assert all(grouped)


class Table(torch.nn.Module):
    """Logits for each input, with nothing in between: a token's gradient is its weight in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(6, 2))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.logits[inputs].flatten(0, 1), targets.flatten())


def test_in_the_mean_of_means_a_lone_token_counts_like_three():
    table = Table()
    inputs = torch.arange(6).reshape(2, 3)
    targets = torch.tensor([[0, PADDING, PADDING], [1, 1, 1]])
    script.mean_of_means(table, script.split((inputs, targets), 2))
    weights = 2 * table.logits.grad.abs()[:, 0]
    torch.testing.assert_close(weights, torch.tensor([1 / 2, 0, 0, 1 / 6, 1 / 6, 1 / 6]))


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
