"""09_inference: folders, prompts and drafts that people have, through the real command lines."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import write_folder
from support.harness import TINY, Result, assert_refused, config_of, in_long, run

SCRIPT = "09_inference/infer_70b.py"
# every other script that answers, with flags that keep it fast
OTHERS = {
    "09_inference/kv_cache.py": [],
    "09_inference/speculative.py": [],
    "09_inference/quantized.py": ["--weights", "fp32"],
    "09_inference/offloaded.py": [],
    "09_inference/export.py": ["--forms", "onnx"],
}
VOCAB = 300
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NEEDS_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ raise_exception('first a system message') }}"
    "{% endif %}" + CHATML
)
REQUIRED_PACKAGES = ("tokenizers", "transformers")


def make_tokenizer(size: int = VOCAB, text: str = "the quick brown fox", **special):
    """Return a byte-level BPE tokenizer that was trained on `text`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    words = " ".join(f"{text} {number}" for number in range(200))
    tokenizer.train_from_iterator([words], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **({"eos_token": "<|im_end|>"} | special)
    )


def write_model(folder: Path, *, tokenizer=None, **shape) -> Path:
    """Write a Hugging Face folder with random weights."""
    write_folder(folder, config_of({**TINY, "vocab_size": VOCAB, **shape}), scale=4)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def answer(script: str, folder: Path, *flags, **how) -> Result:
    shared = ["--device", "cpu", "--max-new-tokens", 4, "--json", "summary.json"]
    return run(script, folder, "--model", "model", *shared, *OTHERS.get(script, []), *flags, **how)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder `model` with a tokenizer and a chat template."""
    for package in REQUIRED_PACKAGES:
        pytest.importorskip(package)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHATML
    write_model(tmp_path / "model", tokenizer=tokenizer)
    return tmp_path


# --- files of the model's folder


def cut(name: str, share: float = 0.5) -> Callable[[Path], None]:
    """Return an edit that leaves the start of a file."""

    def edit(model: Path) -> None:
        content = (model / name).read_bytes()
        (model / name).write_bytes(content[: int(share * len(content))])

    return edit


def write(name: str, content: str | bytes) -> Callable[[Path], None]:
    def edit(model: Path) -> None:
        data = content.encode() if isinstance(content, str) else content
        (model / name).write_bytes(data)

    return edit


def remove(name: str) -> Callable[[Path], None]:
    def edit(model: Path) -> None:
        (model / name).unlink()

    return edit


def template(content: str | dict) -> Callable[[Path], None]:
    """Return an edit that saves other chat templates."""

    def edit(model: Path) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        (model / "chat_template.jinja").unlink()
        tokenizer.chat_template = content
        tokenizer.save_pretrained(model)

    return edit


def no_file_of_the_class(model: Path) -> None:
    """A tokenizer class that transformers makes without any file: it has no tokens for text."""
    (model / "tokenizer.json").unlink()
    config = {"tokenizer_class": "LlamaTokenizer"}
    (model / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def replace_model(model: Path, vocab_size: int) -> None:
    """Write another model into the folder, and leave the tokenizer as it is."""
    shutil.rmtree(model.with_name("other"), ignore_errors=True)
    write_model(model.with_name("other"), vocab_size=vocab_size)
    for file in ("config.json", "model.safetensors"):
        (model.with_name("other") / file).replace(model / file)


def smaller_model(model: Path) -> None:
    """A model whose vocabulary is smaller than its tokenizer's."""
    replace_model(model, 258)


def no_tokenizer(model: Path) -> None:
    """A model that reads bytes, and has a token for half of them."""
    replace_model(model, 128)
    for file in model.glob("tokenizer*"):
        file.unlink()


def only(name: str, content: str) -> Callable[[Path], None]:
    """Return an edit that leaves the tokenizer in one file alone, whose name is another one."""

    def edit(model: Path) -> None:
        for file in model.glob("tokenizer*"):
            file.unlink()
        write(name, content)(model)

    return edit


def words_without_a_tokenizer(model: Path) -> None:
    """A model with many more tokens than there are bytes."""
    replace_model(model, 1000)
    for file in model.glob("tokenizer*"):
        file.unlink()


GENERATION = "generation_config.json"
# the edit of the folder, the flags, and words of the line
DAMAGED = {
    "half of tokenizer.json": (cut("tokenizer.json"), [], "tokenizer.json"),
    "an empty tokenizer.json": (cut("tokenizer.json", 0), [], "tokenizer.json"),
    "a pointer of Git LFS": (
        write("tokenizer.json", "version https://git-lfs.github.com/spec/v1\nsize 9\n"),
        [],
        "tokenizer.json",
    ),
    "no tokenizer.json": (remove("tokenizer.json"), [], "tokenizer.json"),
    "half of tokenizer_config.json": (cut("tokenizer_config.json"), [], "tokenizer_config.json"),
    "a tokenizer without tokens": (no_file_of_the_class, [], "tokenizer.json"),
    "a token beyond the vocabulary": (smaller_model, [], "258", "300", "quick"),
    "a byte beyond the vocabulary": (no_tokenizer, ["--prompt", "é"], "128", "byte 195"),
    "Mistral's tokenizer": (
        only("tekken.json", '{"config": {}, "vocab": []}'),
        [],
        "tekken.json",
        "tokenizer.json",
    ),
    "a vocabulary alone": (only("vocab.json", '{"a": 0}'), [], "vocab.json", "tokenizer.json"),
    "no tokenizer for words": (words_without_a_tokenizer, [], "1000", "tokenizer.json"),
    "half of generation_config.json": (
        write(GENERATION, '{"eos_token_id": [1,'),
        [],
        GENERATION,
    ),
    "a list as generation config": (write(GENERATION, "[]"), [], GENERATION),
    "a stop token as text": (
        write(GENERATION, '{"eos_token_id": "<|im_end|>"}'),
        [],
        GENERATION,
        "<|im_end|>",
    ),
    "a list in a list": (write(GENERATION, '{"eos_token_id": [[1]]}'), [], GENERATION, "[[1]]"),
    "a template that wants more": (
        template(NEEDS_SYSTEM),
        ["--chat"],
        "first a system message",
        "leave --chat out",
    ),
    "a template that is no template": (
        write("chat_template.jinja", "{% for m in"),
        ["--chat"],
        "leave --chat out",
    ),
    "a template with an unknown name": (
        template("{{ messages[0]['content'][0]['text'].nothing.there }}"),
        ["--chat"],
        "leave --chat out",
    ),
    "several templates without a default": (
        template({"rag": CHATML, "tool_use": "x"}),
        ["--chat"],
        "rag, tool_use",
        "chat_template.jinja",
    ),
    "no template": (remove("chat_template.jinja"), ["--chat"], "--chat"),
}


def test_a_damaged_folder_is_one_line(folder):
    shutil.copytree(folder / "model", folder / "whole")
    for edit, flags, *words in DAMAGED.values():
        shutil.rmtree(folder / "model")
        shutil.copytree(folder / "whole", folder / "model")
        edit(folder / "model")
        prompt = [] if "--prompt" in flags else ["--prompt", "the quick brown fox"]
        assert_refused(answer(SCRIPT, folder, *prompt, *flags), "model", *words)
        assert not (folder / "summary.json").exists()


def test_ranks_tell_it_once(folder):
    edit, flags, *words = DAMAGED["half of tokenizer.json"]
    edit(folder / "model")
    assert_refused(answer(SCRIPT, folder, *flags, nproc=2), *words)


def without_padding_token(model: Path) -> None:
    config = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config.get("pad_token") is None


def without_any_special_token(model: Path) -> None:
    config = {"tokenizer_class": "TokenizersBackend"}
    (model / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def added_padding_token(model: Path) -> None:
    """As many fine-tuning scripts leave it: the tokenizer has a token more than the model."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(model)
    assert len(tokenizer) == VOCAB + 1


def more_rows_than_tokens(model: Path) -> None:
    make_tokenizer(270).save_pretrained(model)


ANSWERED = {
    "no padding token": without_padding_token,
    "no special token": without_any_special_token,
    "a padding token that was added": added_padding_token,
    "a padded vocabulary": more_rows_than_tokens,
    "no stop token": write(GENERATION, '{"eos_token_id": null}'),
    "a generation config without one": write(GENERATION, "{}"),
    "a byte order mark": write(GENERATION, b'\xef\xbb\xbf{"eos_token_id": 2}'),
}


def test_a_usual_folder_is_answered(folder):
    shutil.copytree(folder / "model", folder / "whole")
    (folder / "prompts.txt").write_text(
        "the quick brown fox\nfox\n", encoding="utf-8"
    )  # one of them is padded
    for edit in ANSWERED.values():
        shutil.rmtree(folder / "model")
        shutil.copytree(folder / "whole", folder / "model")
        edit(folder / "model")
        result = answer(SCRIPT, folder, "--prompts", "prompts.txt")
        assert result.code == 0, result
        assert any("transformers' generate" in line for line in result.summary["checked"])
        assert all(result.summary["token_ids"])


def test_each_stop_token_of_a_list_ends_an_answer(folder):
    whole = answer(SCRIPT, folder, "--prompt", "fox").summary["token_ids"][0]
    assert len(whole) == 4
    for stop in whole[1:3]:
        config = {"eos_token_id": [2, stop]}
        (folder / "model" / GENERATION).write_text(json.dumps(config), encoding="utf-8")
        ended = answer(SCRIPT, folder, "--prompt", "fox")
        assert ended.code == 0, ended
        assert ended.summary["token_ids"] == [whole[: whole.index(stop)]]


def edit_config(model: Path, **values) -> None:
    content = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps(content | values), encoding="utf-8")


def answer_of_transformers(model: Path, prompt: str) -> list[int]:
    """Return what transformers answers for a folder, with no setting but the number of tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model)(prompt, return_tensors="pt")
    net = AutoModelForCausalLM.from_pretrained(model)
    tokens = net.generate(**ids, do_sample=False, max_new_tokens=12, pad_token_id=0)
    return tokens[0, ids["input_ids"].shape[1] :].tolist()


def test_stop_tokens_of_config_json_count_as_in_transformers(folder):
    """They do only where there is no generation_config.json."""
    model = folder / "model"
    whole = answer_of_transformers(model, "fox")
    assert len(whole) == 12
    third = whole[2]
    assert third not in whole[:2]
    for stop in (third, [1, third]):
        edit_config(model, eos_token_id=stop)
        assert answer_of_transformers(model, "fox") == whole[:3]
        result = answer(SCRIPT, folder, "--prompt", "fox", "--max-new-tokens", 12)
        assert result.code == 0, result
        assert result.summary["token_ids"] == [whole[:2]]
        assert any(line.endswith("transformers' generate") for line in result.summary["checked"])
    write(GENERATION, "{}")(model)
    result = answer(SCRIPT, folder, "--prompt", "fox", "--max-new-tokens", 12)
    assert result.summary["token_ids"] == [whole]


CHANGES_GREEDY = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "suppress_tokens": [5, 6]}
CHANGES_NOTHING = {"num_beams": 1, "min_length": 0, "temperature": 0.6, "do_sample": True}


@pytest.mark.parametrize("file", [GENERATION, "config.json"])
def test_settings_that_are_not_applied_are_named(folder, file):
    model = folder / "model"
    whole = answer_of_transformers(model, "fox")
    if file == GENERATION:
        write(GENERATION, json.dumps(CHANGES_GREEDY | CHANGES_NOTHING))(model)
    else:
        edit_config(model, **CHANGES_GREEDY, **CHANGES_NOTHING)
    assert answer_of_transformers(model, "fox") != whole
    result = answer(SCRIPT, folder, "--prompt", "fox", "--max-new-tokens", 12)
    assert result.code == 0, result
    assert result.summary["token_ids"] == [whole]
    [named] = [line for line in result.out.splitlines() if line.startswith("not applied")]
    [checked] = [line for line in result.summary["checked"] if "transformers" in line]
    assert file in named
    assert "plain greedy decoding" in checked
    for line in (named, checked):
        assert all(key in line for key in CHANGES_GREEDY)
        assert not any(key in line for key in CHANGES_NOTHING)


def test_random_weights_may_read_bytes(tmp_path):
    """Also with more tokens: what they answer means nothing."""
    (tmp_path / "model").mkdir()
    config = {**TINY, "vocab_size": 1000}
    (tmp_path / "model/config.json").write_text(json.dumps(config), encoding="utf-8")
    result = answer(SCRIPT, tmp_path, "--prompt", "fox", "--temperature", 1e-40)
    assert result.code == 0, result
    lines = result.out.splitlines()
    assert any("random weights" in line for line in lines)
    prompt = lines.index("prompt: fox")
    assert lines[prompt + 1].startswith("answer: ")
    # a temperature near 0 is greedy
    assert any("greedy tokens" in line for line in result.summary["checked"])
    assert len(result.summary["token_ids"][0]) == 4


def test_the_answer_ends_its_line(folder):
    result = answer(SCRIPT, folder, "--prompt", "fox")
    text = result.summary["texts"][0].rstrip("\N{REPLACEMENT CHARACTER}")
    assert f"prompt: fox\nanswer: {text}\n" in result.out
    assert "random" not in result.out


# --- numbers that are not finite


def write_number(model: Path, name: str, value: float) -> None:
    """Write one number into a weight."""
    weights = load_file(model / "model.safetensors")
    weights[name][3, 5] = value
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


NAN = math.nan
NOT_FINITE = {  # script: the number, and flags
    SCRIPT: (NAN, []),
    f"{SCRIPT} sampled": (math.inf, ["--temperature", 0.8]),
    "09_inference/kv_cache.py": (-math.inf, ["--temperature", 0.8]),
    "09_inference/speculative.py": (NAN, ["--temperature", 0.8]),
    "09_inference/quantized.py int8": (NAN, ["--weights", "int8"]),
    "09_inference/quantized.py int4": (math.inf, ["--weights", "int4"]),
    "09_inference/offloaded.py": (NAN, []),
    "09_inference/export.py": (NAN, ["--forms", "onnx"]),
}
OFTEN = (SCRIPT, f"{SCRIPT} sampled", "09_inference/quantized.py int4")


@pytest.mark.parametrize("case", [case if case in OFTEN else in_long(case) for case in NOT_FINITE])
def test_a_weight_that_is_not_finite_is_one_line(tmp_path, case):
    value, flags = NOT_FINITE[case]
    write_model(tmp_path / "model")
    write_number(tmp_path / "model", "model.layers.1.mlp.down_proj.weight", value)
    result = answer(case.split()[0], tmp_path, "--prompt", "fox", *flags)
    assert_refused(result, "--model model", "NaN or infinite")
    assert not (tmp_path / "summary.json").exists()


def test_a_draft_that_is_not_finite_is_one_line(tmp_path):
    write_model(tmp_path / "model")
    write_model(tmp_path / "draft")
    write_number(tmp_path / "draft", "lm_head.weight", NAN)
    script = "09_inference/speculative.py"
    flags = ["--draft", "draft", "--prompt", "fox", "--temperature", 0.8]
    assert_refused(answer(script, tmp_path, *flags), "--draft draft", "NaN or infinite")


def test_a_comparison_of_numbers_that_are_not_finite_is_one_line(tmp_path):
    write_model(tmp_path / "model", vocab_size=256)
    write_number(tmp_path / "model", "lm_head.weight", NAN)
    flags = ["--model", "model", "--batch-size", 1, "--new-tokens", 4, "--no-compile"]
    result = run("09_inference/parity.py", tmp_path, *flags, "--device", "cpu")
    assert_refused(result, "--model model", "NaN or infinite")


@pytest.mark.parametrize("form", ["list", pytest.param("files", marks=pytest.mark.full)])
def test_of_several_templates_the_default_is_used(folder, form):
    model = folder / "model"
    single = answer(SCRIPT, folder, "--prompt", "fox", "--chat").summary["token_ids"]
    assert single != answer(SCRIPT, folder, "--prompt", "fox").summary["token_ids"]
    if form == "files":
        template({"tool_use": "x", "default": CHATML})(model)
    else:  # as transformers 4 wrote them
        (model / "chat_template.jinja").unlink()
        config = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
        config["chat_template"] = [
            {"name": "tool_use", "template": "x"},
            {"name": "default", "template": CHATML},
        ]
        (model / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    result = answer(SCRIPT, folder, "--prompt", "fox", "--chat")
    assert result.code == 0, result
    assert result.summary["token_ids"] == single


# --- files of prompts

PROMPTS = {
    "a byte order mark and \\r\\n": (b"\xef\xbb\xbfhello\r\nsecond\r\n", ["hello", "second"]),
    "U+2028": ("second\u2028line\nb\n".encode(), ["second\u2028line", "b"]),
    "U+0085 and U+2029": ("a\x85b\u2029c\nd".encode(), ["a\x85b\u2029c", "d"]),
    "form feed and others": (b"a\x0bb\x0cc\x1cd\x1ee\n", ["a\x0bb\x0cc\x1cd\x1ee"]),
    "a lone \\r": (b"a\rb\r\nc\n", ["a\rb", "c"]),
    "blank lines": (b"\n \r\na\n\n\t\nb", ["a", "b"]),
}


def test_a_prompt_is_a_line(tmp_path):
    """The cases stand one after the other in one file, whose byte order mark comes first."""
    contents = b""
    expected = []
    for content, prompts in PROMPTS.values():
        contents += content.removesuffix(b"\n") + b"\n"
        expected += prompts
    write_model(tmp_path / "model")
    (tmp_path / "prompts.txt").write_bytes(contents)
    result = answer("09_inference/speculative.py", tmp_path, "--prompts", "prompts.txt")
    assert result.code == 0, result
    prompts = [line for line in result.out.splitlines() if " goes on: " in line]
    assert [line.split(" goes on: ")[0] for line in prompts] == [repr(text) for text in expected]


BAD_PROMPTS = {
    "UTF-16": "hello\n".encode("utf-16"),
    "Latin-1": "für\n".encode("latin-1"),
    "nothing": b"",
    "blank lines alone": b"\xef\xbb\xbf\r\n \r\n",
}


def test_a_bad_file_of_prompts_is_one_line(tmp_path):
    write_model(tmp_path / "model")
    for content in BAD_PROMPTS.values():
        (tmp_path / "prompts.txt").write_bytes(content)
        result = answer(SCRIPT, tmp_path, "--prompts", "prompts.txt")
        assert_refused(result, "--prompts prompts.txt")


def test_a_prompt_that_is_no_text_is_one_line(folder):
    result = answer(SCRIPT, folder, "--prompt", b"\xff".decode(errors="surrogateescape"))
    assert_refused(result, "prompt", "UTF-8")


# --- drafts


def write_draft(folder: Path, rows: int, tokenizer=None) -> None:
    """Write `draft`: the weights of `model`, and a vocabulary of `rows` rows.

    The rows that only one of the two has would be the likeliest tokens of that model.
    """
    weights = load_file(folder / "model/model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = with_rows(weights[name], rows)
    (folder / "draft").mkdir()
    save_file(weights, folder / "draft/model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "model/config.json").read_text(encoding="utf-8"))
    (folder / "draft/config.json").write_text(
        json.dumps({**config, "vocab_size": rows}), encoding="utf-8"
    )
    if tokenizer is not None:
        tokenizer.save_pretrained(folder / "draft")


def with_rows(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """Cut or lengthen a matrix [vocab, hidden]. A new row gives a larger logit than any token's."""
    extra_rows = rows - len(weight)
    if extra_rows <= 0:
        return weight[:rows].clone()
    directions = torch.cat((weight, -weight))[:extra_rows]
    return torch.cat((weight, 10 * directions))


DRAFTS = {  # rows of the model, rows of the draft, flags
    "a larger draft": (300, 340, []),
    "a smaller draft": (340, 300, []),
    "sampled, a larger draft": (300, 340, ["--temperature", 0.8, "--top-p", 0.9]),
    "sampled, a smaller draft": (340, 300, ["--temperature", 0.8]),
}


@pytest.mark.parametrize(
    "case",
    [
        "a smaller draft",
        *(in_long(case) for case in DRAFTS if case != "a smaller draft"),
    ],
)
def test_a_draft_with_another_number_of_rows(folder, case):
    rows, draft_rows, flags = DRAFTS[case]
    tokenizer = make_tokenizer()
    if rows != VOCAB:
        write_draft(folder, rows, tokenizer)
        (folder / "model").rename(folder / "first")
        (folder / "draft").rename(folder / "model")
    write_draft(folder, draft_rows, tokenizer)
    flags = ["--max-new-tokens", 24, "--draft-tokens", 3, *flags]
    result = answer("09_inference/speculative.py", folder, "--draft", "draft", *flags)
    assert result.code == 0, result
    plain, guessed = result.summary["rows"]
    tokens = plain["token_ids"][0] + guessed["token_ids"][0]
    assert max(tokens) < VOCAB
    # the distributions of both are equal, so nearly every guess is kept
    assert guessed["accepted_per_step"] == pytest.approx(3, abs=0.4)
    if "--temperature" not in flags:
        assert any("transformers' generate" in line for line in result.summary["checked"])


def other_text():
    return make_tokenizer(text="int main void return")


def fewer_merges():
    return make_tokenizer(280)


def a_token_more():
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    return tokenizer


def test_a_padding_token_more_is_the_same_tokenizer(folder):
    write_draft(folder, 301, a_token_more())
    result = answer("09_inference/speculative.py", folder, "--draft", "draft")
    assert result.code == 0, result


def test_a_draft_with_another_tokenizer_is_refused(folder):
    for make, rows, words in (
        (other_text, VOCAB, ["the same tokenizer"]),
        (fewer_merges, 320, ["the same tokenizer"]),
        (None, 320, ["320", "300", "tokenizer.json"]),
    ):
        shutil.rmtree(folder / "draft", ignore_errors=True)
        write_draft(folder, rows, make() if make else None)
        result = answer("09_inference/speculative.py", folder, "--draft", "draft")
        assert_refused(result, "--draft draft", *words)
    make_tokenizer().save_pretrained(folder / "draft")
    cut("tokenizer.json")(folder / "draft")
    result = answer("09_inference/speculative.py", folder, "--draft", "draft")
    assert_refused(result, "--draft draft", "tokenizer.json")


# --- GGUF

HEADS = {
    "larger heads, as Mistral Nemo's": {"hidden_size": 64, "head_dim": 32},
    "smaller heads": {"hidden_size": 64, "head_dim": 8},
    "matrices that q8_0 cannot hold": {  # its blocks have 32 weights
        "hidden_size": 40,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 16,
    },
}


@pytest.mark.parametrize(
    "case",
    [
        in_long("larger heads, as Mistral Nemo's"),
        in_long("smaller heads"),
        "matrices that q8_0 cannot hold",
    ],
)
def test_gguf_of_any_head_dim(tmp_path, case):
    """llama.cpp and transformers read the file, and answer as eager does."""
    for package in ("gguf", "xllamacpp"):
        pytest.importorskip(package)
    # its tokens are ASCII, because llama.cpp's server reports no token that ends in a character
    write_model(tmp_path / "model", vocab_size=128, rope_theta=500.0, **HEADS[case])
    flags = ["--forms", "f16,q8_0", "--prompt", "def main():", "--max-new-tokens", 8]
    result = run(
        "09_inference/export.py",
        tmp_path,
        *["--model", "model", "--device", "cpu", "--json", "summary.json", *flags],
    )
    assert result.code == 0, result
    rows = {row["form"]: row for row in result.summary["rows"]}
    assert rows["f16"]["first_difference"] == "none"
    assert rows["f16"]["logprob_difference"] < 1e-2
    assert rows["f16"]["weights_relative_error"] < rows["q8_0"]["weights_relative_error"] < 1e-2
