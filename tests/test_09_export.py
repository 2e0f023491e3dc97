"""09_inference/export.py: every form gives eager's tokens, and rejects what it was not made for."""

import json
from pathlib import Path

import pytest
from support.checkpoints import write_folder
from support.harness import (
    TINY,
    Result,
    assert_refused,
    config_of,
    in_long,
    needs_compiler,
    run,
    with_fault,
    with_prelude,
    with_small_files,
)

SCRIPT = "09_inference/export.py"
PROMPTS = ["def main():", "a", "The quick brown fox jumps"]  # of unequal lengths
PACKAGES = ("onnx", "onnxscript", "onnxruntime", "gguf", "xllamacpp")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Its tokens are ASCII: llama.cpp's server reports no token that ends within a character."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_folder(folder, config_of({**TINY, "vocab_size": 128, "rope_theta": 500.0}), scale=4)
    return folder


def start(where: Path, model: Path, *flags, script=SCRIPT, **how) -> Result:
    where.mkdir(exist_ok=True)
    (where / "prompts.txt").write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    shared = ["--model", model, "--prompts", "prompts.txt", "--max-new-tokens", 8]
    shared += ["--device", "cpu", "--json", "summary.json"]
    return run(script, where, *shared, *flags, **how)


def rows_of(where: Path, model: Path, *flags, **how) -> dict[str, dict]:
    result = start(where, model, *flags, **how)
    assert result.code == 0, result
    assert any("transformers' generate" in line for line in result.summary["checked"])
    return {row["form"]: row for row in result.summary["rows"]}


@pytest.mark.full  # tests/test_09_inputs.py has GGUF
def test_onnx_and_gguf(tmp_path, model):
    for package in PACKAGES:
        pytest.importorskip(package)
    rows = rows_of(tmp_path, model, "--forms", "onnx,int8,f16,q8_0")
    assert [*rows] == ["eager", "onnx", "int8", "f16", "q8_0"]
    assert [len(ids) for ids in rows["eager"]["token_ids"]] == [8, 8, 8]
    different_tokens = set().union(*rows["eager"]["token_ids"])
    assert len(different_tokens) > 3  # else equal tokens prove little
    assert rows["onnx"]["first_difference"] == rows["f16"]["first_difference"] == "none"
    assert rows["onnx"]["logits_relative_error"] <= 1e-5 < rows["int8"]["logits_relative_error"]
    assert abs(rows["onnx"]["loss"] - rows["eager"]["loss"]) < 1e-5
    assert rows["onnx"]["outputs"] == 1 + 2 * TINY["num_hidden_layers"]
    assert rows["onnx"]["outputs_in_place"] == 1
    assert rows["f16"]["weights_relative_error"] < rows["q8_0"]["weights_relative_error"] < 1e-2
    assert rows["f16"]["logprob_difference"] < 1e-2
    assert rows["int8"]["file_bytes"] < rows["onnx"]["file_bytes"]
    assert rows["q8_0"]["file_bytes"] < rows["f16"]["file_bytes"]


@pytest.mark.long
@needs_compiler
def test_a_package(tmp_path, model):
    rows = rows_of(tmp_path, model, "--forms", "aoti")
    assert rows["aoti"]["first_difference"] == "none"
    assert rows["aoti"]["logits_relative_error"] <= 1e-5
    # in a process that does not have this source
    assert rows["aoti"]["fresh_logits_relative_error"] <= 1e-5
    rejected = rows["aoti"]["rejected"]
    assert "ids" in rejected["a batch of 65"]
    assert "64" in rejected["a batch of 65"]
    assert "ids" in rejected["ids of 32 bits"]


def test_what_is_missing_is_left_out_with_a_reason(tmp_path, model):
    hidden = f"import importlib.util as util\nfind = util.find_spec\nmissing = {PACKAGES!r}\n"
    hidden += "util.find_spec = lambda name, *more: None if name in missing else find(name, *more)"
    script = with_prelude(SCRIPT, tmp_path / "hidden", hidden)
    result = start(tmp_path, model, script=script, PATH="/nowhere")
    assert result.code == 0, result
    assert [row["form"] for row in result.summary["rows"]] == ["eager"]
    for need in (*PACKAGES, "g++"):
        assert need in result.out


ROPE_OF_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_gguf_of_another_shape_is_left_out(tmp_path):
    for number, shape in enumerate(({"model_type": "qwen2"}, {"rope_scaling": ROPE_OF_LLAMA3})):
        model = tmp_path / f"other-{number}"
        write_folder(model, config_of({**TINY, **shape}))
        assert [*rows_of(tmp_path, model, "--forms", "f16,q8_0")] == ["eager"]


# --- the tokens of llama.cpp

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(**words) -> dict:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, **words}


def added(token_id: int, content: str, special: bool, **properties) -> dict:
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, "special": special, **token, **properties}


def write_tokenizer(folder: Path, **changes) -> None:
    """Write a chat model's byte-level BPE: 259 tokens, then two added ones, for a model of 270.

    As many have it, only one of the special tokens has a name, and one added token is not special.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items()}
    vocabulary |= {"th": 256, "Ġth": 257, "Ġzebra": 258}  # the last one is reached by no merge
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            added(259, "<|im_start|>", True),
            added(260, "<|im_end|>", True),
            added(261, "<think>", False),
            added(270, "[PAD]", True),  # the model has no such token
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level(),
        "post_processor": None,
        "decoder": byte_level(),
        "model": {"type": "BPE", "vocab": vocabulary, "merges": ["t h", "Ġ th"]},
    }
    model = tokenizer["model"] | changes.pop("model", {})
    content = json.dumps({**tokenizer, "model": model, **changes})
    (folder / "tokenizer.json").write_text(content, encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    config["chat_template"] = CHATML
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def start_gguf(where: Path, **tokenizer) -> Result:
    """Export a chat model to GGUF. The held-out text is no part of it, and would take minutes."""
    for package in ("gguf", "xllamacpp"):
        pytest.importorskip(package)
    write_folder(where / "model", config_of({**TINY, "vocab_size": 270}), scale=4)
    write_tokenizer(where / "model", **tokenizer)
    prelude = """
import types
import numpy
import lm.data
corpus = types.SimpleNamespace(held_out=numpy.arange(600) % 256)
lm.data.load_corpus = lambda *args, **kwargs: corpus
"""
    script = with_prelude(SCRIPT, where / "prelude", prelude)
    flags = ["--chat", "--prompt", "the dog", "--forms", "f16", "--max-new-tokens", 2]
    flags += ["--model", "model", "--device", "cpu", "--json", "summary.json"]
    result = run(script, where, *flags)
    assert result.code == 0, result
    return result


def test_llama_cpp_reads_the_tokens_of_a_chat_model(tmp_path):
    result = start_gguf(tmp_path)
    assert [row["form"] for row in result.summary["rows"]] == ["eager", "f16"], result
    assert any("llama.cpp has the model's tokens" in line for line in result.summary["checked"])


EATS_SPACE = [added(259, "<|im_start|>", True, rstrip=True), added(260, "<|im_end|>", True)]
OTHER_TOKENIZERS = {
    "a space in front": {"pre_tokenizer": byte_level(add_prefix_space=True)},
    "a normalizer": {"normalizer": {"type": "NFC"}},
    "a word that no merge reaches": {"model": {"ignore_merges": True}},
    "a token that eats spaces": {"added_tokens": EATS_SPACE},
}


@pytest.mark.parametrize(
    "case",
    [
        "a space in front",
        *(in_long(case) for case in OTHER_TOKENIZERS if case != "a space in front"),
    ],
)
def test_a_tokenizer_that_llama_cpp_reads_otherwise_is_left_out(tmp_path, case):
    result = start_gguf(tmp_path, **OTHER_TOKENIZERS[case])
    assert [row["form"] for row in result.summary["rows"]] == ["eager"]
    assert "left out: f16" in result.out


@pytest.mark.long
def test_a_full_disk_is_one_line(tmp_path, model):
    pytest.importorskip("onnxruntime")
    script = with_small_files(SCRIPT, tmp_path / "small", 20_000)
    result = start(tmp_path, model, "--forms", "onnx", script=script)
    assert_refused(result, "bytes", "free", "TMPDIR=")


def test_refusals(tmp_path, model):
    for flags, words in (
        (["--forms", "onnx,tflite"], ["--forms", "tflite", "onnx"]),
        (["--forms", "int8"], ["--forms", "int8", "onnx"]),  # of which it is made
        (["--temperature", 0.8], ["--temperature"]),
        (["--dtype", "bf16"], ["--dtype"]),
    ):
        assert_refused(start(tmp_path, model, *flags), *words)


@pytest.mark.long
def test_weights_of_another_order_fail(tmp_path, model):
    """Halves instead of neighbours: the file loads everywhere, and the answers are wrong."""
    for package in ("gguf", "xllamacpp"):
        pytest.importorskip(package)
    line = "pairs.transpose(1, 2).flatten(0, 2)"
    wrong = with_fault(SCRIPT, tmp_path, line, "pairs.flatten(0, 2)")
    result = start(tmp_path / "run", model, "--forms", "f16", script=wrong)
    assert result.code == 1, result
    assert "AssertionError" in result.err
