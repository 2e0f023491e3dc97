"""--eval-data: all of --data trains, and another text is evaluated."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.chapter import load
from support.checkpoints import saved, write_folder
from support.harness import (
    ROOT,
    TEXT,
    TINY,
    Result,
    assert_refused,
    config_of,
    drop_after,
    in_full,
    in_long,
    run,
    train,
)

from lm import data, model
from training.batches import EVAL_SEQUENCES

DDP = "05_ddp/train.py"
TRAIN_3D = "08_model_parallel/train_3d.py"
TRAIN_ZERO = "06_fsdp_zero/train_zero.py"
FINETUNE = "06_fsdp_zero/finetune.py"
PREPARE = "05_ddp/prepare_data.py"
PAIRS = ROOT / "07_memory_tricks/lora_instructions.jsonl"
SHORT = ["--steps", 3, "--eval-every", 1]
NO_CHANGE = ["--lr", 1e-30]
CHAT_FLAGS = ["--model", "nano", "--steps", 2, "--warmup-steps", 1, "--seq-len", 128]


def refuse(script: str, folder: Path, *flags) -> Result:
    return train(script, folder, *flags, code=2)


def write_jsonl(file: Path, texts: list[str]) -> Path:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return file


def write_text(file: Path, word: str, count: int = 200) -> Path:
    file.write_text("".join(f"{word} says number {i}\n" for i in range(count)), encoding="utf-8")
    return file


def split_texts(folder: Path) -> tuple[Path, Path, Path]:
    """Write documents to a file, and those that a run would train on and hold out to two."""
    texts = [f"document {i} about {'naïve café ' * (1 + i % 7)}" for i in range(120)]
    whole = write_jsonl(folder / "whole.jsonl", texts)
    corpus = data.load_corpus(str(whole), "bytes")
    held_out = bytes(corpus.held_out).decode().split("\0")[:-1]
    assert 2 < len(held_out) < 12
    train_texts = [text for text in texts if text not in held_out]
    held_out_texts = [text for text in texts if text in held_out]
    train_file = write_jsonl(folder / "train.jsonl", train_texts)
    return whole, train_file, write_jsonl(folder / "held_out.jsonl", held_out_texts)


# --- texts


@pytest.mark.parametrize(
    ("script", "nproc"),
    [
        (DDP, 2),
        in_long("04_amp/train.py", None),
        in_long("06_fsdp_zero/train_fsdp.py", 2),
        in_full(TRAIN_ZERO, 2),
        in_long(TRAIN_3D, None),
    ],
)
def test_a_split_by_hand_trains_as_the_split_of_the_script(tmp_path, script, nproc):
    whole, train_file, held_out = split_texts(tmp_path)
    expected = train(script, tmp_path / "a", *SHORT, "--data", whole, nproc=nproc)
    flags = ["--data", train_file, "--eval-data", held_out]
    found = train(script, tmp_path / "b", *SHORT, *flags, nproc=nproc)
    for column in ("loss", "val_loss"):
        assert found.column(column) == expected.column(column)
    assert found.summary["weights_sha256"] == expected.summary["weights_sha256"]


@pytest.mark.parametrize("nproc", [2, in_full(None), in_full(3)])
def test_the_held_out_loss_is_the_loss_of_the_text(tmp_path, nproc):
    text = write_text(tmp_path / "eval.txt", "somebody", count=100)
    flags = ["--data", TEXT, "--eval-data", text, "--steps", 1, *NO_CHANGE]
    result = train(DDP, tmp_path, *flags, nproc=nproc)
    tokens = torch.tensor([*text.read_bytes(), 0])
    count = (len(tokens) - 1) // 32
    assert 50 < count <= EVAL_SEQUENCES
    inputs = tokens[: 32 * count].view(count, 32)
    targets = tokens[1 : 32 * count + 1].view(count, 32)
    net = model.Transformer(config_of(TINY))
    net.load_state_dict(saved(tmp_path, 1)["model"])
    with torch.no_grad():
        expected = F.cross_entropy(net(inputs).flatten(0, 1), targets.flatten()).item()
    assert result.summary["val_loss"] == pytest.approx(expected, rel=1e-5)


def test_all_of_the_data_trains(tmp_path):
    text = write_text(tmp_path / "data.txt", "a")
    eval_text = write_text(tmp_path / "eval.txt", "b")
    corpus = data.load_corpus(str(text), "bytes", eval_data=str(eval_text))
    assert bytes(corpus.train[:]) == text.read_bytes() + b"\0"
    assert bytes(corpus.held_out[:]) == eval_text.read_bytes() + b"\0"
    held_out = data.load_corpus(str(text), "bytes")
    assert 0 < len(held_out.train) < len(corpus.train)


def prepare(folder: Path, text: Path, name: str, *flags) -> Path:
    result = run(PREPARE, folder, "--data", text, "--out", name, "--workers", 1, *flags)
    assert result.code == 0, result
    return folder / name


def all_tokens(folder: Path) -> np.ndarray:
    return np.concatenate([np.load(folder / "train.npy"), np.load(folder / "held_out.npy")])


def test_prepared_folders_give_all_their_tokens(tmp_path):
    texts = [f"document {i}" * (1 + i % 9) for i in range(400)]
    tokens = prepare(tmp_path, write_jsonl(tmp_path / "a.jsonl", texts), "tokens")
    eval_text = write_jsonl(tmp_path / "b.jsonl", [text.upper() for text in texts])
    eval_tokens = prepare(tmp_path, eval_text, "eval")
    assert len(np.load(tokens / "held_out.npy")) > 100

    corpus = data.load_corpus(str(tokens), eval_data=str(eval_tokens))
    expected = all_tokens(tokens)
    sequences = data.Sequences(corpus.train, 32)
    assert len(sequences) == (len(expected) - 1) // 32
    for i in range(len(sequences)):
        inputs, targets = sequences[i]
        assert inputs.tolist() == expected[32 * i : 32 * i + 32].tolist()
        assert targets.tolist() == expected[32 * i + 1 : 32 * i + 33].tolist()
    assert corpus.held_out[:].tolist() == all_tokens(eval_tokens).tolist()

    flags = [*SHORT, "--data", tokens, "--eval-data"]
    prepared = train(DDP, tmp_path / "1", *flags, eval_tokens)
    text = train(DDP, tmp_path / "2", *flags, eval_text)
    assert prepared.column("loss") == text.column("loss")


def write_tokenizer(folder: Path) -> Path:
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["a says number"], vocab_size=257, special_tokens=["<end>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<end>")
    tokenizer.save_pretrained(folder)
    return folder


def test_a_text_is_tokenized_as_the_prepared_folder_was(tmp_path):
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    text = write_text(tmp_path / "a.txt", "a")
    tokens = prepare(tmp_path, text, "tokens", "--tokenizer", tokenizer)
    eval_text = write_text(tmp_path / "b.txt", "b")
    corpus = data.load_corpus(str(tokens), eval_data=str(eval_text))
    other = write_text(tmp_path / "c.txt", "c")
    expected = data.load_corpus(str(other), str(tokenizer), eval_data=str(eval_text)).held_out
    assert corpus.held_out[:].tolist() == expected[:].tolist()


# --- resume


def test_a_run_resumes_with_other_evaluation_data(tmp_path):
    """The losses of training are those of the run that was not interrupted."""
    text = write_text(tmp_path / "data.txt", "a", count=400)
    first = write_text(tmp_path / "first.txt", "b")
    second = write_text(tmp_path / "second.txt", "c")
    flags = ["--data", text, "--steps", 4, "--save-every", 1, "--keep", 9]
    whole = train(DDP, tmp_path, *flags, "--eval-data", first)
    losses = whole.column("loss")
    val_loss = whole.summary["val_loss"]

    drop_after(tmp_path, 2)
    resumed = train(DDP, tmp_path, *flags, "--eval-data", second, "--resume")
    assert "step-00000002" in resumed.out
    assert resumed.column("loss") == losses
    assert resumed.summary["val_loss"] != val_loss

    # Without --eval-data, the run has that of the last start.
    drop_after(tmp_path, 2)
    again = train(DDP, tmp_path, *flags, "--resume")
    assert again.summary["val_loss"] == resumed.summary["val_loss"]


def test_a_run_that_holds_out_5_percent_does_not_resume_with_all_of_its_data(tmp_path):
    text = write_text(tmp_path / "data.txt", "a", count=400)
    eval_text = write_text(tmp_path / "eval.txt", "b")
    train(DDP, tmp_path, "--data", text, "--steps", 1)
    flags = ["--data", text, "--eval-data", eval_text, "--steps", 2, "--resume"]
    assert_refused(refuse(DDP, tmp_path, *flags), "--data", "--eval-data")


# --- what is refused


def no_text(folder: Path) -> str:
    (folder / "eval.txt").write_text("", encoding="utf-8")
    return "eval.txt"


def missing(folder: Path) -> str:
    return "eval.txt"


def too_short(folder: Path) -> str:
    (folder / "eval.txt").write_text("a few words", encoding="utf-8")
    return "eval.txt"


def the_same_file(folder: Path) -> str:
    (folder / "link.txt").symlink_to("data/a.txt")
    return "link.txt"


def a_copy(folder: Path) -> str:
    (folder / "eval.txt").write_bytes((folder / "data/a.txt").read_bytes())
    return "eval.txt"


def a_file_of_the_data(folder: Path) -> str:
    write_text(folder / "data/b.txt", "b")
    return "data/b.txt"


def other_tokens(folder: Path) -> str:
    text = write_text(folder / "b.txt", "b")
    prepare(folder, text, "tokens", "--tokenizer", write_tokenizer(folder / "tokenizer"))
    return "tokens"


REFUSED = {
    no_text: "no text",
    missing: "eval.txt",
    too_short: "--seq-len 32",
    the_same_file: "a.txt",
    a_copy: "its text",
    a_file_of_the_data: "b.txt",
    other_tokens: "tokenizer",
}


def test_what_cannot_be_evaluated_is_told(tmp_path):
    for make, word in REFUSED.items():
        folder = tmp_path / make.__name__
        (folder / "data").mkdir(parents=True)
        write_text(folder / "data/a.txt", "a")
        name = make(folder)
        result = refuse(DDP, folder, "--data", "data", "--eval-data", name)
        assert_refused(result, f"--eval-data {name}", word)
        assert not (folder / "run").exists()


# --- chats


@pytest.fixture
def base(tmp_path) -> Path:
    """A Hugging Face folder without a tokenizer."""
    write_folder(tmp_path / "base", config_of({**TINY, "max_position_embeddings": 512}))
    return tmp_path / "base"


def split_chats(folder: Path, count: int = 3) -> tuple[Path, Path]:
    """Write the pairs that a run would train on and hold out to two files."""
    helper = load("06_fsdp_zero/_finetune.py")
    lines = PAIRS.read_text(encoding="utf-8").splitlines()
    hashes = {line: helper.hash_of(helper.read_conversation(json.loads(line))) for line in lines}
    held_out = sorted(lines, key=hashes.get)[:count]
    train_lines = [line for line in lines if line not in held_out]
    (folder / "train.jsonl").write_text("\n".join(train_lines), encoding="utf-8")
    (folder / "held_out.jsonl").write_text("\n".join(held_out), encoding="utf-8")
    return folder / "train.jsonl", folder / "held_out.jsonl"


@pytest.mark.parametrize("nproc", [2, in_long(None)])
def test_chats_split_by_hand_train_as_the_split_of_the_script(tmp_path, base, nproc):
    train_file, held_out = split_chats(tmp_path)
    flags = [*CHAT_FLAGS, "--model", base]
    expected = train(FINETUNE, tmp_path / "a", *flags, "--data", PAIRS, nproc=nproc)
    flags += ["--data", train_file, "--eval-data", held_out]
    found = train(FINETUNE, tmp_path / "b", *flags, nproc=nproc)
    for key in ("first_loss", "last_loss", "val_loss", "val_loss_before", "answers"):
        assert found.summary[key] == expected.summary[key]
    assert found.summary["weights_sha256"] == expected.summary["weights_sha256"]


def test_a_finetuning_run_resumes_with_its_own_flags(tmp_path, base):
    """finetune.py has defaults of its own, which must not replace the flags of the run."""
    flags = ["--model", base, "--data", PAIRS, "--seq-len", 128, "--global-batch-size", 4]
    flags += ["--micro-batch-size", 2, "--adapters", 0, "--lr", 1e-3, "--save-dtype", "fp32"]
    train(FINETUNE, tmp_path, *flags, "--steps", 2, "--warmup-steps", 1)
    again = ("--run-dir", "run", "--resume", "--device", "cpu", "--steps", 3)
    resumed = run(FINETUNE, tmp_path, *again)
    assert resumed.code == 0, resumed
    assert len(resumed.column("loss")) == 3
    remembered = json.loads((tmp_path / "run/run.json").read_text(encoding="utf-8"))["flags"]
    assert (remembered["micro_batch_size"], remembered["save_dtype"]) == (2, "fp32")
    dtype = json.loads((tmp_path / "run/model/config.json").read_text(encoding="utf-8"))["dtype"]
    assert dtype == "float32"


@pytest.mark.full
def test_a_finetuning_run_resumes_with_longer_chats_for_evaluation(tmp_path, base):
    train_file, held_out = split_chats(tmp_path)
    longer = tmp_path / "longer.jsonl"
    longer.write_text(
        json.dumps({"prompt": "longer " * 50, "completion": "than any " * 5}) + "\n",
        encoding="utf-8",
    )
    flags = [*CHAT_FLAGS, "--model", base, "--data", train_file, "--seq-len", 1024]
    train(FINETUNE, tmp_path, *flags, "--eval-data", held_out)
    resumed = train(FINETUNE, tmp_path, *flags, "--eval-data", longer, "--steps", 3, "--resume")
    assert "resuming from" in resumed.out
    # Without --eval-data, the run has that of the last start.
    train(FINETUNE, tmp_path, *flags, "--steps", 4, "--resume")
    remembered = json.loads((tmp_path / "run/run.json").read_text(encoding="utf-8"))["flags"]
    assert remembered["eval_data"] == str(longer)


CHATS_REFUSED = {
    "the same file": (PAIRS.read_text(encoding="utf-8"), "--data"),
    "no chat": ("\n", "no row"),
    "no answer": ('{"messages": [{"role": "user", "content": "hi"}]}', "without an answer"),
    "no JSON": ("{", "line 1"),
}


def test_chats_that_cannot_be_evaluated_are_told(tmp_path, base):
    flags = [*CHAT_FLAGS, "--model", base, "--data", PAIRS, "--eval-data", "eval.jsonl"]
    for content, words in CHATS_REFUSED.values():
        (tmp_path / "eval.jsonl").write_text(content, encoding="utf-8")
        assert_refused(refuse(FINETUNE, tmp_path, *flags), "--eval-data eval.jsonl", words)


def test_chats_that_are_also_trained_on_are_counted(tmp_path, base):
    train_file, held_out = split_chats(tmp_path)
    with open(held_out, "a", encoding="utf-8") as file:
        file.write("\n" + train_file.read_text(encoding="utf-8").splitlines()[0])
    flags = [*CHAT_FLAGS, "--model", base, "--data", train_file, "--eval-data", held_out]
    result = train(FINETUNE, tmp_path, *flags, "--steps", 1)
    assert "4 chats held out" in result.out
    assert "1 of them" in result.out
