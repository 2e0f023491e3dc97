"""09_inference/quantized.py: transformers' tokens, bytes as computed, errors within what rounding allows, refusals."""

import json
from pathlib import Path

import pytest
from support.checkpoints import write_folder
from support.harness import ODD, TINY, Result, assert_refused, config_of, needs_compiler, run, with_fault
from support.real_model import answers_of_transformers

SCRIPT = "09_inference/quantized.py"
WIDER = {**TINY, "hidden_size": 64, "intermediate_size": 160}
PROMPTS = ["def main():", "a", "The quick brown fox jumps"]  # of unequal lengths
FOLDERS = {
    "wide": WIDER,
    "odd": {**ODD, "vocab_size": 251, "model_type": "qwen2"},
    "tied": {**WIDER, "tie_word_embeddings": True},
}


def start(where: Path, *flags, script: str = SCRIPT) -> Result:
    (where / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    flags = ["--prompts", "prompts.txt", "--max-new-tokens", 8, "--device", "cpu", "--json", "summary.json", *flags]
    return run(script, where, *flags)


def finish(where: Path, *flags) -> dict:
    result = start(where, *flags)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-3000:]}"
    return result.summary


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    where = tmp_path_factory.mktemp("models")
    for name, shape in FOLDERS.items():
        write_folder(where / name, config_of(shape), scale=4)
    return where


@pytest.mark.parametrize(
    ("name", "dtype"), [("wide", "auto"), ("odd", "fp32"), pytest.param("tied", "auto", marks=pytest.mark.full)]
)
def test_all_kinds_of_weights(tmp_path, models, name, dtype):
    """In fp32 without torch's kernels; odd: rows that no group divides, nor a kernel's 16."""
    summary = finish(tmp_path, "--model", models / name, "--dtype", dtype)
    rows = {row["weights"]: row for row in summary["rows"]}
    assert any("transformers" in line for line in summary["checked"])
    for row in rows.values():
        assert [len(ids) for ids in row["token_ids"]] == [8, 8, 8]
    kind = "bf16" if dtype == "auto" else "fp32"
    assert {rows[name]["dtype"] for name in ("int8", "int4")} == {kind}
    errors = {name: row["logits_relative_error"] for name, row in rows.items()}
    assert 0 == errors["fp32"] < errors["bf16"] < errors["int4"]
    assert rows["fp32"]["equal_tokens"] == 24
    assert rows["int8"]["largest_matmul_error"] < (1e-5 if dtype == "fp32" else 1e-2)


@pytest.mark.parametrize(("weights", "group_size", "bits"), [("int8", 32, 8), ("int4", 32, 5), ("int4", 64, 4.5)])
def test_bytes_held(tmp_path, weights, group_size, bits):
    shape = {**WIDER, "intermediate_size": 192}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    row = finish(tmp_path, "--model", "config.json", "--weights", weights, "--group-size", group_size)
    hidden, ffn, vocab, layers = 64, 192, 256, 2
    rows_of_matrices = layers * (hidden + 2 * hidden // 2 + hidden + 2 * ffn + hidden) + vocab  # 2 of 4 key-value heads
    matrices = layers * (hidden * (2 * hidden + 2 * hidden // 2) + 3 * hidden * ffn) + vocab * hidden
    others = vocab * hidden + (2 * layers + 1) * hidden
    expected = matrices * bits / 8 + 2 * others + (2 * rows_of_matrices if weights == "int8" else 0)
    assert row["weight_bytes"] == row["planned_weight_bytes"] == expected
    assert row["bytes_per_step"] == expected - 2 * vocab * hidden  # of the embedding it reads a row
    assert row["rows"][0].get("equal_tokens") is None  # no baseline was run


@pytest.mark.full
@needs_compiler
def test_the_compiled_step_gives_the_same_tokens(tmp_path, models):
    shared = ["--model", models / "wide", "--weights", "int4", "--dtype", "fp32"]
    eager, compiled = (finish(tmp_path, *shared, *more) for more in ([], ["--compile"]))
    assert compiled["token_ids"] == eager["token_ids"]


REFUSED = {  # flags: words of the line, where these are not the flag and its value
    "--weights fp32 --dtype bf16": "--dtype bf16",
    "--dtype fp16": "",
    "--group-size 48": "",
    "--model llama-405b --weights bf16": "",
    "--model short": "model.safetensors",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_bad_input_is_refused_in_one_line(tmp_path, flags):
    write_folder(tmp_path / "short", config_of(WIDER))
    weights = tmp_path / "short/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert_refused(start(tmp_path, *flags.split()), *(REFUSED[flags] or flags).split())


FAULTS = {  # a line, and what stands in its place
    "int8": ("return codes * scale.float()[:, None]", "return (codes + 1) * scale.float()[:, None]"),
    "int4": ("zero = (low + 8 * scale.float()).bfloat16()", "zero = low.bfloat16()"),
    "a matmul": ("self.codes.to(x.dtype)) * scale", "self.codes.to(x.dtype)) * scale.flip(0)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_version_fails_its_own_check(tmp_path, models, fault):
    script = with_fault(SCRIPT, tmp_path, *FAULTS[fault])
    result = start(tmp_path, "--model", models / "wide", "--dtype", "fp32", script=script)
    assert (result.code, "AssertionError" in result.err) == (1, True), result.err[-3000:]


@pytest.mark.real_model
def test_the_real_model_answers_as_transformers_has_it(tmp_path, smollm2):
    summary = finish(tmp_path, "--model", smollm2, "--chat")
    assert summary["rows"][0]["token_ids"] == answers_of_transformers(smollm2, PROMPTS, 8)
