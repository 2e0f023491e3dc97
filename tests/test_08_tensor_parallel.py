"""08_model_parallel/tensor_parallel.py: each cut trains as one process does, and sends what it must."""

import json
from pathlib import Path

import pytest
import torch
from support.chapter import load
from support.harness import config_of, run, with_fault

from common import lesson, model

SCRIPT = "08_model_parallel/tensor_parallel.py"
tensor_parallel = load(SCRIPT)
STEPS, MICRO_BATCHES, ROWS, LENGTH = 10, 2, 2, 24  # micro-batches of ROWS sequences
FLAGS = [*("--model", "tiny.json", "--device", "cpu", "--seq-len", LENGTH, "--json", "s.json")]
FLAGS += ["--global-batch-size", MICRO_BATCHES * ROWS, "--micro-batch-size", ROWS, "--steps", STEPS]
LLAMA = {"model_type": "llama", "max_position_embeddings": 32}


def shape(vocab: int, hidden: int, channels: int, layers: int, heads: int, groups: int, tied: bool) -> dict:
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": channels, "num_hidden_layers": layers}
    return {**LLAMA, **sizes, "num_attention_heads": heads, "num_key_value_heads": groups, "tie_word_embeddings": tied}


SHAPES = {
    # The ranks divide neither channels nor vocabulary. Of 50 channels each of 8 has 7 or 6 by hand, 7 or 1 by torch.
    "grouped": shape(261, 48, 50, 3, 8, 4, tied=True),
    "untied": shape(257, 36, 52, 1, 6, 3, tied=False),
    "wide": shape(261, 96, 50, 3, 24, 8, tied=True),
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
        *(pytest.param(slow, marks=pytest.mark.full) for slow in [("grouped", 1), ("grouped", 4), ("untied", 3)]),
        pytest.param(("wide", 8), marks=pytest.mark.full),
    ],
    ids=lambda parameters: f"{parameters[0]}-{parameters[1]}",
)
def finished(request, once) -> tuple[str, int, dict]:
    """The shape, the number of ranks and the summary of a run."""
    return once("08 tensor", finish, *request.param)


def finish(folder: Path, shape: str, nproc: int) -> tuple[str, int, dict]:
    result = start(folder, shape, nproc)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    assert result.out.count("checked: ") == 3
    return shape, nproc, json.loads((folder / "s.json").read_text())


def build(shape: str) -> torch.nn.Module:
    return model.build("tiny", config_of(SHAPES[shape]), seed=0)


def one_process(shape: str) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of plain SGD with clipping on whole batches, which every cut must reach."""
    net = build(shape)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    rows = MICRO_BATCHES * ROWS
    batch = lesson.one_batch(STEPS * rows, LENGTH, torch.device("cpu"))
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
    result = start(tmp_path, "grouped", 1, "--seq-len", seq_len, "--global-batch-size", 1, "--micro-batch-size", 1)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"


def test_each_cut_trains_as_one_process_does(finished):
    shape, n, summary = finished
    losses, norms = one_process(shape)
    assert summary["world_size"] == n
    assert [row["way"] for row in summary["rows"]] == WAYS
    for row in summary["rows"]:
        assert row["losses"] == pytest.approx(losses, rel=1e-5), row["way"]
        assert row["gradient_norms"] == pytest.approx(norms, rel=1e-5), row["way"]
        assert len(row["gradient_errors"]) == STEPS
        assert max(row["gradient_errors"]) < 1e-5, row["way"]
    assert losses[-1] < losses[0]
    assert max(norms) > 1  # or clipping was not tried
    assert summary["tokens"] == STEPS * MICRO_BATCHES * ROWS * LENGTH


def test_a_rank_holds_and_sends_what_it_must(finished):
    """Numbers from the shape, written down again here."""
    shape, n, summary = finished
    layers, hidden = {"grouped": (3, 48), "untied": (1, 36), "wide": (3, 96)}[shape]
    tokens = ROWS * LENGTH
    in_a_pass = 2 * layers + 1  # a collective for each pair of matrices, and one for the embedding or the head
    norms = in_a_pass * hidden
    whole = sum(parameter.numel() for parameter in build(shape).parameters())
    rows = {row["way"]: row for row in summary["rows"]}
    for way in WAYS[1:]:
        assert sum(rows[way]["parameters_per_rank"]) == whole + (n - 1) * norms
        if shape == "grouped" and n == 2:
            assert max(rows[way]["parameters_per_rank"]) < 0.51 * whole
    twice = 2 * in_a_pass * MICRO_BATCHES
    apart = {"reduce_scatters": twice, "all_gathers": twice}
    assert [rows[way]["calls"] for way in WAYS] == [
        {},
        {"all_reduces": twice + 2 * MICRO_BATCHES},
        {"all_reduces": 2 * MICRO_BATCHES, **apart},
        {"all_reduces": 3 * MICRO_BATCHES, **(apart if n > 1 else {})},  # DTensor knows that it is alone
    ]
    once_round = twice * 4 * tokens * hidden + MICRO_BATCHES * 3 * 4 * tokens  # of both trips of an all-reduce, one
    assert [rows[way]["sent_bytes"] for way in WAYS] == [0, *[round(2 * once_round * (n - 1) / n)] * 3]
    after = [rows[way]["sent_bytes_after_backward"] for way in WAYS[:3]]
    assert after == [0, round(2 * 4 * (n - 1) / n), round(2 * 4 * (norms + 1) * (n - 1) / n)]
    if torch.__version__.startswith("2.13."):  # it sums a norm's gradient twice, and a square for each tensor
        squares = len([*build(shape).parameters()])
        assert rows[WAYS[3]]["calls_after_backward"] == (2 * in_a_pass + 1 if n > 1 else 0)
        assert rows[WAYS[3]]["sent_bytes_after_backward"] == round(2 * 4 * (2 * norms + squares) * (n - 1) / n)


PLANTED = {
    "backward of Copy adds nothing up": (
        "lambda context, gradient: all_reduce(gradient)",
        "lambda context, gradient: gradient",
        "a pair of matmuls",
    ),
    "backward of Reduce adds the gradients up": (
        "lambda context, gradient: gradient)",
        "lambda context, gradient: all_reduce(gradient))",
        "a pair of matmuls",
    ),
    "whole weights count once per rank": (
        "norm = (squares + sum(gradient.square().sum() for gradient in replicated)).sqrt()",
        "norm = (squares + dist.get_world_size() * sum(gradient.square().sum() for gradient in replicated)).sqrt()",
        "differ from one process by",
    ),
    "a norm keeps the gradient of its own positions": (
        "torch._foreach_copy_(replicated, [*together])",
        "pass",
        "by hand, sequence parallel: ",
    ),
    "rows without an owner here are not zeros": (
        "F.embedding(row, self.weight) * mine[..., None]",
        "F.embedding(row, self.weight)",
        "differ from one process by",
    ),
    "the largest logit travels twice": (
        "dist.all_reduce(largest, op=dist.ReduceOp.MAX)",
        "[dist.all_reduce(largest, op=dist.ReduceOp.MAX) for _ in range(2)]",
        "by hand: traffic of a step is",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("fault", PLANTED)
def test_a_wrong_version_fails_its_own_check(tmp_path, fault):
    line, wrong, message = PLANTED[fault]
    script = str(with_fault(SCRIPT, tmp_path, line, wrong))
    result = start(tmp_path, "grouped", 2, "--steps", 3, script=script)
    assert result.code == 1
    assert message in result.err


@pytest.mark.parametrize(
    ("nproc", "flags", "message"),
    [
        (3, [], "--model tiny.json: 3 ranks do not divide its 4 key-value heads: start fewer"),
        (2, ["--seq-len", 23], "--seq-len 23: use a multiple of the number of ranks, 2"),
        (None, ["--seq-len", 31], "--seq-len 31: use a multiple of the number of ranks, 2"),
        (None, ["--micro-batch-size", 3], "--global-batch-size 4 is no multiple of --micro-batch-size 3"),
    ],
)
def test_what_cannot_be_is_one_line_before_any_work(tmp_path, nproc, flags, message):
    result = start(tmp_path, "grouped", nproc, *flags)
    assert result.code == (2 if nproc is None else 1)  # 1 is torchrun's own
    assert nproc is None or "exitcode  : 2" in result.err
    (line,) = [line for line in result.err.splitlines() if "error: " in line]
    assert message in line
    assert "Traceback" not in result.err
    assert result.out == ""


@pytest.mark.full
def test_without_flags_it_starts_two_ranks_and_checks_itself(tmp_path):
    result = run(SCRIPT, tmp_path)
    assert result.code == 0, result.err
    assert "torchrun --nproc_per_node=2" in result.out
    assert result.out.count("checked: ") == 3


@pytest.mark.gpu
def test_on_one_gpu(gpus, tmp_path):
    over_nccl(gpus, tmp_path, 1)


@pytest.mark.gpu(n=2)
def test_over_nccl(gpus, tmp_path):
    over_nccl(gpus, tmp_path, 2)


def over_nccl(gpus: dict[str, str], folder: Path, nproc: int) -> None:
    """The script's own checks are the test."""
    flags = ("--device", "cuda", "--json", "s.json")
    result = run(SCRIPT, folder, *flags, nproc=nproc, CUDA_VISIBLE_DEVICES=gpus["CUDA_VISIBLE_DEVICES"])
    assert result.code == 0, result.err
    assert json.loads((folder / "s.json").read_text())["world_size"] == nproc
