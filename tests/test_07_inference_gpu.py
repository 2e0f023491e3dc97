"""Inference on a GPU, asked of the real scripts: quantized_inference.py and infer_70b.py of chapters 07 and 06.

pytest -m gpu tests/test_07_inference_gpu.py
"""

from pathlib import Path

import pytest
from support.checkpoints import write_folder
from support.harness import TINY, Result, config_of, run

QUANTIZED, INFER = "07_memory_tricks/quantized_inference.py", "06_fsdp_zero/infer_70b.py"
SHAPE = {**TINY, "hidden_size": 64, "intermediate_size": 160}
NEW_TOKENS = 8
# In 16 bits a fused product rounds differently. After these prompts the likeliest of the eight tokens is each time
# ahead by 0.28 of the logits' standard deviation or more: far more than that.
PROMPTS = {"bf16": "kmeyuin", "int8": "kmeyuin", "int4": "bzwhwqe"}

pytestmark = [
    pytest.mark.gpu(n=1),
]


def infer(script: str, where: Path, gpus: dict[str, str], device: str, *flags, nproc: int | None = None) -> Result:
    visible = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"], "OMP_NUM_THREADS": "4"}
    flags = [*flags, "--device", device, "--json", "summary.json"]
    result = run(script, where, *flags, nproc=nproc, warm=False, **visible)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-3000:]}"
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "random"
    write_folder(folder, config_of(SHAPE), scale=4)
    return folder


def test_all_schemes_in_turn(tmp_path, gpus):
    write_folder(tmp_path / "random", config_of(SHAPE))  # of --model nano each device draws weights of its own
    found = infer(QUANTIZED, tmp_path, gpus, "cuda", "--model", "random", "--weights", "all").summary
    schemes = {row["weights"]: row for row in found["schemes"]}
    assert set(schemes) - {"fp8"} == {"fp32", "bf16", "int8", "int4"}  # fp8: where the GPU has units for it
    for weights, row in schemes.items():
        assert row["new_tokens"] == 32
        assert row["decode_tokens_per_second"] > 0
        assert weights == "fp32" or 0 < row["logits_relative_error"] < 1
    on_cpu = infer(QUANTIZED, tmp_path, gpus, "cpu", "--model", "random", "--weights", "fp32").summary
    assert schemes["fp32"]["token_ids"] == on_cpu["token_ids"]


@pytest.mark.parametrize("weights", PROMPTS)
def test_the_compiled_step_gives_the_same_tokens(tmp_path, gpus, folder, weights):
    """Fused, and from the third step on replayed as a CUDA graph; in bf16, which int4's product on a GPU takes."""
    shared = ["--model", folder, "--weights", weights, "--prompt", PROMPTS[weights], "--max-new-tokens", NEW_TOKENS]
    plain, compiled = (
        infer(QUANTIZED, tmp_path, gpus, "cuda", *shared, *flags).summary for flags in ([], ["--compile"])
    )
    assert compiled["compiled"]
    assert compiled["dtype"] == "bf16"
    assert len(compiled["token_ids"][0]) == NEW_TOKENS
    assert compiled["token_ids"] == plain["token_ids"]


@pytest.mark.parametrize("nproc", [None, 1])
def test_one_gpu_gives_the_tokens_of_a_cpu(tmp_path, gpus, nproc):
    shared = ["--model", "nano", "--dtype", "fp32"]
    on_cpu = infer(INFER, tmp_path / "cpu", gpus, "cpu", *shared)
    on_gpu = infer(INFER, tmp_path / "gpu", gpus, "cuda", *shared, nproc=nproc)
    assert on_gpu.summary["world_size"] == 1
    assert on_gpu.summary["token_ids"] == on_cpu.summary["token_ids"]
    assert "checked: prompt and answer read at once give the last token again" in on_gpu.out
