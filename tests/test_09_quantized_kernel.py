"""09_inference/quantized.py --kernel triton: right in Triton's interpreter, fast code for sm_90."""

import importlib.util
import json
import subprocess
import sys

import pytest
from support import nogpu
from support.checkpoints import write_folder
from support.harness import ODD, ROOT, assert_refused, clean_env, config_of, run

SCRIPT = "09_inference/quantized.py"
SASS = ROOT / "tests/nogpu/matvec_sass.py"
INTERPRETED = ROOT / "tests/support/matvec_interpreted.py"
WITH_BIASES = {**ODD, "model_type": "qwen2", "vocab_size": 128, "num_hidden_layers": 1}

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def output_of(*argv, **env: str) -> list[str]:
    """Run a command to its end, and return the lines that it prints."""
    done = subprocess.run(
        list(map(str, argv)), capture_output=True, text=True, timeout=570, env=clean_env(**env)
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout.splitlines()


@needs_triton
def test_the_kernel_multiplies_as_the_dequantized_matrix():
    lines = output_of(sys.executable, INTERPRETED, TRITON_INTERPRET="1")
    assert len(lines) == 4
    assert all(line.startswith("checked:") for line in lines)


@needs_triton
@pytest.mark.long
def test_a_model_answers_with_the_kernel(tmp_path):
    """Biases and fused projections: the script compares logits with the dequantized weights."""
    write_folder(tmp_path / "model", config_of(WITH_BIASES), scale=4)
    flags = "--model model --kernel triton --max-new-tokens 2 --prompt abc --device cpu"
    result = run(
        SCRIPT,
        tmp_path,
        *flags.split(),
        "--json",
        "summary.json",
        timeout=570,
        warm=False,
        TRITON_INTERPRET="1",
    )
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-3000:]}"
    rows = {row["weights"]: row for row in result.summary["rows"]}
    assert list(rows) == ["fp32", "bf16", "int8", "int4"]
    for row in rows.values():
        assert row["weight_bytes"] == row["planned_weight_bytes"]


def check_machine_code(lines: list[str]) -> None:
    """Assert what makes the kernel fast. An estimate of its speed stands on these counts.

    Another version of Triton can choose layouts that it has to convert in the loop: then there are
    barriers. If it flushed subnormal numbers to zero, all products would be 0.
    """
    cases = [json.loads(line) for line in lines]
    assert len(cases) == 7
    for facts in cases:
        bits, tokens, *_ = facts["case"]
        assert facts["barriers"] == 0, facts
        assert facts["spilled_bytes"] == 0, facts
        assert facts["flush_subnormals"] == 0, facts
        # 8 rows of codes, and activations in int4 four times, in int8 twice
        assert facts["loads_of_16_bytes"] == 8 + tokens * (16 // bits), facts
        assert facts["instructions_per_weight"] < (3.3 if tokens == 1 else 5), facts


@needs_triton
def test_the_machine_code_has_no_barriers_and_no_spills():
    check_machine_code(output_of(sys.executable, SASS))


@pytest.mark.nogpu
@pytest.mark.usefixtures("nogpu_tool")
def test_the_machine_code_of_the_older_triton():
    check_machine_code(output_of("bash", nogpu.TOOL / "run.sh", "noop", SASS))


# The kernels of a GPU that is not there leave garbage: what compares numbers is taken out.
WITHOUT_CHECKS = f"""
import runpy, sys
sys.path[:0] = [{str(ROOT / "09_inference")!r}, {str(ROOT)!r}]
import _prompts, _quantized
_quantized.check_weights = lambda *_: None
_quantized.check_matmul = lambda *_: (0.0, 0.0)
_prompts.Text.decode = lambda *_: ""
sys.argv[0] = {str(ROOT / SCRIPT)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.nogpu
@pytest.mark.usefixtures("nogpu_tool")
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_the_decode_step_is_captured_with_five_launches(tmp_path, weights):
    """A layer of q, k, v; o; gate, up; down. And the head."""
    (tmp_path / "driver.py").write_text(WITHOUT_CHECKS, encoding="utf-8")
    flags = f"--weights {weights} --kernel triton --compile --max-new-tokens 3 --device cuda"
    layers = 2
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": layers}
    nogpu.write_shape(tmp_path, "layers.json", **shape)
    [counted] = nogpu.counts(
        tmp_path, str(tmp_path / "driver.py"), f"{flags} --model layers.json", how="noop"
    )
    assert counted["graph launch"] == 4  # two answers, two steps after the first token
    matrices = 7 * layers + 1
    launches_of_a_step = 4 * layers + 1
    # Each matrix is tried with one and with two rows. A step runs once, and is captured once. Each
    # of the two prompts needs the head for its last token.
    assert counted["kernel matvec_kernel"] == 2 * matrices + 2 * launches_of_a_step + 2


REFUSED = {  # flags: words of the line
    "--kernel triton": "--kernel triton",
    "--kernel triton --weights bf16": "--weights bf16",
    "--kernel triton --prompts three.txt": "3 prompts",
    "--kernel cuda": "",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_a_kernel_that_cannot_be_used_is_one_line(tmp_path, flags):
    (tmp_path / "three.txt").write_text("a\nb\nc\n", encoding="utf-8")
    result = run(SCRIPT, tmp_path, "--device", "cpu", *flags.split())
    assert_refused(result, *(REFUSED[flags] or flags).split())
