"""07_memory_tricks/cuda_graphs.py: a step that can be captured, and what is compared with it."""

import json

import pytest
from support.harness import ODD, assert_refused, run

SCRIPT = "07_memory_tricks/cuda_graphs.py"
TIED = {**ODD, "vocab_size": 97, "num_key_value_heads": 6, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("dtype", "shape"), [("fp32", ODD), ("bf16", TIED)], ids=["fp32", "bf16-tied"]
)
def test_the_tiny_model_runs_the_same_operators(tmp_path, dtype, shape):
    (tmp_path / "odd.json").write_text(json.dumps(shape), encoding="utf-8")
    flags = [
        "--model",
        "odd.json",
        "--seq-len",
        7,
        "--micro-batch-sizes",
        "3,1",
        "--dtype",
        dtype,
        "--rounds",
        2,
    ]
    result = run(SCRIPT, tmp_path, *flags, "--device", "cpu", "--json", "summary.json")
    assert result.code == 0, result.err
    rows = result.summary["rows"]
    for tokens in (7, 21):
        eager, tiny = [row["operators"] for row in rows if row["tokens"] == tokens]
        assert eager == tiny > 100
    assert result.summary["losses"] is None  # nothing is captured on a CPU


REFUSED = {
    "--micro-batch-sizes 1,0": "",
    "--micro-batch-sizes=": "--micro-batch-sizes",
    "--seq-len 5000": "",
}


def test_bad_input_is_refused_in_one_line(tmp_path):
    for flags, words in REFUSED.items():
        assert_refused(
            run(SCRIPT, tmp_path, "--device", "cpu", *flags.split()), *(words or flags).split()
        )


@pytest.mark.gpu(n=1)
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-4), ("bf16", 1e-2)])
def test_gpu_replayed_losses_are_eagers(gpu_run, tmp_path, dtype, tolerance):
    sizes = ("--seq-len", 64, "--micro-batch-sizes", "1,4,16")
    flags = ("--device", "cuda", "--dtype", dtype, "--json", "summary.json")
    result = gpu_run(SCRIPT, tmp_path, *sizes, *flags)
    assert result.code == 0, result.err[-3000:]
    eager, replayed = result.summary["losses"]
    assert replayed == pytest.approx(eager, rel=tolerance)
    assert len(set(replayed)) == len(replayed)  # each replay saw its own batch
    assert "replayed" in {row["name"] for row in result.summary["rows"]}
