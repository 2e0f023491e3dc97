"""Inference on a GPU: 09_inference/infer_70b.py and quantized.py give the tokens of a CPU.

pytest -m gpu tests/test_09_gpu.py
"""

from pathlib import Path

import pytest
from support.checkpoints import write_folder
from support.harness import TINY, config_of, run

QUANTIZED, INFER = "09_inference/quantized.py", "09_inference/infer_70b.py"
# In 16 bits another order of sums rounds differently. After these prompts the likeliest of the eight tokens is each
# time ahead by 0.28 of the logits' standard deviation or more: far more than that.
PROMPTS = {"bf16": "kmeyuin", "int8": "kmeyuin", "int4": "bzwhwqe"}

pytestmark = [pytest.mark.gpu(n=1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "random"
    write_folder(folder, config_of({**TINY, "hidden_size": 64, "intermediate_size": 160}), scale=4)
    return folder


def answer(script: str, where: Path, run, device: str, *flags, nproc: int | None = None) -> dict:
    flags = [*flags, "--max-new-tokens", 8, "--device", device, "--json", "summary.json"]
    result = run(script, where, *flags, nproc=nproc)
    assert result.code == 0, result
    return result.summary


@pytest.mark.parametrize(("script", "nproc"), [(QUANTIZED, None), (INFER, None), (INFER, 1)])
def test_fp32_tokens_are_those_of_a_cpu(tmp_path, gpu_run, folder, script, nproc):
    """The script compares them with transformers' on the CPU."""
    summary = answer(
        script, tmp_path, gpu_run, "cuda", "--model", folder, "--dtype", "fp32", nproc=nproc
    )
    assert any("transformers" in line for line in summary["checked"])


def test_all_kinds_of_weights(tmp_path, gpu_run, folder):
    on_gpu = answer(QUANTIZED, tmp_path / "gpu", gpu_run, "cuda", "--model", folder)["rows"]
    on_cpu = answer(QUANTIZED, tmp_path / "cpu", run, "cpu", "--model", folder)["rows"]
    for gpu, cpu in zip(on_gpu, on_cpu, strict=True):
        assert gpu["weight_bytes"] == cpu["weight_bytes"]
        assert gpu["logits_relative_error"] == pytest.approx(cpu["logits_relative_error"], rel=0.5)


@pytest.mark.parametrize("weights", PROMPTS)
def test_the_compiled_step_gives_the_same_tokens(tmp_path, gpu_run, folder, weights):
    """Fused, and from the third step on replayed as a CUDA graph."""
    shared = ["--model", folder, "--weights", weights, "--prompt", PROMPTS[weights]]
    plain, compiled = (
        answer(QUANTIZED, tmp_path, gpu_run, "cuda", *shared, *more) for more in ([], ["--compile"])
    )
    assert compiled["dtype"] == "bf16"
    assert compiled["token_ids"] == plain["token_ids"]
