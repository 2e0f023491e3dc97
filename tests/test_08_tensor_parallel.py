"""08_model_parallel/tensor_parallel.py: each cut trains as one process does, and sends what it must."""

import copy
import itertools
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.chapter import load
from support.harness import ROOT, config_of, run, with_fault

from old import data, model

SCRIPT = "08_model_parallel/tensor_parallel.py"
tensor_parallel = load(SCRIPT)
report = load("08_model_parallel/_tensor_parallel_report.py")
STEPS, MICRO_BATCHES, ROWS, LENGTH = 10, 2, 2, 24  # micro-batches of ROWS sequences
FLAGS = [*("--model", "tiny.json", "--device", "cpu", "--seq-len", LENGTH, "--json", "s.json")]
FLAGS += ["--global-batch-size", MICRO_BATCHES * ROWS, "--micro-batch-size", ROWS, "--steps", STEPS]
LLAMA = {"model_type": "llama", "max_position_embeddings": 32}
SHAPES = {
    # Groups of two query heads, an odd number of layers, and 50 channels and 261 tokens that 4 ranks do not divide.
    "grouped": {
        **LLAMA,
        "vocab_size": 261,
        "hidden_size": 48,
        "intermediate_size": 50,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "untied": {
        **LLAMA,
        "vocab_size": 257,
        "hidden_size": 36,
        "intermediate_size": 52,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "tie_word_embeddings": False,
    },
    # Groups of three query heads. Of 50 channels a rank has 7 or 6 by hand, 7 or 1 by torch; of 261 tokens 33 to 30.
    "wide": {
        **LLAMA,
        "vocab_size": 261,
        "hidden_size": 96,
        "intermediate_size": 50,
        "num_hidden_layers": 3,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
}
RUNS = [("grouped", 2)]
SLOW_RUNS = [("grouped", 1), ("grouped", 4), ("untied", 3), ("wide", 8)]
WAYS = ["one process", "by hand", "by hand, sequence parallel", "by torch, sequence parallel"]


def start(folder: Path, shape: str, nproc: int | None, *flags, script: str = SCRIPT):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.json").write_text(json.dumps(SHAPES[shape]))
    return run(script, folder, *FLAGS, *flags, nproc=nproc)


@pytest.fixture(
    scope="module",
    params=[*RUNS, *(pytest.param(slow, marks=pytest.mark.long) for slow in SLOW_RUNS)],
    ids=lambda parameters: f"{parameters[0]}-{parameters[1]}",
)
def finished(request, once) -> tuple[str, int, dict, str]:
    """The shape, the number of ranks, the summary and the output of a run."""
    return once("08 tensor", finish, *request.param)


def finish(folder: Path, shape: str, nproc: int) -> tuple[str, int, dict, str]:
    result = start(folder, shape, nproc)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    return shape, nproc, json.loads((folder / "s.json").read_text()), result.out


def build(shape: str) -> torch.nn.Module:
    return model.build("tiny", config_of(SHAPES[shape]), seed=0)


def one_process(shape: str) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of plain SGD with clipping on whole batches, which every cut must reach."""
    net = build(shape)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    sequences = data.Sequences(data.load_corpus().train, LENGTH)
    rows = MICRO_BATCHES * ROWS
    order = data.batch_order(len(sequences), global_batch_size=rows, micro_batch_size=rows, seed=0)
    losses, norms = [], []
    for batch in itertools.islice(order, STEPS):
        inputs, targets = (torch.stack(tensors) for tensors in zip(*(sequences[i] for i in batch), strict=True))
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
    result = start(tmp_path, RUNS[0][0], 1, "--seq-len", seq_len, "--global-batch-size", 1, "--micro-batch-size", 1)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"


def test_each_cut_trains_as_one_process_does(finished):
    shape, n, summary, out = finished
    losses, norms = one_process(shape)
    assert summary["world_size"] == n
    assert [row["way"] for row in summary["rows"]] == WAYS
    for row in summary["rows"]:
        assert row["losses"] == pytest.approx(losses, rel=1e-5), row["way"]
        assert row["gradient_norms"] == pytest.approx(norms, rel=1e-5), row["way"]
        assert len(row["gradient_errors"]) == STEPS
        assert max(row["gradient_errors"]) < 1e-5, row["way"]
    assert losses[-1] < losses[0]
    assert sum(norm > 1 for norm in norms) == summary["clipped_steps"] > 0  # or clipping was not tried
    assert summary["tokens"] == STEPS * MICRO_BATCHES * ROWS * LENGTH
    assert out.count("checked: ") == 2


def test_a_rank_holds_and_sends_what_it_must(finished):
    """Numbers from the shape, written down again here."""
    shape, n, summary, _ = finished
    layers, hidden = {"grouped": (3, 48), "untied": (1, 36), "wide": (3, 96)}[shape]
    tokens = ROWS * LENGTH
    activation = 4 * tokens * hidden
    in_a_pass = 2 * layers + 1  # a collective for each pair of matrices, and one for the embedding or the head
    norms = in_a_pass * hidden
    whole = sum(parameter.numel() for parameter in build(shape).parameters())
    rows = {row["way"]: row for row in summary["rows"]}
    for way in WAYS[1:]:
        assert sum(rows[way]["parameters_per_rank"]) == whole + (n - 1) * norms
        if shape == "grouped" and n == 2:
            assert max(rows[way]["parameters_per_rank"]) < 0.51 * whole
    names = ("all_reduces_per_step", "reduce_scatters_per_step", "all_gathers_per_step")
    calls = {way: [rows[way][name] for name in names] for way in WAYS}
    twice = 2 * in_a_pass * MICRO_BATCHES
    assert calls == {
        WAYS[0]: [0, 0, 0],
        WAYS[1]: [twice + 2 * MICRO_BATCHES, 0, 0],
        WAYS[2]: [2 * MICRO_BATCHES, twice, twice],
        WAYS[3]: [3 * MICRO_BATCHES, *([twice, twice] if n > 1 else [0, 0])],  # DTensor knows that it is alone
    }
    once_round = twice * activation + MICRO_BATCHES * 3 * 4 * tokens  # of both trips of an all-reduce, one
    sent = [rows[way]["bytes_sent_per_rank_per_step"] for way in WAYS]
    assert sent == [0, *[round(2 * once_round * (n - 1) / n)] * 3]
    after = [rows[way]["bytes_sent_after_backward_per_rank_per_step"] for way in WAYS[:3]]
    assert after == [0, round(2 * 4 * (n - 1) / n), round(2 * 4 * (norms + 1) * (n - 1) / n)]
    if torch.__version__.startswith("2.13."):  # it sums a norm's gradient twice, and a square for each tensor
        squares = len([*build(shape).parameters()])
        calls_of_torch = rows[WAYS[3]]["calls_after_backward_per_step"]
        sent_by_torch = rows[WAYS[3]]["bytes_sent_after_backward_per_rank_per_step"]
        assert calls_of_torch == (2 * in_a_pass + 1 if n > 1 else 0)
        assert sent_by_torch == round(2 * 4 * (2 * norms + squares) * (n - 1) / n)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda rows: rows[1]["losses"].reverse(), "by hand: losses differ from one process"),
        (lambda rows: rows[2]["gradient_norms"].reverse(), "by hand, sequence parallel: gradient norms differ"),
        (lambda rows: rows[3]["gradient_errors"].append(2e-5), "by torch, sequence parallel: gradients differ"),
        (lambda rows: rows[3]["gradient_errors"].append(float("nan")), "gradients differ from one process by nan"),
        (lambda rows: rows[1]["parameters_per_rank"].append(1), "by hand: .* weights on all ranks, not"),
    ],
)
def test_a_claim_that_does_not_hold_fails(finished, spoil, message):
    shape, n, summary, _ = finished
    rows = copy.deepcopy(summary["rows"])
    report.check(rows, config_of(SHAPES[shape]), n)
    spoil(rows)
    with pytest.raises(AssertionError, match=message):
        report.check(rows, config_of(SHAPES[shape]), n)


PLANTED = {
    "f adds nothing up": (
        "Conjugate.apply(x, identity, sum_over_ranks)",
        "Conjugate.apply(x, identity, identity)",
        "traffic of forward and backward is",
    ),
    "g adds the gradients up": (
        "Conjugate.apply(x, sum_over_ranks, identity)",
        "Conjugate.apply(x, sum_over_ranks, sum_over_ranks)",
        "traffic of forward and backward is",
    ),
    "whole weights count once per rank": (
        '"whole" if cut_dimension(name) is None else "cut"',
        '"cut"',
        "differ from one process by",
    ),
    "a norm keeps the gradient of its own positions": (
        "gradient.copy_(total)",
        "total.copy_(gradient)",
        "by hand, sequence parallel: ",
    ),
    "rows without an owner here are not zeros": (
        "F.embedding(row, weight) * mine[..., None]",
        "F.embedding(row, weight)",
        "differ from one process by",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("fault", PLANTED)
def test_a_wrong_version_fails_its_own_check(tmp_path, fault):
    line, wrong, message = PLANTED[fault]
    result = start(tmp_path, "grouped", 2, "--steps", 3, script=str(with_fault(SCRIPT, tmp_path, line, wrong)))
    assert result.code == 1
    assert message in result.err


@pytest.mark.parametrize(
    ("nproc", "flags", "message"),
    [
        (3, [], "--model tiny.json: 3 ranks do not divide its 4 key-value head(s): start 1, 2 or 4"),
        (2, ["--seq-len", 23], "--seq-len 23: 2 ranks do not divide it into equal parts: use 22 or 24"),
        (4, ["--seq-len", 3], "--seq-len 3: 4 ranks do not divide it into equal parts: use 4"),
        (None, ["--seq-len", 31], "--seq-len 31: 2 ranks do not divide it into equal parts: use 30 or 32"),
        (2, ["--seq-len", 33], "--seq-len 33 is over the limit of --model tiny.json: 32"),
        (
            2,
            ["--micro-batch-size", 3],
            "--global-batch-size 4 does not divide into micro-batches of --micro-batch-size 3: use 3 or 6",
        ),
        (None, ["--micro-batch-size", 5], "divide into micro-batches of --micro-batch-size 5: use 5"),
        (2, ["--model", "giant"], "--model giant"),
        (2, ["--clip-norm", "0"], "--clip-norm"),
    ],
)
def test_what_cannot_be_is_one_line_before_any_work(tmp_path, nproc, flags, message):
    result = start(tmp_path, "grouped", nproc, *flags)
    assert result.code == (2 if nproc is None else 1)  # 1 is torchrun's own
    assert nproc is None or "exitcode  : 2" in result.err
    lines = [line for line in result.err.splitlines() if "error: " in line]
    assert len(lines) == 1
    assert message in lines[0]
    assert "Traceback" not in result.err
    assert result.out == ""


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_cut_cross_entropy_of_one_rank_is_torchs(group):
    generator = torch.Generator().manual_seed(0)
    logits = (100 * torch.randn(2, 7, 11, generator=generator)).requires_grad_()  # exp of them is inf
    targets = torch.randint(11, (2, 7), generator=generator)
    targets[0, 3:] = data.PADDING
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    (gradient,) = torch.autograd.grad(expected, logits)
    loss = tensor_parallel.cut_cross_entropy(logits, targets, 11)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], gradient)


def test_tied_weights_stay_tied(group):
    net = build("grouped")
    tensor_parallel.cut_model(net, tensor_parallel.f, tensor_parallel.g)
    assert net.lm_head.weight is net.model.embed_tokens.weight
    net = build("grouped")
    tensor_parallel.parallelize_with_torch(net)
    assert net.lm_head.weight is net.model.embed_tokens.weight


def test_the_cuts_are_the_first_thing_after_the_imports():
    source = (ROOT / SCRIPT).read_text()
    after_imports = source.split("from old import", 1)[1].splitlines()[1:81]
    functions = [line.split("(")[0].removeprefix("def ") for line in after_imports if line.startswith("def ")]
    assert functions[:7] == ["f", "g", "f_of_sequence", "g_of_sequence", "cut_model", "look_up", "cut_cross_entropy"]


@pytest.mark.long
def test_without_flags_it_starts_two_ranks_and_checks_itself(tmp_path):
    result = run(SCRIPT, tmp_path)
    assert result.code == 0, result.err
    assert "torchrun --nproc_per_node=2" in result.out
    assert result.out.count("checked: ") == 2


@pytest.mark.gpu
def test_on_one_gpu(gpus, tmp_path):
    over_nccl(gpus, tmp_path, 1)


@pytest.mark.gpu(n=2)
def test_over_nccl(gpus, tmp_path):
    over_nccl(gpus, tmp_path, 2)


def over_nccl(gpus: dict[str, str], folder: Path, nproc: int) -> None:
    """The script's own checks are the test."""
    visible = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
    result = run(SCRIPT, folder, "--device", "cuda", "--json", "s.json", nproc=nproc, **visible)
    assert result.code == 0, result.err
    assert json.loads((folder / "s.json").read_text())["world_size"] == nproc
