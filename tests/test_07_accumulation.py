"""07_memory_tricks/gradient_accumulation.py: k micro-batches are one batch, whatever their lengths and on any ranks."""

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.chapter import load
from support.harness import TINY, config_of, run

from old import data, shapes

SCRIPT = "07_memory_tricks/gradient_accumulation.py"
script = load(SCRIPT)
report = load("07_memory_tricks/_gradient_accumulation_report.py")
ODD = {**TINY, "vocab_size": 257, "hidden_size": 36, "intermediate_size": 50, "head_dim": 10}
MICRO_BATCHES = 3


def finish(folder: Path, ranks: int | None) -> dict:
    (folder / "odd.json").write_text(json.dumps(ODD))
    flags = ("--model", "odd.json", "--seq-len", 21, "--batch-size", 6, "--micro-batches", MICRO_BATCHES, "--rounds", 2)
    result = run(SCRIPT, folder, *flags, "--device", "cpu", "--json", "s.json", "--plot", "p.png", nproc=ranks)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    assert result.out.count("checked: ") == 3
    assert (folder / "p.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((folder / "s.json").read_text())


@pytest.mark.parametrize("ranks", [None, 2, pytest.param(3, marks=pytest.mark.long)])
def test_micro_batches_are_one_batch_of_all_ranks(once, ranks):
    summary = once("07 accumulation", finish, ranks)
    assert summary["world_size"] == (ranks or 1)
    errors = summary["gradient_relative_errors"]
    assert all(case["accumulate"] < 1e-6 for case in errors.values())
    assert errors["equal lengths"]["mean_of_means"] < 1e-6
    assert errors["lengths differ"]["mean_of_means"] > 0.01
    assert summary["micro_batches_by_step"] == [3, 3, 1]
    once_a_step, each_time = (summary["all_reduce_bytes"][way] for way in ("accumulate", "mean_of_means"))
    assert sum(once_a_step) == 4 * shapes.parameter_count(config_of(ODD))
    assert len(each_time) == MICRO_BATCHES * len(once_a_step)
    assert [row["micro_batches"] for row in summary["rows"]] == [1, 2, 3]


def test_less_memory_with_more_micro_batches(once):
    one, two, three = (row["peak_bytes"] for row in once("07 accumulation", finish, None)["rows"])
    assert one > two > three


def test_the_usual_loop_leaves_the_last_group_out(once):
    """7 micro-batches of 2 rows, lengths from 2 to 21: the last one has the longest two."""
    lengths = torch.linspace(2, 21, 14).long()
    used = (lengths[:12].sum() / lengths.sum()).item()
    assert once("07 accumulation", finish, None)["usual_tokens_share"] == pytest.approx(used)


SPOILED = {
    "are not those of the whole batch": lambda found: found.errors["last, partial group"].update(accumulate=2e-6),
    "the mean of means is right": lambda found: found.errors["lengths differ"].update(mean_of_means=1e-7),
    "all-reduces of a step": lambda found: found.all_reduce_bytes["accumulate"].append(4),
}


@pytest.mark.parametrize("message", SPOILED)
def test_a_claim_that_does_not_hold_fails(once, message):
    summary = once("07 accumulation", finish, None)
    found = report.Found(
        errors=copy.deepcopy(summary["gradient_relative_errors"]),
        usual_tokens_share=summary["usual_tokens_share"],
        micro_batches_by_step=summary["micro_batches_by_step"],
        all_reduce_bytes=copy.deepcopy(summary["all_reduce_bytes"]),
    )
    report.check(found, MICRO_BATCHES, "cpu")
    SPOILED[message](found)
    with pytest.raises(AssertionError, match=message):
        report.check(found, MICRO_BATCHES, "cpu")


def test_an_error_is_the_largest_of_any_rank(monkeypatch):
    monkeypatch.setattr(report.dist, "all_reduce", lambda errors, how: errors.add_(0.5))  # as if others had more
    errors = {"equal lengths": {"mean_of_means": 0.25, "accumulate": 0.125}}
    report.largest_of_all_ranks(errors, torch.device("cpu"))
    assert errors == {"equal lengths": {"mean_of_means": 0.75, "accumulate": 0.625}}


@pytest.mark.parametrize("count", range(8))
def test_no_micro_batch_is_lost(count):
    grouped = list(script.groups(iter(range(count)), 3))
    assert [item for group in grouped for item in group] == list(range(count))
    assert all(len(group) == 3 for group in grouped[:-1])
    assert all(grouped)


def test_lengths_are_cut_and_the_texts_stay():
    inputs = torch.arange(8 * 16).reshape(8, 16)
    cut = script.cut_lengths(script.split((inputs, inputs), 4))
    assert len(cut) == 4
    joined_inputs, targets = script.join(cut)
    assert torch.equal(joined_inputs, inputs)
    lengths = (targets != data.PADDING).sum(1)
    assert lengths.tolist() == torch.linspace(2, 16, 8).long().tolist()
    kept = targets != data.PADDING
    assert torch.equal(targets[kept], inputs[kept])


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
    targets = torch.tensor([[0, data.PADDING, data.PADDING], [1, 1, 1]])
    script.mean_of_means(table, script.split((inputs, targets), 2))
    weights = 2 * table.logits.grad.abs()[:, 0]
    torch.testing.assert_close(weights, torch.tensor([1 / 2, 0, 0, 1 / 6, 1 / 6, 1 / 6]))


@pytest.mark.gpu(n=1)
def test_on_a_gpu(gpus, tmp_path):
    visible = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
    flags = ("--device", "cuda", "--rounds", 1, "--json", "s.json")
    result = run(SCRIPT, tmp_path, *flags, warm=False, **visible)
    assert result.code == 0, result.err[-3000:]
    one, two, four = (row["peak_bytes"] for row in json.loads((tmp_path / "s.json").read_text())["rows"])
    assert one > two > four


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--micro-batches", 1), "--micro-batches 1 accumulates nothing: use 2 or more"),
        (("--batch-size", 9), "--batch-size 9 does not divide into 4 micro-batches: use 8 or 12"),
        (("--seq-len", 1, "--batch-size", 2, "--micro-batches", 2), "--seq-len 1: sequences of one token cannot"),
        (("--batch-size", 999999996), "--batch-size 999999996: the text has"),
        (("--model", "nonsense"), "--model nonsense"),
        (("--seq-len", 2000), "--seq-len 2000 is over the limit"),
    ],
)
def test_wrong_flags_are_named(tmp_path, flags, told):
    result = run(SCRIPT, tmp_path, *flags)
    assert result.code == 2
    assert told in result.err
    assert len(result.err.strip().splitlines()) == 1
