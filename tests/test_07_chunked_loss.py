"""07_memory_tricks/chunked_loss.py: the loss and gradients of the plain one, in a fraction of its memory."""

from pathlib import Path

import pytest
import torch.nn.functional as F
from support.harness import assert_refused, needs_compiler, run

SCRIPT = "07_memory_tricks/chunked_loss.py"
SMALL = (
    "--device",
    "cpu",
    "--tokens",
    65,
    "--vocab-size",
    5003,
    "--chunk-tokens",
    8,
    "--hidden-size",
    33,
)


def finish(folder: Path, *flags, **how) -> tuple[dict, dict[str, dict]]:
    """The summary, and its rows by name. By its own checks each loss and its gradients are those of the plain one."""
    result = run(SCRIPT, folder, *flags, "--json", "summary.json", **how)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    return result.summary, {row["name"]: row for row in result.summary["rows"]}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_script_tells_what_each_loss_takes(tmp_path, dtype):
    # no g++ there: compiling takes longer than all else
    summary, rows = finish(tmp_path, *SMALL, "--dtype", dtype, "--rounds", 2, PATH="/nowhere")
    assert "plain, compiled" not in rows
    plain = rows["plain"]
    assert plain["step_bytes"] == pytest.approx(12 * 65 * 5003, rel=0.01)
    assert rows["chunked, by hand"]["step_bytes"] < plain["step_bytes"] / 2
    assert summary["parameters"] == 5003 * 33
    assert plain["gradient_bytes"] == (65 + 5003) * 33 * (4 if dtype == "fp32" else 2)
    # torch 2.13 has it, and chunks only with options
    if dtype == "fp32" and hasattr(F, "linear_cross_entropy"):
        assert rows["torch, no options"]["step_bytes"] == pytest.approx(
            plain["step_bytes"], rel=0.01
        )
        assert rows["torch, chunked"]["step_bytes"] < plain["step_bytes"] / 2


@needs_compiler
@pytest.mark.full
def test_the_compiled_loss_is_told_too(tmp_path):
    _, rows = finish(tmp_path, *SMALL, warm=False)
    assert rows["plain, compiled"]["step_bytes"] < rows["plain"]["step_bytes"]


def test_a_loss_of_one_number(tmp_path):
    sizes = ("--tokens", 1, "--hidden-size", 1, "--vocab-size", 1)
    finish(tmp_path, *sizes, "--rounds", 1, "--device", "cpu", PATH="/nowhere")


def test_bad_input_is_refused_in_one_line(tmp_path):
    for flags in (
        "--tokens 0",
        "--dtype fp16",
        "--chunk-tokens x",
        "--json no/such/f.json",
    ):
        assert_refused(run(SCRIPT, tmp_path, *flags.split()), *flags.split())


@pytest.mark.gpu(n=1)
def test_a_fifteenth_of_the_memory_on_a_gpu(gpu_run, tmp_path):
    """By max_memory_allocated, at the vocabulary of Llama 3 and the hidden size of llama-1b; plain takes 26 GiB."""
    sizes = ("--tokens", 16_384, "--hidden-size", 2048, "--chunk-tokens", 512, "--dtype", "bf16")
    result = gpu_run(SCRIPT, tmp_path, "--device", "cuda", *sizes, "--json", "summary.json")
    if "out of memory" in result.err:
        pytest.skip("the plain loss takes 26 GiB here")
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    rows = {row["name"]: row for row in result.summary["rows"]}
    assert rows["chunked, by hand"]["step_bytes"] * 15 <= rows["plain"]["step_bytes"]
    # though the count began anew for each way
    assert result.summary["peak_memory_bytes"] >= rows["plain"]["step_bytes"]
