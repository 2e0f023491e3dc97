"""07_memory_tricks/cuda_graphs.py: a step that can be captured, and what is compared with it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.chapter import load
from support.harness import ODD, ROOT, run

graphs = load("07_memory_tricks/cuda_graphs.py")

TIED = {**ODD, "vocab_size": 97, "num_key_value_heads": 6, "tie_word_embeddings": True}


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
