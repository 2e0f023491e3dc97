"""07_memory_tricks/memory_profile.py against the allocator's own count."""

import json

import pytest
from support.harness import ODD, assert_refused, run

SCRIPT = "07_memory_tricks/memory_profile.py"


def test_the_script(tmp_path):
    (tmp_path / "odd.json").write_text(json.dumps(ODD), encoding="utf-8")
    flags = ["--model", "odd.json", "--seq-len", 19, "--micro-batch-size", 3, "--device", "cpu"]
    result = run(SCRIPT, tmp_path, *flags, "--json", "summary.json")
    assert result.code == 0, result.err
    summary = result.summary
    rows = {row["name"]: row for row in summary["rows"]}
    numbers = summary["parameters"]
    assert (
        rows["parameters"]["end of backward bytes"]
        == rows["gradients"]["end of backward bytes"]
        == 4 * numbers
    )
    total = {moment: size for moment, size in rows["all"].items() if moment != "name"}
    assert (
        summary["total_bytes"]
        == total[f"peak, in {summary['peak_phase']} bytes"]
        == max(total.values())
    )
    by_module = [
        row["end of forward bytes"] for name, row in rows.items() if name.startswith("in ")
    ]
    assert sum(by_module) == total["end of forward bytes"]
    # each of three in each of three layers has AdamW's two moments and its count of steps, too
    matrix = 4 * 36 * 52
    assert rows["in model.layers.*.mlp"]["before the step bytes"] == 3 * 3 * (3 * matrix + 4)
    assert rows["activations"]["end of forward bytes"] == summary["activation_bytes"]


def test_bad_input_is_refused_in_one_line(tmp_path):
    for flags in (
        "--model llama-9b",
        "--micro-batch-size 0",
        "--seq-len 5000",
        "--dtype fp8",
    ):
        assert_refused(run(SCRIPT, tmp_path, *flags.split(), "--device", "cpu"), *flags.split())


@pytest.mark.gpu(n=1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gpu_tensors_and_libraries_are_what_is_allocated(gpu_run, tmp_path, dtype):
    flags = ("--device", "cuda", "--dtype", dtype, "--json", "summary.json")
    result = gpu_run(SCRIPT, tmp_path, *flags)
    assert result.code == 0, result.err[-3000:]
    assert (tmp_path / "runs/memory_snapshot.pickle").stat().st_size > 0
    summary = result.summary
    (row,) = (row for row in summary["rows"] if row["name"] == "libraries")
    libraries = {size for moment, size in row.items() if moment != "name"}
    assert len(libraries) == 1  # workspaces were made in the first step, and stay
    assert libraries.pop() < 200 * 2**20
    # blocks are rounded up to 512 bytes, and what operators free before they return counts in the peak only
    assert summary["total_bytes"] <= summary["peak_memory_bytes"] < 1.2 * summary["total_bytes"]
