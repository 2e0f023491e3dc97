"""08_model_parallel/context_parallel.py: several ranks, one sequence, the training of one process."""

import json
from pathlib import Path

import pytest
import torch
from support.harness import ODD, TINY, config_of, run, with_fault
from torch import nn

from common import lesson, model

SCRIPT = "08_model_parallel/context_parallel.py"
SHAPES = {
    "odd": {**ODD, "vocab_size": 256},  # 3 layers, 6 heads, 3 key-value heads
    "even": {**TINY, "num_hidden_layers": 3, "num_attention_heads": 8, "tie_word_embeddings": True},
    "four": {**TINY, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4},
    "eight": {**TINY, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 8},
}
STEPS = 6
NAMES = ["one process", "all-gather", "Ulysses", "ring, contiguous", "ring, zigzag"]
RUNS = [  # shape, sequence length, ranks
    ("odd", 18, 3),
    *(pytest.param(values, marks=pytest.mark.full) for values in (("even", 10, 1), ("four", 24, 4), ("eight", 48, 8))),
    pytest.param(("even", 12, 2), marks=pytest.mark.full),
]


def start(folder: Path, shape: str, *more, nproc: int | None = None, script: str = SCRIPT):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.json").write_text(json.dumps(SHAPES[shape]))
    flags = ("--model", "tiny.json", "--steps", STEPS, "--json", "s.json", "--device", "cpu", *more)
    return run(script, folder, *flags, nproc=nproc)


def finish(folder: Path, shape: str, seq_len: int, nproc: int) -> dict:
    """The summary of a run; two ranks start by themselves."""
    result = start(folder, shape, "--seq-len", seq_len, nproc=None if nproc == 2 else nproc)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    assert result.out.count("checked: ") == 2
    return json.loads((folder / "s.json").read_text())


@pytest.fixture(scope="module", params=RUNS, ids=lambda values: f"{values[0]}-{values[2]}")
def finished(request, once) -> tuple[str, int, int, dict]:
    return *request.param, once("08 context", finish, *request.param)


def one_process(shape: str, seq_len: int) -> list[float]:
    """The losses of plain training on the whole batch."""
    net = model.build("tiny", config_of(SHAPES[shape]), seed=0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    losses = []
    batches = [tensor.split(4) for tensor in lesson.one_batch(4 * STEPS, seq_len, torch.device("cpu"))]
    for inputs, targets in zip(*batches, strict=True):
        targets[0, 3 * (seq_len + 1) // 4 :] = -100
        loss = net(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_every_way_trains_as_one_process_does(finished):
    shape, seq_len, n, summary = finished
    expected = one_process(shape, seq_len)
    assert summary["world_size"] == n
    assert [row["name"] for row in summary["rows"]] == NAMES
    for row in summary["rows"]:
        assert row["losses"] == pytest.approx(expected, rel=1e-5)
        assert row["gradient_error"] < 1e-5
    assert (summary["first_loss"], summary["last_loss"]) == pytest.approx((expected[0], expected[-1]), rel=1e-5)
    assert expected[-1] < expected[0]
    assert summary["tokens"] == STEPS * 4 * seq_len


# Written down again, by hand: bytes of a layer in a forward and its backward, and messages of the ring. Q and KV: bytes
# of a rank's queries and of its keys and values (4 sequences, its tokens, heads x head_dim, 4 bytes; KV twice).
SENT = {
    ("even", 1): {"all-gather": 0, "Ulysses": 0, "ring": 0, "sends": 0},
    # 6 tokens, 8 x 4 and 2 x 4 wide: Q = 4 x 6 x 32 x 4 = 3,072, KV = 2 x 4 x 6 x 8 x 4 = 1,536
    ("even", 2): {"all-gather": 2 * 1536, "Ulysses": 6144 + 1536, "ring": 4 * 1536, "sends": 4},
    # 6 tokens: Q = 4 x 6 x 36 x 4 = 3,456, KV = 2 x 4 x 6 x 18 x 4 = 3,456
    ("odd", 3): {"all-gather": 4 * 3456, "Ulysses": 4 * 3456, "ring": 7 * 3456, "sends": 7},
    # 6 tokens: Q = 4 x 6 x 32 x 4 = 3,072, KV = 2 x 4 x 6 x 16 x 4 = 3,072
    ("four", 4): {"all-gather": 6 * 3072, "Ulysses": 4.5 * 3072, "ring": 10 * 3072, "sends": 10},
    # 6 tokens: Q = 4 x 6 x 32 x 4 = 3,072, KV = 2 x 4 x 6 x 32 x 4 = 6,144
    ("eight", 8): {"all-gather": 14 * 6144, "Ulysses": 7 * 3072, "ring": 22 * 6144, "sends": 22},
}


def test_calls_bytes_and_scores_are_exact(finished):
    shape, seq_len, n, summary = finished
    sent, layers = SENT[shape, n], SHAPES[shape]["num_hidden_layers"]
    ring_calls = f"{layers * sent['sends']} sends" if n > 1 else "none"
    calls = ["none", f"{layers} all-gathers, {layers} reduce-scatters", f"{4 * layers} all-to-alls"]
    assert [row["calls"] for row in summary["rows"]] == [*calls, ring_calls, ring_calls]
    for row in summary["rows"]:
        assert row["sent_bytes"] == layers * sent.get(row["name"].split(",")[0], 0), row["name"]
    times, part = 2 * layers, seq_len // n  # forward and backward
    contiguous = [times * part * part * (rank + 1) for rank in range(n)]
    zigzag = [times * (2 * n + 1) * part * part / 4] * n  # equal work for every rank
    assert [row["scores_of_each_rank"] for row in summary["rows"]] == [[0] * n] * 3 + [contiguous, zigzag]


def test_what_a_rank_keeps_for_backward(finished):
    """The ring keeps 1/N. The all-gather keeps the keys and values of the other ranks, too, and Ulysses its output."""
    shape, seq_len, n, summary = finished
    config, tokens = config_of(SHAPES[shape]), 4 * seq_len // n
    kept = {row["name"]: row["kept_bytes_per_rank"] for row in summary["rows"]}
    ring = kept["ring, zigzag"]
    assert kept["ring, contiguous"] == ring
    assert kept["one process"] / n == pytest.approx(ring, abs=200)
    queries = 4 * tokens * config.num_attention_heads * config.head_dim
    keys_values = 8 * tokens * config.num_key_value_heads * config.head_dim
    assert kept["Ulysses"] >= ring + config.num_hidden_layers * queries
    assert kept["all-gather"] >= ring + config.num_hidden_layers * (n - 1) * keys_values


@pytest.mark.parametrize(
    ("wrong", "message", "nproc"),
    [
        (("--seq-len", 14), "--seq-len 14 does not divide into 4 chunks, two per rank: use 12", None),
        (("--seq-len", 16, "--attention", "ulysses"), "2 ranks do not divide the 3 key-value heads of", None),
        (("--seq-len", 16, "--attention", "ulysses"), "2 ranks do not divide the 3 key-value heads of", 2),
        (("--seq-len", 68), "--seq-len 68 is over the limit", None),
        (("--attention", "flash"), "--attention", None),
        (("--model", "giant"), "giant", None),
        (("--json", "no/such/file.json"), "--json", None),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_one_line(tmp_path, wrong, message, nproc):
    result = start(tmp_path, "odd", *wrong, nproc=nproc)
    lines = [line for line in result.err.splitlines() if "error: " in line]
    assert len(lines) == 1, result.err  # from rank 0 alone
    assert message in lines[0]
    assert result.out == ""
    assert result.code == 2 if nproc is None else "exitcode  : 2" in result.err  # torchrun's own code is 1


@pytest.mark.parametrize(("attention", "names"), [("all", [*NAMES[:2], *NAMES[3:]]), ("ring", [NAMES[0], *NAMES[3:]])])
def test_what_the_heads_do_not_allow_is_left_out(tmp_path, attention, names):
    result = start(tmp_path, "odd", "--attention", attention, "--seq-len", 16, "--steps", 1, nproc=2)
    assert result.code == 0, result.err[-2000:]
    assert [row["name"] for row in json.loads((tmp_path / "s.json").read_text())["rows"]] == names
    assert ("Ulysses is left out: 2 ranks do not divide" in result.out) == (attention == "all")


PLANTED = {  # line, what stands there instead, what the script's own check says
    "gradients are averaged over the ranks": (
        "    dist.all_reduce(flat)",
        "    dist.all_reduce(flat)\n    flat /= dist.get_world_size()",
        "differs from that of one process",
    ),
    "positions start at 0 on every rank": (
        "positions=positions[None]",
        "positions=torch.arange(len(positions))[None]",
        "differs from that of one process",
    ),
    "the gradient of a block stays where it was found": (
        "kv_gradient += arriving.pop()",
        "arriving.pop()",
        "differs from that of one process",
    ),
    "no sum over the ranks": ("    dist.all_reduce(flat)\n", "", "differs from that of one process"),
    "a block travels twice": (
        "start_round([] if is_last else [kv])",
        "start_round([] if is_last else [kv, kv])",
        "ring, contiguous: calls is 5 sends, and must be 4 sends",
    ),
    "the ring keeps more than its part": (
        "        ctx.order = order\n",
        "        ctx.order, ctx.kept = order, [q.repeat(8, 1, 1, 1, 1)]\n",
        "bytes for backward, more than",
    ),
}


@pytest.mark.parametrize(
    "fault", [*PLANTED][:1] + [pytest.param(name, marks=pytest.mark.full) for name in [*PLANTED][1:]]
)
def test_a_wrong_version_fails_its_own_check(tmp_path, fault):
    line, wrong, message = PLANTED[fault]
    script = str(with_fault(SCRIPT, tmp_path, line, wrong))
    result = start(tmp_path, "four", "--seq-len", 16, "--steps", 2, nproc=2, script=script)
    assert result.code == 1
    assert message in result.err


@pytest.mark.gpu(n=1)
def test_on_a_gpu(gpus, tmp_path):
    """The script's own checks are the test."""
    visible = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
    result = run(SCRIPT, tmp_path, "--device", "cuda", nproc=1, warm=False, **visible)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"


@pytest.mark.gpu(n=2)
def test_over_nccl(gpus, tmp_path):
    """The script's own checks are the test."""
    visible = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
    result = run(SCRIPT, tmp_path, "--device", "cuda", "--json", "s.json", nproc=2, warm=False, **visible)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    assert json.loads((tmp_path / "s.json").read_text())["world_size"] == 2
