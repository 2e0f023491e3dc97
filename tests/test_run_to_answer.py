"""From the folder of a run to an answer: --model names the command that makes a model of it."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.checkpoints import write_folder
from support.harness import (
    LIMIT,
    ROOT,
    TINY,
    Result,
    assert_refused,
    clean_env,
    config_of,
    damage,
    in_full,
    in_long,
    run,
    train,
)

from lm import shapes, weights

INFER = "09_inference/infer_70b.py"
FINETUNE = "06_fsdp_zero/finetune.py"
CONVERT = "06_fsdp_zero/convert_checkpoint.py"
BASELINE = "04_amp/train.py"
SHORT = ["--steps", 2, "--save-every", 1]
PROMPT = ["--prompt", "a few words", "--max-new-tokens", 6]
PAIRS = ROOT / "07_memory_tricks/lora_instructions.jsonl"


def ask(folder: Path, model: str, *flags, script: str = INFER, nproc: int | None = None) -> Result:
    shared = ["--device", "cpu", "--json", "answer.json"]
    return run(script, folder, "--model", model, *shared, *flags, nproc=nproc)


def told(result: Result) -> tuple[list[str], str]:
    """Return the command that an error names, and the value of --model after it."""
    [line] = [line for line in result.err.splitlines() if "error: " in line]
    command = re.search(r"`python (.*?)`", line)
    words = shlex.split(command[1])
    assert (result.folder / words[0]).resolve() == ROOT / CONVERT
    return words[1:], shlex.split(line.rpartition("--model ")[2])[0]


def convert(folder: Path, model: str) -> str:
    """Run the command that --model names. Return the folder that it writes."""
    refused = ask(folder, model, *PROMPT)
    assert_refused(refused, f"--model {model}")
    words, converted = told(refused)
    assert not (folder / converted).exists()
    result = run(CONVERT, folder, *words)
    assert result.code == 0, result
    return converted


def check_answers(folder: Path, model: str, *processes: int | None) -> None:
    """The model answers, with the same tokens on any number of processes."""
    token_ids = []
    for nproc in processes or (None,):
        result = ask(folder, model, *PROMPT, nproc=nproc)
        assert result.code == 0, result
        assert "transformers' generate" in result.out
        token_ids.append(
            json.loads((folder / "answer.json").read_text(encoding="utf-8"))["token_ids"]
        )
    assert all(tokens == token_ids[0] for tokens in token_ids)


def paste(folder: Path, command: str) -> subprocess.CompletedProcess:
    """Run a command that a script has printed, as a person with an activated .venv would."""
    path = f"{Path(sys.executable).parent}:{clean_env()['PATH']}"
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=clean_env(PATH=path),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def last_lines(result: Result) -> list[list[str]]:
    """Return the lines for a person after the summary of a run, each as its name and its value."""
    lines = result.out.rstrip("\n").rpartition("\n\n")[2].splitlines()
    return [re.split(r": +", line, maxsplit=1) for line in lines]


def read_weights(folder: Path) -> torch.nn.Module:
    return weights.build(str(folder), shapes.read_config(str(folder)), seed=0)


RUNS = {
    "one process": (BASELINE, None, []),
    "DDP": ("05_ddp/train.py", 2, []),
    "FSDP": ("06_fsdp_zero/train_fsdp.py", 2, []),
    "ZeRO-1": ("06_fsdp_zero/train_zero.py", 2, ["--stage", 1]),
    "ZeRO-3": ("06_fsdp_zero/train_zero.py", 2, ["--stage", 3]),
    "tensor parallel": ("08_model_parallel/train_3d.py", 2, ["--tp", 2]),
    "pipeline": ("08_model_parallel/train_3d.py", 2, ["--pp", 2, "--micro-batch-size", 6]),
}


IN_SHORT = ("FSDP",)
IN_LONG = ("DDP", "ZeRO-1", "tensor parallel")
IN_FULL = [case for case in RUNS if case not in IN_SHORT + IN_LONG]


@pytest.mark.parametrize("case", [*IN_SHORT, *map(in_full, IN_FULL), *map(in_long, IN_LONG)])
def test_a_run_answers_after_the_command_that_is_told(tmp_path, case):
    script, nproc, flags = RUNS[case]
    result = train(script, tmp_path, "--keep", 1, *SHORT, *flags, nproc=nproc)
    converted = convert(tmp_path, "run")
    assert weights.digest(read_weights(tmp_path / converted)) == result.summary["weights_sha256"]
    if case == "FSDP":
        check_answers(tmp_path, converted, None, 2)
    assert_refused(ask(tmp_path, "run"), f"use --model {converted}")


def test_a_fine_tuning_run_that_was_stopped_is_converted(tmp_path):
    flags = ["--data", PAIRS, "--seq-len", 128]
    result = train(FINETUNE, tmp_path, *SHORT, *flags, nproc=2)

    assert "Loading weights" not in result.err, "a bar of transformers"
    shutil.rmtree(tmp_path / "run/model")
    net = read_weights(tmp_path / convert(tmp_path, "run"))
    found = weights.digest(torch.nn.ParameterList(net.parameters()))
    assert found == result.summary["weights_sha256"]


def write_chat_model(folder: Path, end: str, config: dict, generation: dict | None) -> None:
    """Write a model of 64 words with a tokenizer that ends answers with `end`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    write_folder(folder, config_of({**TINY, "vocab_size": 64}))
    words = {"<s>": 0, "<end>": 1, "<turn>": 2, "user": 3, "word": 4, "<unk>": 5}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token=end, unk_token="<unk>"
    )
    tokenizer.chat_template = f"{{% for m in messages %}}{{{{ m.content }}}}{end}{{% endfor %}}"
    tokenizer.save_pretrained(folder)
    file = folder / "config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(content | config), encoding="utf-8")
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")


def ids_in(folder: Path) -> tuple:
    """Return bos and eos in config.json, and the content of generation_config.json."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    generation = folder / "generation_config.json"
    content = None
    if generation.exists():
        content = json.loads(generation.read_text(encoding="utf-8"))
    return config["bos_token_id"], config["eos_token_id"], content


SETTINGS = {"eos_token_id": [1, 2], "temperature": 0.5}
END_IDS = {  # what the base has, which --tokenizer is given, and what the trained model has
    "config.json": ({"bos_token_id": 0, "eos_token_id": 2}, None, "", (0, 2, None)),
    "the tokenizer": ({}, None, "", (0, 1, None)),
    "several": ({"bos_token_id": 0, "eos_token_id": [2, 1]}, SETTINGS, "", (0, [2, 1], SETTINGS)),
    "a tokenizer of the same ids": (
        {"bos_token_id": 0, "eos_token_id": [1, 2]},
        SETTINGS,
        "turn",
        (0, [1, 2], SETTINGS),
    ),
    "a tokenizer of another end": (
        {"bos_token_id": 7, "eos_token_id": 1},
        {},
        "turn",
        (0, 2, None),
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        case if case in ("several", "a tokenizer of another end") else in_long(case)
        for case in END_IDS
    ],
)
def test_a_trained_model_ends_its_answers(tmp_path, case):
    """Convert a pre-trained model, and fine-tune the base: both have its ids, and the template."""
    config, generation, tokenizer, expected = END_IDS[case]
    write_chat_model(tmp_path / "base", "<end>", config, generation)
    write_chat_model(tmp_path / "turn", "<turn>", {}, None)
    (tmp_path / "d.txt").write_text("word user " * 999, encoding="utf-8")
    chats = [{"prompt": f"word {i}", "completion": "word user"} for i in range(9)]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, chats)), encoding="utf-8")
    flags = ["--model", "base", "--steps", 1]
    if tokenizer:
        flags += ["--tokenizer", tokenizer]
    train(BASELINE, tmp_path, *flags, "--data", "d.txt")
    result = run(CONVERT, tmp_path, "run", "converted", "--to", "hf")
    assert result.code == 0, result
    assert ids_in(tmp_path / "converted") == expected

    tuned = ["--global-batch-size", 1, "--adapters", 0, "--run-dir", tmp_path / "tuned"]
    train(FINETUNE, tmp_path, *flags, "--data", "d.jsonl", *tuned)
    assert ids_in(tmp_path / "tuned/model") == expected
    template = (tmp_path / (tokenizer or "base") / "chat_template.jinja").read_text(
        encoding="utf-8"
    )
    for folder in ("converted", "tuned/model"):  # which the model was trained with
        copied = tmp_path / folder / "chat_template.jinja"
        assert copied.read_text(encoding="utf-8") == template


def test_a_checkpoint_is_converted_by_its_name(tmp_path):
    result = train(BASELINE, tmp_path, *SHORT, "--run-dir", "a run")
    first = convert(tmp_path, "a run/step-00000001")
    last = convert(tmp_path, "a run/step-00000002")
    assert weights.digest(read_weights(tmp_path / last)) == result.summary["weights_sha256"]
    assert weights.digest(read_weights(tmp_path / first)) != result.summary["weights_sha256"]


@pytest.mark.parametrize("how", ["one bit", in_long("truncated"), in_long("missing")])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, how):
    train(BASELINE, tmp_path, *SHORT)
    damage(tmp_path / "run/step-00000002", how)
    for name in ("run", "run/step-00000002"):
        words, _ = told(ask(tmp_path, name))
        assert words[0] == "run/step-00000001"
    damage(tmp_path / "run/step-00000001", how)
    assert_refused(ask(tmp_path, "run"), "--model run", "broken")


@pytest.mark.full
def test_a_run_ends_with_its_folder_its_picture_and_the_command_that_asks_it(tmp_path):
    result = train(BASELINE, tmp_path, *SHORT, "--run-dir", "a run")
    (_, folder), (_, picture), (_, command) = last_lines(result)
    assert folder == "a run"
    assert (tmp_path / picture).is_file()
    answered = paste(tmp_path, command)
    assert answered.returncode == 0, answered.stderr
    assert "transformers' generate" in answered.stdout
    converted = tmp_path / "a run/model-step-00000002"
    assert weights.digest(read_weights(converted)) == result.summary["weights_sha256"]

    again = train(BASELINE, tmp_path, *SHORT, "--run-dir", "a run", "--resume")
    *_, (_, command) = last_lines(again)
    assert "convert" not in command, "the model is there already"
    assert shlex.split(command)[-1] == "a run/model-step-00000002"


def test_a_run_without_a_checkpoint_is_told(tmp_path):
    result = train(BASELINE, tmp_path, "--steps", 1, "--keep", 0)
    folder = str(tmp_path / "run")
    assert last_lines(result) == [["run", folder], ["picture", f"{folder}/loss.png"]]
    assert_refused(ask(tmp_path, "run"), "--model run", "no checkpoint", "--keep")


# scripts that answer, quantize and train
OTHERS = ("09_inference/kv_cache.py", "02_tensors_precision/quantize.py", "05_ddp/train.py")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a run of two steps."""
    folder = tmp_path_factory.mktemp("trained")
    train(BASELINE, folder, *SHORT)
    return folder


def test_other_scripts_name_the_command_too(trained):
    for script in OTHERS:
        for name in ("run", "run/step-00000002"):
            result = run(script, trained, "--model", name)
            assert_refused(result, f"--model {name}", "run/step-00000002")
            assert told(result)[1] == "run/model-step-00000002"


def test_a_draft_that_is_a_run_is_told(trained):
    result = ask(trained, "nano", "--draft", "run", script="09_inference/speculative.py")
    assert_refused(result, "--draft run", "run/step-00000002")


# --- the tokenizer of the run


def write_tokenizer(folder: Path) -> Path:
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["a few words"] * 9, vocab_size=270, special_tokens=["<end>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<end>")
    tokenizer.save_pretrained(folder)
    return folder


def with_flag(folder: Path) -> list:
    write_tokenizer(folder / "tokenizer")
    return ["--model", "nano", "--tokenizer", "tokenizer"]


def of_the_model(folder: Path) -> list:
    write_folder(folder / "model", config_of({**TINY, "vocab_size": 300}))
    write_tokenizer(folder / "model")
    return ["--model", "model"]


def of_prepared_tokens(folder: Path) -> list:
    (folder / "text.txt").write_text("a few words, and others\n" * 400, encoding="utf-8")
    write_tokenizer(folder / "tokenizer")
    flags = ["--data", "text.txt", "--tokenizer", "tokenizer", "--out", "tokens", "--workers", 1]
    result = run("05_ddp/prepare_data.py", folder, *flags)
    assert result.code == 0, result
    return ["--model", "nano", "--data", "tokens"]


def of_prepared_tokens_with_others_for_evaluation(folder: Path) -> list:
    flags = of_prepared_tokens(folder)
    (folder / "eval.txt").write_text("few other words\n" * 400, encoding="utf-8")
    return [*flags, "--eval-data", "eval.txt"]


TOKENIZERS = [with_flag, in_full(of_the_model), in_long(of_prepared_tokens)]


@pytest.mark.parametrize(
    "make", [*TOKENIZERS, in_full(of_prepared_tokens_with_others_for_evaluation)]
)
def test_the_folder_has_the_tokenizer_of_the_run(tmp_path, make):
    flags = make(tmp_path)
    train(BASELINE, tmp_path, *SHORT, *flags)
    converted = convert(tmp_path, "run")
    check_answers(tmp_path, converted, *((None, 2) if make == with_flag else (None,)))
    [tokenizer] = [
        *tmp_path.glob("tokenizer/tokenizer.json"),
        *tmp_path.glob("model/tokenizer.json"),
    ]
    found = tmp_path / converted / "tokenizer.json"
    assert found.read_text(encoding="utf-8") == tokenizer.read_text(encoding="utf-8")


def test_a_tokenizer_that_has_moved_is_asked_for(tmp_path):
    train(BASELINE, tmp_path, *SHORT, *with_flag(tmp_path))
    (tmp_path / "tokenizer").rename(tmp_path / "moved")
    words, converted = told(ask(tmp_path, "run"))
    refused = run(CONVERT, tmp_path, *words, HF_HUB_OFFLINE="1")
    assert_refused(refused, "run/step-00000002", "--tokenizer")
    assert not list((tmp_path / "run").glob("model-*"))
    result = run(CONVERT, tmp_path, *words, "--tokenizer", "moved")
    assert result.code == 0, result
    check_answers(tmp_path, converted)


def test_a_tokenizer_with_too_many_tokens_is_told(trained, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    write_tokenizer(tmp_path / "tokenizer")
    words = ["run", "to", "--to", "hf", "--tokenizer", "tokenizer"]
    assert_refused(run(CONVERT, tmp_path, *words), "tokenizer", "256")
    assert not (tmp_path / "to").exists()


# --- adapters


@pytest.fixture
def adapted(tmp_path) -> Path:
    """A folder with a fine-tuning run with adapters."""
    write_folder(tmp_path / "base", config_of(TINY))
    flags = ["--data", PAIRS, "--seq-len", 128, "--model", "base", "--adapters", 4]
    result = train(FINETUNE, tmp_path, *SHORT, *flags, nproc=2)
    *_, (_, command) = last_lines(result)
    assert "convert" not in command
    assert shlex.split(command)[-1] == str(tmp_path / "run/model")
    return tmp_path


def test_a_run_with_adapters_has_written_its_model(adapted):
    for name in ("run", "run/step-00000002"):
        assert_refused(ask(adapted, name), f"--model {name}", "use --model run/model")
    check_answers(adapted, "run/model", None, 2)


def test_adapters_alone_are_not_converted(adapted):
    words = ["run/step-00000001", "to", "--to", "hf"]
    assert_refused(run(CONVERT, adapted, *words), "adapters", "run/model")
    shutil.rmtree(adapted / "run/model")
    assert_refused(ask(adapted, "run"), "--model run", "adapters", "--resume")
    assert_refused(run(CONVERT, adapted, *words), "adapters", "--resume")
