"""08_model_parallel/tensor_parallel.py: each variant trains as one process does."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.chapter import load
from support.harness import Result, assert_refused, config_of, in_full, in_long, run, with_fault

from lm import stdlib_text, weights

SCRIPT = "08_model_parallel/tensor_parallel.py"
STEPS = 6
MICRO_BATCHES = 2  # per step
SEQUENCES = 2  # per micro-batch
LENGTH = 24
FLAGS = [
    *("--model", "tiny.json"),
    *("--device", "cpu"),
    *("--seq-len", LENGTH),
    *("--global-batch-size", MICRO_BATCHES * SEQUENCES),
    *("--micro-batch-size", SEQUENCES),
    *("--steps", STEPS),
    *("--json", "s.json"),
]

SHAPES = {
    # The ranks divide neither channels nor vocabulary. Of 50 channels, 4 ranks have 13, 13, 12, 12
    # by hand, and 13, 13, 13, 11 by torch.
    "grouped": {
        "model_type": "llama",
        "vocab_size": 261,
        "hidden_size": 48,
        "intermediate_size": 50,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32,
        "tie_word_embeddings": True,
    },
    "untied": {
        "model_type": "llama",
        "vocab_size": 257,
        "hidden_size": 36,
        "intermediate_size": 52,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "max_position_embeddings": 32,
        "tie_word_embeddings": False,
    },
}
BY_HAND = "by hand"
BY_HAND_IN_SEQUENCE = "by hand, sequence parallel"
BY_TORCH = "by torch, sequence parallel"
PARALLEL = [BY_HAND, BY_HAND_IN_SEQUENCE, BY_TORCH]
CASES = [
    pytest.param("grouped", 2, id="grouped-2"),
    in_long("grouped", 4, id="grouped-4"),
    in_full("untied", 3, id="untied-3"),
]


def start(
    folder: Path, shape: str, nproc: int | None, *flags: object, script: str = SCRIPT
) -> Result:
    """Run the script in `folder` on a model of that shape."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.json").write_text(json.dumps(SHAPES[shape]), encoding="utf-8")
    return run(script, folder, *FLAGS, *flags, nproc=nproc)


def finish(folder: Path, shape: str, nproc: int) -> dict:
    """Run the script to its end, and return its summary."""
    result = start(folder, shape, nproc)
    assert result.code == 0, result
    return json.loads((folder / "s.json").read_text(encoding="utf-8"))


def rows_by_name(summary: dict) -> dict[str, dict]:
    """Return the rows of a summary by variant."""
    return {row["name"]: row for row in summary["rows"]}


def build(shape: str) -> torch.nn.Module:
    """Return the model on one process."""
    return weights.build("tiny", config_of(SHAPES[shape]), seed=0)


def train_one_process(shape: str) -> tuple[list[float], list[float]]:
    """Train with plain SGD and clipping on full batches; return losses and gradient norms."""
    model = build(shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batch_size = MICRO_BATCHES * SEQUENCES
    all_inputs, all_targets = stdlib_text.one_batch(STEPS * batch_size, LENGTH, torch.device("cpu"))
    batches = zip(all_inputs.split(batch_size), all_targets.split(batch_size), strict=True)
    losses = []
    norms = []
    for inputs, targets in batches:
        loss = model(inputs, targets)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize(("shape", "nproc"), CASES)
def test_each_variant_trains_as_one_process_does(once, shape, nproc):
    summary = once("08 tensor", finish, shape, nproc)
    losses, norms = train_one_process(shape)
    assert losses[-1] < losses[0]
    assert max(norms) > 1  # otherwise clipping was not tested
    assert summary["world_size"] == nproc
    rows = rows_by_name(summary)
    assert rows.keys() >= set(PARALLEL)
    for name, row in rows.items():
        assert row["losses"] == pytest.approx(losses, rel=1e-5), name
        assert row["gradient_norms"] == pytest.approx(norms, rel=1e-5), name
        assert max(row["gradient_errors"]) < 1e-5, name
    assert rows[BY_TORCH]["difference_from_by_hand"] < 1e-5


@pytest.mark.parametrize(("shape", "nproc"), CASES)
def test_a_rank_holds_and_sends_what_it_must(once, shape, nproc):
    """Each pair of matrices has two collectives, and so have embedding and head together.

    An all-reduce sends as much as a reduce-scatter and an all-gather.
    """
    rows = rows_by_name(once("08 tensor", finish, shape, nproc))
    layers = SHAPES[shape]["num_hidden_layers"]
    hidden_size = SHAPES[shape]["hidden_size"]
    pairs = 2 * layers + 1
    tokens = SEQUENCES * LENGTH
    calls = 2 * pairs * MICRO_BATCHES
    numbers = calls * tokens * hidden_size
    numbers += MICRO_BATCHES * 3 * tokens  # the loss needs three numbers per token
    sent_bytes = round(4 * numbers * 2 * (nproc - 1) / nproc)

    parameters = sum(parameter.numel() for parameter in build(shape).parameters())
    parameters += (nproc - 1) * pairs * hidden_size  # every rank has all weights of norms
    # Norms and residuals are kept in full by hand, and by tokens in sequence parallelism.
    kept = {name: row["kept_bytes_per_rank"] for name, row in rows.items()}
    assert kept["one process"] > kept[BY_HAND] > kept[BY_HAND_IN_SEQUENCE]
    assert kept[BY_HAND] > kept[BY_TORCH]
    for name in PARALLEL:
        assert sum(rows[name]["parameters_per_rank"]) == parameters
        assert rows[name]["sent_bytes"] == sent_bytes
    assert rows[BY_HAND]["calls"] == {"all_reduces": calls + 2 * MICRO_BATCHES}
    assert rows[BY_HAND_IN_SEQUENCE]["calls"] == {
        "all_reduces": 2 * MICRO_BATCHES,
        "reduce_scatters": calls,
        "all_gathers": calls,
    }


def test_the_loss_of_a_bf16_model_is_fp32(once):
    """Compare the loss by hand with the exact one: on one rank, and in the table of two."""
    script = load(SCRIPT)
    model = build("untied").bfloat16()
    inputs, targets = stdlib_text.one_batch(4, LENGTH, torch.device("cpu"))
    exact = torch.nn.functional.cross_entropy(
        model(inputs).double().flatten(0, 1), targets.flatten()
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        script.parallelize(model, script.Copy, script.Reduce)
        loss = script.parallel_loss(model, script.Copy, inputs, targets)
    finally:
        dist.destroy_process_group()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)

    for row in once("08 tensor", finish, "grouped", 2)["bf16_rows"]:
        assert row["fp32_loss"] == pytest.approx(row["exact_loss"], rel=1e-6)
        assert row["bf16_loss"] != pytest.approx(row["exact_loss"], rel=5e-4)


@pytest.mark.parametrize("seq_len", [1, in_long(2)])
def test_gradients_that_are_nearly_zero(tmp_path, seq_len):
    """Attention to one token returns its value, so the gradients of q and k are rounding errors."""
    flags = ["--seq-len", seq_len, "--global-batch-size", 1, "--micro-batch-size", 1]
    result = start(tmp_path, "grouped", 1, *flags)
    assert result.code == 0, result


FAULTS = {  # what is wrong: a line of the script, and a wrong line
    "the backward of Copy sums nothing": (
        "        return all_reduce(grad)  # partial to replicate",
        "        return grad",
    ),
    "replicated weights count once per rank": (
        "norm = (sharded_square + replicated_square).sqrt()",
        "norm = (sharded_square + dist.get_world_size() * replicated_square).sqrt()",
    ),
    "a norm keeps the gradient of its own tokens": (
        "            gradient.copy_(total)",
        "            pass",
    ),
    "the largest logit is reduced twice": (
        "    dist.all_reduce(largest, op=dist.ReduceOp.MAX)",
        "    for _ in range(2): dist.all_reduce(largest, op=dist.ReduceOp.MAX)",
    ),
}
OFTEN_PLANTED = "the backward of Copy sums nothing"


@pytest.mark.full
@pytest.mark.parametrize(
    "fault", [OFTEN_PLANTED, *(in_long(fault) for fault in FAULTS if fault != OFTEN_PLANTED)]
)
def test_a_wrong_version_fails_its_own_check(tmp_path, fault):
    line, wrong = FAULTS[fault]
    script = str(with_fault(SCRIPT, tmp_path, line, wrong))
    result = start(tmp_path, "grouped", 2, "--steps", 3, script=script)
    assert result.code == 1, result
    assert "AssertionError" in result.err, result


REFUSED = [  # ranks, flags, words of the line
    (3, "--model tiny.json", "--model tiny.json 3 4"),
    (2, "--seq-len 23", "--seq-len 23"),
    (None, "--seq-len 31", "--seq-len 31"),
    (None, "--micro-batch-size 3", "--global-batch-size 4 --micro-batch-size 3"),
]


def test_bad_input_is_refused_in_one_line(tmp_path):
    for nproc, flags, words in REFUSED:
        assert_refused(start(tmp_path, "grouped", nproc, *flags.split()), *words.split())
