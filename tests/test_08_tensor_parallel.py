"""08_model_parallel/tensor_parallel.py: each cut trains as one process does, and sends what it must."""

import json
from pathlib import Path

import pytest
import torch
from support.harness import assert_refused, config_of, run, with_fault

from lm import data, weights

SCRIPT = "08_model_parallel/tensor_parallel.py"
STEPS, MICRO_BATCHES, ROWS, LENGTH = 6, 2, 2, 24  # micro-batches of ROWS sequences
FLAGS = [*("--model", "tiny.json", "--device", "cpu", "--seq-len", LENGTH, "--json", "s.json")]
FLAGS += ["--global-batch-size", MICRO_BATCHES * ROWS, "--micro-batch-size", ROWS, "--steps", STEPS]
LLAMA = {"model_type": "llama", "max_position_embeddings": 32}


def shape(
    vocab: int, hidden: int, channels: int, layers: int, heads: int, groups: int, tied: bool
) -> dict:
    sizes = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": channels,
        "num_hidden_layers": layers,
    }
    return {
        **LLAMA,
        **sizes,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "tie_word_embeddings": tied,
    }


SHAPES = {
    # the ranks divide neither channels nor vocabulary: of 50 channels each of 4 has 13 or 12 by hand, 13 or 11 by torch
    "grouped": shape(261, 48, 50, 3, 8, 4, tied=True),
    "untied": shape(257, 36, 52, 1, 6, 3, tied=False),
}
WAYS = ["one process", "by hand", "by hand, sequence parallel", "by torch, sequence parallel"]


def start(folder: Path, shape: str, nproc: int | None, *flags, script: str = SCRIPT):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.json").write_text(json.dumps(SHAPES[shape]))
    return run(script, folder, *FLAGS, *flags, nproc=nproc)


@pytest.fixture(
    scope="module",
    params=[
        ("grouped", 2),
        *(
            pytest.param(values, marks=pytest.mark.full)
            for values in [("grouped", 4), ("untied", 3)]
        ),
    ],
    ids=lambda values: f"{values[0]}-{values[1]}",
)
def finished(request, once) -> tuple[str, int, dict]:
    """The shape, the number of ranks and the summary of a run."""
    return once("08 tensor", finish, *request.param)


def finish(folder: Path, shape: str, nproc: int) -> tuple[str, int, dict]:
    result = start(folder, shape, nproc)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    return shape, nproc, json.loads((folder / "s.json").read_text())


def build(shape: str) -> torch.nn.Module:
    return weights.build("tiny", config_of(SHAPES[shape]), seed=0)


def one_process(shape: str) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of plain SGD with clipping on whole batches, which every cut must reach."""
    net = build(shape)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    rows = MICRO_BATCHES * ROWS
    batch = data.one_batch(STEPS * rows, LENGTH, torch.device("cpu"))
    losses, norms = [], []
    for inputs, targets in zip(*(tensor.split(rows) for tensor in batch), strict=True):
        loss = net(inputs, targets)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize("seq_len", [1, 2])
def test_texts_so_short_that_some_gradients_are_nearly_zero(tmp_path, seq_len):
    """Of one token attention gives its value, whatever q and k are: their gradients are rounding, or exactly zero."""
    result = start(
        tmp_path,
        "grouped",
        1,
        "--seq-len",
        seq_len,
        "--global-batch-size",
        1,
        "--micro-batch-size",
        1,
    )
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"


def test_each_cut_trains_as_one_process_does(finished):
    shape, n, summary = finished
    losses, norms = one_process(shape)
    assert summary["world_size"] == n
    rows = {row["way"]: row for row in summary["rows"]}
    assert rows.keys() >= set(WAYS)
    for way, row in rows.items():
        assert row["losses"] == pytest.approx(losses, rel=1e-5), way
        assert row["gradient_norms"] == pytest.approx(norms, rel=1e-5), way
        assert max(row["gradient_errors"]) < 1e-5, way
    assert losses[-1] < losses[0]
    assert max(norms) > 1  # or clipping was not tried


def test_a_rank_holds_and_sends_what_it_must(finished):
    """Two collectives for each pair of matrices, and for the embedding and the head; an all-reduce is as much as both
    a reduce-scatter and an all-gather."""
    shape, n, summary = finished
    layers, hidden = {"grouped": (3, 48), "untied": (1, 36)}[shape]
    tokens = ROWS * LENGTH
    in_a_pass = 2 * layers + 1
    whole = sum(parameter.numel() for parameter in build(shape).parameters())
    rows = {row["way"]: row for row in summary["rows"]}
    twice = 2 * in_a_pass * MICRO_BATCHES
    # and three numbers a token for the loss
    once_round = twice * 4 * tokens * hidden + MICRO_BATCHES * 3 * 4 * tokens
    for way in WAYS[1:]:
        # norms are whole on each
        assert sum(rows[way]["parameters_per_rank"]) == whole + (n - 1) * in_a_pass * hidden
        assert rows[way]["sent_bytes"] == round(2 * once_round * (n - 1) / n)
    assert rows["by hand"]["calls"] == {"all_reduces": twice + 2 * MICRO_BATCHES}
    apart = {"reduce_scatters": twice, "all_gathers": twice}
    assert rows["by hand, sequence parallel"]["calls"] == {
        "all_reduces": 2 * MICRO_BATCHES,
        **apart,
    }


FAULTS = {  # a line, and what stands in its place
    "backward of Copy adds nothing up": (
        "lambda context, gradient: all_reduce(gradient)",
        "lambda context, gradient: gradient",
    ),
    "whole weights count once per rank": (
        "norm = (squares + sum(gradient.square().sum() for gradient in replicated)).sqrt()",
        "norm = (squares + dist.get_world_size() * sum(gradient.square().sum() for gradient in replicated)).sqrt()",
    ),
    "a norm keeps the gradient of its own positions": (
        "torch._foreach_copy_(replicated, [*together])",
        "pass",
    ),
    "the largest logit travels twice": (
        "dist.all_reduce(largest, op=dist.ReduceOp.MAX)",
        "[dist.all_reduce(largest, op=dist.ReduceOp.MAX) for _ in range(2)]",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_version_fails_its_own_check(tmp_path, fault):
    script = str(with_fault(SCRIPT, tmp_path, *FAULTS[fault]))
    result = start(tmp_path, "grouped", 2, "--steps", 3, script=script)
    assert (result.code, "AssertionError" in result.err) == (1, True), result.err[-3000:]


REFUSED = {  # number of ranks, flags: words of the line
    (3, "--model tiny.json"): "--model tiny.json 3 4",
    (2, "--seq-len 23"): "",
    (None, "--seq-len 31"): "",
    (None, "--micro-batch-size 3"): "--global-batch-size 4 --micro-batch-size 3",
}


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_bad_input_is_refused_in_one_line(tmp_path, case):
    nproc, flags = case
    assert_refused(
        start(tmp_path, "grouped", nproc, *flags.split()), *(REFUSED[case] or flags).split()
    )
