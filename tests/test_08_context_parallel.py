"""08_model_parallel/context_parallel.py: a sequence on several ranks trains as one process does."""

import json
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from support.chapter import load
from support.harness import ODD, TINY, assert_refused, config_of, in_full, in_long, run, with_fault
from torch import nn

from lm import stdlib_text, weights

SCRIPT = "08_model_parallel/context_parallel.py"
SHAPES = {
    "odd": {**ODD, "vocab_size": 256},  # 3 layers, 6 heads, 3 key-value heads
    "even": {**TINY, "num_hidden_layers": 3, "num_attention_heads": 8, "tie_word_embeddings": True},
    "four": {**TINY, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4},
}
STEPS = 6
NAMES = {"one process", "ring, contiguous", "ring, zigzag", "all-gather", "Ulysses", "torch"}
RUNS = [  # shape, sequence length, ranks; of 4 tokens each chunk has one
    ("odd", 18, 3),
    in_long(("even", 4, 2)),
    in_full(("four", 24, 4)),
]


def start(folder: Path, shape: str, *more, nproc: int | None = None, script: str = SCRIPT):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.json").write_text(json.dumps(SHAPES[shape]), encoding="utf-8")
    flags = ("--model", "tiny.json", "--steps", STEPS, "--json", "s.json", "--device", "cpu", *more)
    return run(script, folder, *flags, nproc=nproc)


def finish(folder: Path, shape: str, seq_len: int, nproc: int) -> dict:
    """Run the script and return its summary. Two ranks start by themselves."""
    result = start(folder, shape, "--seq-len", seq_len, nproc=None if nproc == 2 else nproc)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    return json.loads((folder / "s.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module", params=RUNS, ids=lambda values: f"{values[0]}-{values[2]}")
def finished(request, once) -> tuple[str, int, int, dict]:
    return *request.param, once("08 context", finish, *request.param)


def one_process(shape: str, seq_len: int) -> list[float]:
    """Return the losses of plain training on the full batch."""
    net = weights.build("tiny", config_of(SHAPES[shape]), seed=0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    losses = []
    batches = [
        tensor.split(4) for tensor in stdlib_text.one_batch(4 * STEPS, seq_len, torch.device("cpu"))
    ]
    for inputs, targets in zip(*batches, strict=True):
        targets[0, 3 * (seq_len + 1) // 4 :] = -100
        loss = net(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_every_variant_trains_as_one_process_does(finished):
    shape, seq_len, n, summary = finished
    expected = one_process(shape, seq_len)
    assert summary["world_size"] == n
    assert {row["name"] for row in summary["rows"]} >= NAMES
    for row in summary["rows"]:
        assert row["losses"] == pytest.approx(expected, rel=1e-5)
        assert row["gradient_error"] < 1e-5
    assert (summary["first_loss"], summary["last_loss"]) == pytest.approx(
        (expected[0], expected[-1]), rel=1e-5
    )
    assert expected[-1] < expected[0]
    assert summary["tokens"] == STEPS * 4 * seq_len


def test_bytes_and_scores_are_exact(finished):
    shape, seq_len, n, summary = finished
    config = config_of(SHAPES[shape])
    layers = config.num_hidden_layers
    tokens = 4 * seq_len // n
    # What a rank holds of one layer, in bytes.
    queries = 4 * tokens * config.num_attention_heads * config.head_dim
    keys_values = 2 * 4 * tokens * config.num_key_value_heads * config.head_dim
    expected = {
        "one process": 0,
        # keys and values make n - 1 hops in each pass, their gradients n
        "ring, contiguous": (3 * n - 2) * keys_values,
        "ring, zigzag": (3 * n - 2) * keys_values,
        # the keys and values, and a reduce-scatter of their gradients
        "all-gather": 2 * (n - 1) * keys_values,
        # queries and outputs go, and come back
        "Ulysses": 2 * (n - 1) / n * (2 * queries + keys_values),
    }
    rows = {row["name"]: row for row in summary["rows"]}
    for name, sent_bytes in expected.items():
        assert rows[name]["sent_bytes"] == layers * sent_bytes

    chunk = seq_len // (2 * n)
    contiguous = [(4 * rank + 3) * chunk**2 for rank in range(n)]
    assert rows["ring, contiguous"]["scores_of_each_rank"] == contiguous
    assert rows["ring, zigzag"]["scores_of_each_rank"] == [(2 * n + 1) * chunk**2] * n


def test_what_a_rank_keeps_for_backward(finished):
    """The ring keeps 1/N. The all-gather also keeps the keys and values of all other ranks."""
    shape, seq_len, n, summary = finished
    config = config_of(SHAPES[shape])
    tokens = 4 * seq_len // n
    kept = {row["name"]: row["kept_bytes_per_rank"] for row in summary["rows"]}
    ring = kept["ring, zigzag"]
    assert kept["ring, contiguous"] == ring
    assert kept["one process"] / n == pytest.approx(ring, abs=200)
    queries = 4 * tokens * config.num_attention_heads * config.head_dim
    keys_values = 8 * tokens * config.num_key_value_heads * config.head_dim
    assert kept["Ulysses"] >= ring + config.num_hidden_layers * queries  # its output is a copy
    assert kept["all-gather"] >= ring + config.num_hidden_layers * (n - 1) * keys_values


def test_the_table_shows_what_sums_in_bf16_lose(finished):
    """With sums in fp32 more blocks make no larger error. With sums in bf16 they do."""
    *_, summary = finished
    rows = {(row["blocks"], row["sums"]): row for row in summary["bf16_rows"]}
    for key in ("output_error", "gradient_error"):
        for blocks in (1, 8, 64):
            assert rows[blocks, "fp32"][key] < 0.006
        assert rows[64, "bf16"][key] > 0.04


RING = 16  # ranks of a ring that one process computes


class FakeHop:
    """A hop in which nobody else sends: blocks of keys come from a list, gradients arrive as 0."""

    blocks: ClassVar[list[torch.Tensor]] = []  # of the ranks before this one, the nearest first
    gradient_dtypes: ClassVar[list[torch.dtype]] = []

    def __init__(self, leaving: torch.Tensor) -> None:
        is_gradient = not any(leaving is block for block in self.blocks)
        if is_gradient:
            self.gradient_dtypes.append(leaving.dtype)
            self.arriving = torch.zeros_like(leaving)
        else:
            assert leaving.dtype == torch.bfloat16  # keys and values travel as they are
            number = [block is leaving for block in self.blocks].index(True)
            self.arriving = self.blocks[number + 1]

    def wait(self) -> torch.Tensor:
        return self.arriving


def test_the_ring_sums_in_fp32_in_a_bf16_model(monkeypatch):
    """The last rank sees all blocks. Its sums are fp32, and what it returns is bf16."""
    script = load(SCRIPT)
    monkeypatch.setattr(script.dist, "get_world_size", lambda: RING)
    monkeypatch.setattr(script.dist, "get_rank", lambda: RING - 1)
    monkeypatch.setattr(script, "Hop", FakeHop)
    generator = torch.Generator().manual_seed(0)
    tokens = 32  # of a rank
    q = torch.randn(1, 2, 1, tokens, 64, generator=generator).bfloat16().requires_grad_()
    kv = torch.randn(2, 1, 2, RING * tokens, 64, generator=generator).bfloat16()
    *others, mine = [block.clone() for block in kv.split(tokens, dim=-2)]
    mine.requires_grad_()
    FakeHop.blocks = [mine, *reversed(others)]
    FakeHop.gradient_dtypes.clear()
    out = script.RingAttention.apply(q, mine, "contiguous")
    out_gradient = torch.randn(out.shape, generator=generator).bfloat16()
    saved_mine = next(t for t in out.grad_fn.saved_tensors if t.shape == mine.shape)
    FakeHop.blocks[0] = saved_mine
    out.backward(out_gradient)

    exact_q = q.detach().double().requires_grad_()
    mask = torch.ones(tokens, RING * tokens, dtype=torch.bool).tril(RING * tokens - tokens)
    k, v = kv.double()
    exact = F.scaled_dot_product_attention(exact_q.squeeze(2), k, v, attn_mask=mask).unsqueeze(2)
    exact.backward(out_gradient.double())
    for found, expected in ((out, exact), (q.grad, exact_q.grad)):
        assert found.dtype == torch.bfloat16
        assert (found - expected).norm() < 0.007 * expected.norm()
    assert FakeHop.gradient_dtypes == [torch.float32] * RING
    assert mine.grad.dtype == torch.bfloat16


REFUSED = {  # number of ranks, flags: words of the line
    (None, "--seq-len 14"): "",
    (None, "--seq-len 2"): "",  # shorter than the four chunks of two ranks
    (2, "--attention ulysses --seq-len 16"): "--attention ulysses 2 3",
    (None, "--seq-len 68"): "",
    (None, "--attention flash"): "",
    (None, "--json no/such/file.json"): "",
}


def test_bad_input_is_refused_in_one_line(tmp_path):
    for (nproc, flags), words in REFUSED.items():
        result = start(tmp_path, "odd", *flags.split(), nproc=nproc)
        assert_refused(result, *(words or flags).split())


@pytest.mark.full
def test_what_the_heads_do_not_allow_is_left_out(tmp_path):
    result = start(tmp_path, "odd", "--seq-len", 16, "--steps", 1, nproc=2)
    assert result.code == 0, result.err[-2000:]
    names = {
        row["name"] for row in json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))["rows"]
    }
    assert "Ulysses" not in names
    assert names >= NAMES - {"Ulysses"}


FAULTS = {  # a line, and what stands in its place
    "gradients are averaged over the ranks": (
        "    dist.all_reduce(flat)",
        "    dist.all_reduce(flat)\n    flat /= dist.get_world_size()",
    ),
    "the gradient of a block stays where it was found": (
        "kv_gradient += gradient_hop.wait()",
        "gradient_hop.wait()",
    ),
    "a block travels twice": (
        "                kv = kv_hop.wait()\n        out = out.to",
        "                kv = kv_hop.wait()\n                Hop(kv).wait()\n        out = out.to",
    ),
    "the ring keeps more than its part": (
        "        ctx.order = order\n",
        "        ctx.order = order\n        ctx.kept = q.repeat(8, 1, 1, 1, 1)\n",
    ),
    "torch gets positions that start at 0 on every rank": (
        "        yield tuple(buffers)\n",
        "        buffers[2] = torch.arange(buffers[2].shape[1]).expand_as(buffers[2])\n"
        "        yield tuple(buffers)\n",
    ),
}
OFTEN_PLANTED = "the gradient of a block stays where it was found"


@pytest.mark.full
@pytest.mark.parametrize(
    "fault", [OFTEN_PLANTED, *(in_long(fault) for fault in FAULTS if fault != OFTEN_PLANTED)]
)
def test_a_wrong_version_fails_its_own_check(tmp_path, fault):
    script = str(with_fault(SCRIPT, tmp_path, *FAULTS[fault]))
    result = start(tmp_path, "four", "--seq-len", 16, "--steps", 2, nproc=2, script=script)
    assert (result.code, "AssertionError" in result.err) == (1, True), result.err[-3000:]
