"""07_memory_tricks/memory_profile.py against the allocator's own count."""

import json
import subprocess
import sys

import pytest
from support.chapter import load
from support.harness import ODD, ROOT, run

memory_profile = load("07_memory_tricks/memory_profile.py")


def test_the_script(tmp_path):
    (tmp_path / "odd.json").write_text(json.dumps(ODD))
    flags = ["--model", "odd.json", "--seq-len", 19, "--micro-batch-size", 3, "--device", "cpu"]
    result = run("07_memory_tricks/memory_profile.py", tmp_path, *flags, "--json", "summary.json")
    assert result.code == 0, result.err
    assert result.out.count("checked: ") == 3
    assert "left out: the caching allocator's snapshot" in result.out
    summary = result.summary
    rows = {row["name"]: row for row in summary["rows"]}
    numbers = summary["parameters"]
    assert rows["parameters"]["end of backward bytes"] == rows["gradients"]["end of backward bytes"] == 4 * numbers
    total = {moment: size for moment, size in rows["all"].items() if moment != "name"}
    assert summary["total_bytes"] == total[f"peak, in {summary['peak_phase']} bytes"] == max(total.values())
    matrix = 4 * 36 * 52  # each of three in each of three layers has AdamW's two moments and its count of steps, too
    assert rows["in model.layers.*.mlp"]["before the step bytes"] == 3 * 3 * (3 * matrix + 4)
    assert rows["activations"]["end of forward bytes"] == summary["activation_bytes"]


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--model", "llama-9b"], "llama-9b"),
        (["--micro-batch-size", "0"], "--micro-batch-size"),
        (["--seq-len", "5000"], "--seq-len 5000"),
        (["--dtype", "fp8"], "fp8"),
    ],
)
def test_wrong_flags_are_one_line(tmp_path, flags, word):
    result = run("07_memory_tricks/memory_profile.py", tmp_path, "--device", "cpu", *flags)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert word in result.err


def blocks(*sizes_and_states) -> list[dict]:
    return [{"size": size, "state": state} for size, state in sizes_and_states]


# --- on a GPU


def on_gpu(gpus: dict[str, str], folder, *flags: str) -> dict:
    command = [sys.executable, "07_memory_tricks/memory_profile.py", "--device", "cuda", *flags]
    command += ["--json", str(folder / "p.json"), "--snapshot", str(folder / "p.pickle")]
    result = subprocess.run(command, cwd=ROOT, env=gpus, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("checked: ") == 3
    return json.loads((folder / "p.json").read_text())


@pytest.mark.gpu(n=1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gpu_tensors_and_libraries_are_what_is_allocated(gpus, tmp_path, dtype):
    summary = on_gpu(gpus, tmp_path, "--dtype", dtype)
    (row,) = (row for row in summary["rows"] if row["name"] == "libraries")
    libraries = {size for moment, size in row.items() if moment != "name"}
    assert len(libraries) == 1  # workspaces were made in the first step, and stay
    assert libraries.pop() < 200 * 2**20
    # blocks are rounded up to 512 bytes, and what operators free before they return counts in the peak only
    assert summary["total_bytes"] <= summary["peak_memory_bytes"] < 1.2 * summary["total_bytes"]
