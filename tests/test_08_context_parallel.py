"""08_model_parallel/context_parallel.py: several ranks, one sequence, the training of one process."""

import copy
import itertools
import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.chapter import load
from support.harness import ODD, ROOT, TINY, config_of, run, with_fault
from torch import nn

from old import data, exits, model

SCRIPT = "08_model_parallel/context_parallel.py"
context = load(SCRIPT)
report = load("08_model_parallel/_context_parallel_report.py")
growth = load("08_model_parallel/_context_parallel_growth.py")
order = load("08_model_parallel/_context_parallel_order.py")
flags = load("08_model_parallel/_context_parallel_flags.py")
SHAPES = {
    "odd": {**ODD, "vocab_size": 256},  # 3 layers, 6 heads, 3 key-value heads
    "even": {**TINY, "num_hidden_layers": 3, "num_attention_heads": 8, "tie_word_embeddings": True},
    "four": {**TINY, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4},
    "eight": {**TINY, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 8},
}
CLIP_NORM = 0.9
STEPS = 10
FLAGS = ("--model", "tiny.json", "--steps", STEPS, "--clip-norm", CLIP_NORM, "--json", "s.json", "--device", "cpu")
NAMES = ["all-gather", "Ulysses", "ring, contiguous", "ring, zigzag"]
# shape, sequence length, ranks: None starts two by itself
RUNS = [("even", 10, 1), ("odd", 18, 3)]
SLOW_RUNS = [("even", 12, None), ("four", 24, 4), ("eight", 48, 8)]


def start(folder, shape: str, *more, nproc: int | None = None, script: str = SCRIPT, **env):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.json").write_text(json.dumps(SHAPES[shape]))
    return run(script, folder, *FLAGS, *more, nproc=nproc, **env)


@pytest.fixture(
    scope="module",
    params=[*RUNS, *(pytest.param(slow, marks=pytest.mark.long) for slow in SLOW_RUNS)],
    ids=lambda values: f"{values[0]}-{values[2] or 'bare'}",
)
def finished(request, once) -> tuple[str, int, int, dict, str]:
    """Shape, sequence length, ranks, summary and output of a run."""
    return once("08 context", finish, *request.param)


def finish(folder: Path, shape: str, seq_len: int, nproc: int | None) -> tuple[str, int, int, dict, str]:
    result = start(folder, shape, "--seq-len", seq_len, nproc=nproc)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    return shape, seq_len, nproc or 2, json.loads((folder / "s.json").read_text()), result.out


def one_process(shape: str, seq_len: int) -> tuple[list[float], int]:
    """The losses of plain training on the whole batch, and how many of its steps were clipped."""
    net = model.build("tiny", config_of(SHAPES[shape]), seed=0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    sequences = data.Sequences(data.load_corpus().train, seq_len)
    batches = data.batch_order(len(sequences), global_batch_size=4, micro_batch_size=4, seed=0)
    losses, clipped = [], 0
    for batch in itertools.islice(batches, STEPS):
        inputs, targets = (torch.stack(tensors) for tensors in zip(*(sequences[i] for i in batch), strict=True))
        targets[0, 3 * (seq_len + 1) // 4 :] = -100
        loss = net(inputs, targets)
        loss.backward()
        clipped += int(nn.utils.clip_grad_norm_(net.parameters(), CLIP_NORM) > CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, clipped


def test_every_way_trains_as_one_process_does(finished):
    shape, seq_len, n, summary, out = finished
    expected, clipped = one_process(shape, seq_len)
    assert summary["world_size"] == n
    assert [row["name"] for row in summary["rows"]] == NAMES
    for losses in (summary["losses"], *(row["losses"] for row in summary["rows"])):
        assert losses == pytest.approx(expected, rel=1e-5)
    for row in summary["rows"]:
        assert row["gradient_max_relative_difference"] < 1e-5
    assert (summary["first_loss"], summary["last_loss"]) == pytest.approx((expected[0], expected[-1]), rel=1e-5)
    assert expected[-1] < expected[0]
    assert summary["clipped_steps"] == clipped > 0
    assert summary["tokens"] == STEPS * 4 * seq_len
    assert out.count("checked: ") == 3


# Written down again, by hand: calls and bytes of a layer in a forward and its backward. Q and KV are the bytes of a
# rank's queries and of its keys and values: 2 sequences, its tokens, heads x head_dim, 4 bytes; KV twice.
SENT = {
    # 10 tokens, 8 x 4 and 2 x 4 wide; nobody to send to
    ("even", 1): {"all-gather": 0, "Ulysses": 0, "ring": 0, "rounds": 0, "sends": 0},
    # 6 tokens: Q = 2 x 6 x 32 x 4 = 1,536, KV = 2 x 2 x 6 x 8 x 4 = 768
    ("even", 2): {"all-gather": 2 * 768, "Ulysses": 3072 + 768, "ring": 4 * 768, "rounds": 4, "sends": 4},
    # 6 tokens: Q = 2 x 6 x 36 x 4 = 1,728, KV = 2 x 2 x 6 x 18 x 4 = 1,728
    ("odd", 3): {"all-gather": 4 * 1728, "Ulysses": 4 * 1728, "ring": 7 * 1728, "rounds": 6, "sends": 7},
    # 6 tokens: Q = 2 x 6 x 32 x 4 = 1,536, KV = 2 x 2 x 6 x 16 x 4 = 1,536
    ("four", 4): {"all-gather": 6 * 1536, "Ulysses": 4.5 * 1536, "ring": 10 * 1536, "rounds": 8, "sends": 10},
    # 6 tokens: Q = 2 x 6 x 32 x 4 = 1,536, KV = 2 x 2 x 6 x 32 x 4 = 3,072
    ("eight", 8): {"all-gather": 14 * 3072, "Ulysses": 7 * 1536, "ring": 22 * 3072, "rounds": 16, "sends": 22},
}


def test_calls_and_bytes_are_exact(finished):
    shape, _, n, summary, _ = finished
    sent = SENT[shape, n]
    times = 2 * SHAPES[shape]["num_hidden_layers"]  # two micro-batches
    calls = ("all_gathers", "reduce_scatters", "all_to_alls", "rounds", "sends")
    ring = [0, 0, 0, sent["rounds"], sent["sends"]]
    expected = {"all-gather": [1, 1, 0, 0, 0], "Ulysses": [0, 0, 4, 0, 0], NAMES[2]: ring, NAMES[3]: ring}
    parameters = summary["parameters"]
    for row in summary["rows"]:
        assert row["bytes_sent_per_rank_per_step"] == times * sent[row["name"].split(",")[0]], row["name"]
        assert [row[f"{call}_per_step"] for call in calls] == [times * count for count in expected[row["name"]]]
        assert row["all_reduces_per_step"] == 1  # the loss and all gradients
        assert row["weight_gradient_bytes_sent_per_rank_per_step"] == round(8 * (parameters + 1) * (n - 1) / n)


def test_zigzag_gives_every_rank_equal_work(finished):
    _, seq_len, n, summary, _ = finished
    scores = {row["name"]: row["scores_of_each_rank"] for row in summary["rows"]}
    part = seq_len // n
    half = part / 2
    assert scores["all-gather"] == scores["Ulysses"] == [0] * n  # not counted: a library computes them
    assert scores["ring, contiguous"] == [part * part * (rank + 1) for rank in range(n)]
    assert scores["ring, zigzag"] == [(2 * n + 1) * half * half] * n


def test_what_a_rank_saves_is_exact(finished):
    """The ring saves 1/N. Ulysses has its output twice, before and after the exchange; the all-gather has all keys and
    values, and a mask in fp32."""
    shape, seq_len, n, summary, _ = finished
    config = config_of(SHAPES[shape])
    saved = {(row["seq_len"], row["name"]): row["saved_bytes_per_rank"] for row in summary["growth"]}
    lengths = [length for length in (seq_len, 2 * seq_len, 4 * seq_len) if length <= config.max_position_embeddings]
    assert set(saved) == {(length, name) for length in lengths for name in ("one process", *NAMES)}
    scalars = 12  # the count and the loss
    for length in lengths:
        tokens = length // n
        ring = saved[length, "ring, zigzag"]
        queries = 4 * tokens * config.num_attention_heads * config.head_dim
        keys_values = 8 * tokens * config.num_key_value_heads * config.head_dim
        assert saved[length, "one process"] - scalars == n * (ring - scalars)
        assert saved[length, "ring, contiguous"] == ring
        assert saved[length, "Ulysses"] == ring + config.num_hidden_layers * queries
        of_others = (n - 1) * keys_values + 4 * tokens * length
        assert saved[length, "all-gather"] == ring + config.num_hidden_layers * of_others
    assert all(row["seconds"]["n"] == 3 for row in summary["growth"])


def test_more_saved_than_a_part_fails():
    rows = [
        {"seq_len": 8, "name": name, "saved_bytes_per_rank": size}
        for name, size in (("one process", 300_000), ("all-gather", 200_000), ("ring, zigzag", 100_000))
    ]
    growth.check_growth(rows, 3)
    rows[2]["saved_bytes_per_rank"] = 102_000
    with pytest.raises(AssertionError, match="ring, zigzag saves 102,000 bytes of 8 tokens"):
        growth.check_growth(rows, 3)


@pytest.fixture
def as_rank(monkeypatch):
    """A function that makes this process believe that it is that rank of so many."""

    def pretend(rank: int, world_size: int) -> None:
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: world_size)

    return pretend


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_tiles_cover_what_a_causal_mask_shows(as_rank, kind, n):
    """Every pair of a query and a key before it is computed once, wherever the two lie; none of the future is seen."""
    seq_len = 2 * n * 3
    positions = []
    for rank in range(n):
        as_rank(rank, n)
        positions.append(order.positions_of_rank(kind, seq_len))
    assert sorted(torch.cat(positions).tolist()) == list(range(seq_len))
    seen = torch.zeros(seq_len, seq_len, dtype=torch.int)
    work = torch.zeros(n, n, dtype=torch.int)  # rank, turn
    for rank, turn in itertools.product(range(n), range(n)):
        as_rank(rank, n)
        for rows, columns, on_diagonal in order.tiles(kind, turn, seq_len // n):
            queries, keys = positions[rank][rows], positions[(rank - turn) % n][columns]
            visible = (queries[:, None] >= keys) if on_diagonal else torch.ones(len(queries), len(keys))
            seen[queries[:, None], keys] += visible.int()
            work[rank, turn] += visible.numel()
    assert seen.equal(torch.ones_like(seen).tril())
    if kind == "zigzag":  # also within each turn: no rank waits for another
        assert (work == work[0]).all()


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
def test_on_one_rank_it_is_attention(group, name, heads):
    """Output and gradients in fp64, with scores that are far from equal; zigzag adds two chunks of keys up."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, 10, count, 6) for count in (heads[0], heads[1], heads[1])]
    q, k, v = (3 * torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    out_gradient = torch.randn(2, heads[0], 10, 6, generator=generator, dtype=torch.float64)
    found = []
    for attend in (context.WAYS[name][1], F.scaled_dot_product_attention):
        inputs = [tensor.clone().transpose(1, 2).requires_grad_() for tensor in (q, k, v)]
        out = attend(*inputs, None, is_causal=True, enable_gqa=heads[0] != heads[1])
        found.append([out, *torch.autograd.grad(out, inputs, out_gradient)])
    for ours, correct in zip(*found, strict=True):
        torch.testing.assert_close(ours, correct, rtol=1e-12, atol=1e-12)


def arguments(**changed) -> Namespace:
    wanted = {"model": "tiny", "attention": "all", "seq_len": 24, "global_batch_size": 4, "micro_batch_size": 2}
    return Namespace(**wanted | changed)


@pytest.mark.parametrize(
    ("changed", "world_size", "told"),
    [
        (
            {"seq_len": 26},
            4,
            "--seq-len 26 does not divide over 2 x 4 parts (zigzag order: two per process): use 24 or 32",
        ),
        ({"seq_len": 26, "attention": "ring"}, 4, "use 24 or 32"),
        ({"seq_len": 26, "attention": "ulysses"}, 4, "--seq-len 26 does not divide over 4 processes: use 24 or 28"),
        ({"seq_len": 3}, 4, "use 8"),
        ({"seq_len": 127}, 4, "use 120 or 128"),
        ({"seq_len": 128, "attention": "all-gather"}, 3, "use 126"),  # 129 is over the model's limit
        ({}, 3, "cannot divide the 4 key-value heads of --model tiny over 3 processes: start 2 or 4, or use"),
        ({"seq_len": 80, "attention": "ulysses"}, 5, "start 4, or use --attention ring or all-gather"),
        ({"seq_len": 12, "attention": "ring"}, 3, None),
        ({"seq_len": 25, "attention": "all-gather"}, 5, None),
        ({"seq_len": 26, "attention": "all-gather"}, 2, None),
    ],
)
def test_sizes_that_do_not_divide(changed, world_size, told):
    config = config_of(SHAPES["four"])
    if told is None:
        flags.check_sizes(arguments(**changed), config, world_size)
        return
    with pytest.raises(exits.UserError) as error:
        flags.check_sizes(arguments(**changed), config, world_size)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("wrong", "told", "nproc"),
    [
        (("--seq-len", 13), "--seq-len 13 does not divide over 2 x 2 parts (zigzag order: two per process)", None),
        (("--seq-len", 16), "the 3 key-value heads of --model tiny.json over 2 processes: start 1 or 3, or use", 2),
        (("--seq-len", 65), "--seq-len 65 is over the limit", None),
        (("--micro-batch-size", 3, "--seq-len", 16), "--global-batch-size 4 does not divide into micro-batches", None),
        (("--attention", "flash"), "--attention", None),
        (("--model", "giant"), "giant", None),
        (("--json", "no/such/file.json"), "--json", None),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_one_line(tmp_path, wrong, told, nproc):
    result = start(tmp_path, "odd", *wrong, nproc=nproc)
    lines = [line for line in result.err.splitlines() if "error: " in line]
    assert len(lines) == 1, result.err  # from rank 0 alone
    assert told in lines[0]
    assert result.out == ""
    if nproc is None:
        assert result.code == 2
        assert len(result.err.splitlines()) == 1
    else:  # torchrun's own code is 1, and its report has the rank's
        assert "exitcode  : 2" in result.err


@pytest.mark.long
def test_one_way_alone_needs_no_heads_that_divide(tmp_path):
    result = start(tmp_path, "odd", "--attention", "ring", "--seq-len", 16, nproc=2)
    assert result.code == 0, result.err[-2000:]
    rows = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert [row["name"] for row in rows] == NAMES[2:]


def test_with_one_token_queries_and_keys_have_no_gradient(tmp_path):
    result = start(tmp_path, "odd", "--attention", "all-gather", "--seq-len", 1, nproc=1)
    assert result.code == 0, result.err[-2000:]
    assert json.loads((tmp_path / "s.json").read_text())["rows"][0]["gradient_max_relative_difference"] < 1e-5


SPOILED = {
    "rounds_per_step is": lambda row: row.update(rounds_per_step=row["rounds_per_step"] + 1),
    "bytes_sent_per_rank_per_step is": lambda row: row.update(bytes_sent_per_rank_per_step=4),
    "the ranks compute": lambda row: row["scores_of_each_rank"].__setitem__(0, 1.0),
    "loss differs": lambda row: row.update(loss_max_relative_difference=2e-5),
    "gradient differs from that of one process by nan": lambda row: row.update(
        gradient_max_relative_difference=float("nan")
    ),
}


@pytest.mark.parametrize("message", SPOILED)
def test_a_claim_that_does_not_hold_fails(once, message):
    shape, seq_len, _, summary, _ = once("08 context", finish, *RUNS[1])
    rows = copy.deepcopy(summary["rows"])
    args, config = arguments(seq_len=seq_len), config_of(SHAPES[shape])
    report.check(rows, config, args)
    SPOILED[message](rows[3])
    with pytest.raises(AssertionError, match=message):
        report.check(rows, config, args)


PLANTED = {
    "a rank's gradients are averaged": (
        "    all_reduce(flat)",
        "    all_reduce(flat)\n    flat /= dist.get_world_size()",
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
}


@pytest.mark.long
@pytest.mark.parametrize("fault", PLANTED)
def test_a_wrong_version_fails_its_own_check(tmp_path, fault):
    line, wrong, message = PLANTED[fault]
    script = str(with_fault(SCRIPT, tmp_path, line, wrong))
    result = start(tmp_path, "four", "--seq-len", 16, "--steps", 2, nproc=2, script=script)
    assert result.code == 1
    assert message in result.err


def test_the_three_ways_are_the_first_thing_after_the_imports():
    source = (ROOT / SCRIPT).read_text()
    after_imports = source.split("from old import", 1)[1].splitlines()[1:81]
    functions = [line.split("(")[0] for line in after_imports if line.startswith("def ")]
    assert functions == [f"def {name}_attention" for name in ("all_gather", "ulysses", "ring")]


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
