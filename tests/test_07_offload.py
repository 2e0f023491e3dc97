"""07_memory_tricks/offload.py: what leaves comes back to the bit, once, and nothing else leaves."""

import json

import pytest
import torch
from support.chapter import load
from support.harness import ODD, ROOT, assert_refused, run

SCRIPT = "07_memory_tricks/offload.py"
script = load(SCRIPT)
FLAGS = ("--model", "odd.json", "--seq-len", 61, "--batch-size", 7, "--rounds", 1)
SHAPE = {**ODD, "vocab_size": 259, "hidden_size": 72, "head_dim": 12}


def rows_of(tmp_path, *flags, tied: bool = False, run=run) -> dict[str, dict]:
    (tmp_path / "odd.json").write_text(
        json.dumps({**SHAPE, "tie_word_embeddings": tied}), encoding="utf-8"
    )
    result = run(SCRIPT, tmp_path, *FLAGS, *flags, "--json", "summary.json")
    assert result.code == 0, result.err[-3000:]
    return {row["name"]: row for row in result.summary["rows"]}


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.full)])
def test_the_script(tmp_path, dtype):
    rows = rows_of(tmp_path, "--device", "cpu", "--dtype", dtype, tied=dtype == "bf16")
    nothing, overlapped = rows["nothing"], rows["activations, overlapped"]
    assert overlapped["gradient_relative_error"] == 0
    assert overlapped["losses"] == nothing["losses"]
    assert (
        nothing["after_forward_bytes"] - overlapped["after_forward_bytes"]
        == overlapped["copied_down_bytes"]
        > 0
    )
    assert overlapped["peak_bytes"] < nothing["peak_bytes"]
    assert (
        rows["activations, save_on_cpu"]["copied_down_bytes"]
        > 1.2 * overlapped["copied_down_bytes"]
    )


def test_what_is_written_over_is_another_piece():
    """x is saved, written over, and saved again: backward gets both contents."""
    weight = torch.full((8192,), 3.0, requires_grad=True)
    x = torch.arange(8192.0)
    hooks = script.Offload(torch.device("cpu"), [weight])
    with hooks:
        first = weight * x
        hooks.let_go(0)
        x.add_(1)
        total = (first + weight * x).sum()
    total.backward()
    assert torch.equal(weight.grad, 2 * torch.arange(8192.0) + 1)
    assert len(hooks.pieces) == 2


def test_what_is_written_over_while_it_leaves_is_an_error():
    weight = torch.full((8192,), 3.0, requires_grad=True)
    x = torch.arange(8192.0)
    hooks = script.Offload(torch.device("cpu"), [])
    hooks.__enter__()
    kept = weight * x
    x.add_(1)
    with pytest.raises(AssertionError, match="written over while it left"):
        hooks.__exit__(None, None, None)
    del kept


def test_bad_input_is_refused_in_one_line(tmp_path):
    for flags in (
        "--model llama-9b",
        "--seq-len 5000",
        "--rounds 0",
    ):
        assert_refused(run(SCRIPT, tmp_path, *flags.split(), "--device", "cpu"), *flags.split())


@pytest.mark.gpu(n=1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_on_a_gpu(gpu_run, tmp_path, dtype):
    flags = ("--device", "cuda", "--dtype", dtype, "--batch-size", 64)
    rows = rows_of(tmp_path, *flags, run=gpu_run)
    nothing, overlapped = rows["nothing"], rows["activations, overlapped"]
    assert nothing["peak_bytes"] - overlapped["peak_bytes"] > 0.5 * overlapped["copied_down_bytes"]


@pytest.mark.gpu(n=1)
def test_a_gpu_is_not_waited_for(gpu_run, tmp_path):
    """A copy that blocks the CPU would hide no time at all."""
    code = (
        "import torch, test_07_offload as t\n"
        "weight = torch.ones(2**20, requires_grad=True, device='cuda')\n"
        "hooks = t.script.Offload(torch.device('cuda', 0), [weight])\n"
        "for mode in ('default', 'error'):  # what is loaded or allocated once may wait\n"
        "    torch.cuda.set_sync_debug_mode(mode)\n"
        "    with hooks:\n"
        "        total = (weight.sin().exp() * weight.cos()).sum()\n"
        "    total.backward()\n"
    )
    (tmp_path / "script.py").write_text(code, encoding="utf-8")
    result = gpu_run(tmp_path / "script.py", tmp_path, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    assert result.code == 0, result
