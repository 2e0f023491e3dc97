"""07_memory_tricks/cuda_graphs.py: a step that can be captured, and what is compared with it."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.chapter import load
from support.harness import ODD, ROOT, config_of, run

graphs = load("07_memory_tricks/cuda_graphs.py")

CPU = torch.device("cpu")
TIED = {**ODD, "vocab_size": 97, "num_key_value_heads": 6, "tie_word_embeddings": True}


def training(shape: dict):
    config = config_of(shape)
    return config, graphs.make_training(config, CPU)


def finish(folder: Path, dtype: str, shape: str) -> dict:
    (folder / "odd.json").write_text(json.dumps({"untied": ODD, "tied": TIED}[shape]))
    flags = ["--model", "odd.json", "--seq-len", 7, "--micro-batch-sizes", "3,1", "--dtype", dtype, "--rounds", 2]
    result = run("07_memory_tricks/cuda_graphs.py", folder, *flags, "--device", "cpu", "--json", "summary.json")
    assert result.code == 0, result.err
    assert "checked: the tiny model runs as many operators" in result.out
    assert "left out: capture and replay" in result.out
    return result.summary


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", ["untied", "tied"])
def test_the_tiny_model_runs_the_same_operators(once, shape, dtype):
    summary = once("07 cuda graphs", finish, dtype, shape)
    rows = summary["rows"]
    assert [row["tokens"] for row in rows] == [7, 7, 21, 21]
    assert len({row["operators"] for row in rows}) == 1
    assert rows[0]["operators"] > 100
    assert all(row["n"] == 2 for row in rows)
    assert summary["losses"] is None


def test_a_claim_that_does_not_hold_fails(once):
    rows = copy.deepcopy(once("07 cuda graphs", finish, "fp32", "untied")["rows"])
    graphs.check(rows, ([5.0, 4.0], [5.0, 4.0001]), "fp32")
    with pytest.raises(AssertionError, match="replayed losses differ"):
        graphs.check(rows, ([5.0, 4.0], [5.0, 4.001]), "fp32")
    rows[1]["operators"] += 1
    with pytest.raises(AssertionError, match="the tiny model runs other operators"):
        graphs.check(rows, None, "fp32")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_step_reads_no_number(monkeypatch, dtype):
    """Captured, it would end in an error."""
    config, (net, optimizer) = training(ODD)
    batch = graphs.random_batch(config, 2, 9, CPU)
    graphs.training_step(net, optimizer, batch, dtype)
    with monkeypatch.context() as patch:
        for reader in ("item", "tolist", "cpu", "__bool__", "__float__", "__int__", "numpy"):
            patch.setattr(torch.Tensor, reader, lambda *_: pytest.fail("a number was read"))
        loss = graphs.training_step(net, optimizer, batch, dtype)
    assert loss.requires_grad is False


def test_a_replay_is_given_its_batch_and_keeps_its_loss():
    """With a stand-in for the graph, which runs the step on the static tensors as CUDA would."""
    config, (eager_net, eager_optimizer) = training(ODD)
    batches = [graphs.random_batch(config, 2, 9, CPU) for _ in range(3)]
    eager = [graphs.training_step(eager_net, eager_optimizer, batch, "fp32") for batch in batches]

    _, (net, optimizer) = training(ODD)
    static_batch = [tensor.clone() for tensor in batches[0]]
    static_loss = torch.zeros(())

    class Graph:
        def replay(self) -> None:
            static_loss.copy_(graphs.training_step(net, optimizer, static_batch, "fp32"))

    replayed = [graphs.replay(Graph(), static_batch, static_loss, batch) for batch in batches]
    assert torch.equal(torch.stack(replayed), torch.stack(eager))
    assert len(set(torch.stack(eager).tolist())) == 3


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--micro-batch-sizes", "1,0"], "--micro-batch-sizes"),
        (["--micro-batch-sizes", ""], "--micro-batch-sizes"),
        (["--seq-len", "5000"], "--seq-len 5000"),
    ],
)
def test_wrong_flags_are_one_line(tmp_path, flags, word):
    result = run("07_memory_tricks/cuda_graphs.py", tmp_path, "--device", "cpu", *flags)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert word in result.err


@pytest.mark.gpu(n=1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gpu_replayed_losses_are_eagers(gpus, tmp_path, dtype):
    command = [sys.executable, "07_memory_tricks/cuda_graphs.py", "--device", "cuda", "--dtype", dtype]
    command += ["--json", str(tmp_path / "g.json")]
    result = subprocess.run(command, cwd=ROOT, env=gpus, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    summary = json.loads((tmp_path / "g.json").read_text())
    eager, replayed = summary["losses"]
    assert replayed == pytest.approx(eager, rel=graphs.TOLERANCE[dtype])
    assert len(set(replayed)) == graphs.COMPARED_STEPS  # each replay saw its own batch
    assert [row["name"] for row in summary["rows"]].count("replayed") == 3
