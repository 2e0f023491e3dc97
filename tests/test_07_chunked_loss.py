"""07_memory_tricks/chunked_loss.py: the loss and gradients of the plain one, in a fraction of its memory."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.chapter import load
from support.harness import needs_compiler, run

SCRIPT = "07_memory_tricks/chunked_loss.py"
chunked = load(SCRIPT)
SMALL = ("--device", "cpu", "--tokens", 65, "--vocab-size", 5003, "--chunk-tokens", 8, "--hidden-size", 33)
needs_torchs_own = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13 has it")


def gradients(loss: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    for tensor in tensors:
        tensor.grad = None
    loss.backward()
    return [tensor.grad for tensor in tensors]


def finish(folder: Path, dtype: str) -> dict:
    flags = (*SMALL, "--dtype", dtype, "--rounds", 2, "--json", "c.json")
    result = run(SCRIPT, folder, *flags, PATH="/nowhere")  # no g++ there: compiling takes longer than all else
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    assert "left out: plain, compiled (torch.compile on a CPU needs g++" in result.out
    assert result.out.count("checked: ") == 3
    return json.loads((folder / "c.json").read_text())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_script_tells_what_each_loss_takes(once, dtype):
    summary = once("07 chunked loss", finish, dtype)
    rows = {row["name"]: row for row in summary["rows"]}
    plain, by_hand = rows["plain"], rows["chunked, by hand"]
    assert plain["step_bytes"] == pytest.approx(12 * 65 * 5003, rel=0.01)
    assert by_hand["step_bytes"] < plain["step_bytes"] / 2
    assert summary["parameters"] == 5003 * 33
    assert plain["gradient_bytes"] == (65 + 5003) * 33 * (4 if dtype == "fp32" else 2)


@needs_torchs_own
def test_torchs_own_is_chunked_only_with_options(once):
    rows = {row["name"]: row for row in once("07 chunked loss", finish, "fp32")["rows"]}
    assert rows["torch, no options"]["step_bytes"] == pytest.approx(rows["plain"]["step_bytes"], rel=0.01)
    assert rows["torch, chunked"]["step_bytes"] < rows["plain"]["step_bytes"] / 2


@needs_compiler
@pytest.mark.full
def test_the_compiled_loss_is_told_too(tmp_path):
    result = run(SCRIPT, tmp_path, *SMALL, "--json", "c.json", warm=False)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    rows = {row["name"]: row for row in json.loads((tmp_path / "c.json").read_text())["rows"]}
    assert rows["plain, compiled"]["step_bytes"] < rows["plain"]["step_bytes"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--tokens", 1, "--hidden-size", 1, "--vocab-size", 1), "checked: the plain loss takes"),
        (
            ("--tokens", 129, "--hidden-size", 513, "--vocab-size", 10007, "--chunk-tokens", 1000),
            "checked: the plain loss takes 4 (N V + N H + V H) = 24.8 MiB",
        ),
    ],
)
def test_other_sizes_are_told_with_their_formula(tmp_path, flags, told):
    result = run(SCRIPT, tmp_path, *flags, "--device", "cpu", "--rounds", 1, PATH="/nowhere")
    assert result.code == 0, result.err
    assert told in result.out


@pytest.mark.parametrize(
    ("flag", "value"), [("--tokens", "0"), ("--dtype", "fp16"), ("--chunk-tokens", "x"), ("--json", "no/such/f.json")]
)
def test_a_wrong_flag_is_one_line(tmp_path, flag, value):
    result = run(SCRIPT, tmp_path, flag, value)
    assert result.code == 2
    assert flag in result.err
    assert result.err.count("\n") == 1


@pytest.mark.gpu(n=1)
def test_a_fifteenth_of_the_memory_on_a_gpu(gpus, tmp_path):
    """By max_memory_allocated, at the vocabulary of Llama 3 and the hidden size of llama-1b; plain takes 26 GiB."""
    sizes = ("--tokens", 16_384, "--hidden-size", 2048, "--chunk-tokens", 512, "--dtype", "bf16")
    visible = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"], "OMP_NUM_THREADS": "4"}
    flags = ("--device", "cuda", *sizes, "--json", "c.json")
    result = run(SCRIPT, tmp_path, *flags, timeout=600, warm=False, **visible)
    if "out of memory" in result.err:
        pytest.skip("the plain loss takes 26 GiB here")
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    summary = json.loads((tmp_path / "c.json").read_text())
    rows = {row["name"]: row for row in summary["rows"]}
    assert rows["chunked, by hand"]["step_bytes"] * 15 <= rows["plain"]["step_bytes"]
    assert summary["peak_memory_bytes"] >= rows["plain"]["step_bytes"]  # though the count began anew for each way


# --- of the function that readers copy
