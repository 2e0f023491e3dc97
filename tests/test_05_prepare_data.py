"""05_ddp/prepare_data.py: kills and restarts change no byte, and no document is lost.

Errors name the place in the input, memory does not grow with the text, and a folder of tokens
trains as its text does.
"""

import bz2
import gzip
import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pytest
from pyarrow import parquet
from support.harness import (
    BASELINE,
    TEXT,
    TINY,
    assert_refused,
    command,
    content,
    finish,
    holds,
    kill_all,
    run,
    start,
    train,
    with_fault,
)

from common.exits import UserError
from lm import data

SCRIPT = "05_ddp/prepare_data.py"
ROWS = [f"document {i}: naïve café, 東京\n" * (1 + i % 7) for i in range(400)]


def prepare(folder: Path, *flags, script: str | Path = SCRIPT) -> tuple[dict[str, bytes], dict]:
    """Run the script in `folder`. Return the files that it wrote to tokens/, and its summary."""
    flags = ["--out", "tokens", "--json", "summary.json", "--workers", 1, *flags]
    result = run(script, folder, *flags, HF_HUB_OFFLINE="1")
    assert result.code == 0, result
    return content(folder / "tokens"), result.summary


def jsonl(rows: list, column: str = "text") -> str:
    """Return the content of a .jsonl file with these texts."""
    return "".join(json.dumps({"id": 1, column: row}) + "\n" for row in rows)


def documents(files: dict[str, bytes]) -> list[str]:
    """Return the training and held-out documents of tokens that are bytes."""
    both = files["train.npy"][128:] + files["held_out.npy"][128:]
    return both.decode().split("\0")[:-1]


def tokens(files: dict[str, bytes]) -> list[np.ndarray]:
    """Return the training tokens and the held-out tokens, of dtype uint16."""
    return [np.frombuffer(files[name][128:], np.uint16) for name in ("train.npy", "held_out.npy")]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A small tokenizer with two special tokens, and its folder as name_or_path."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(ROWS, vocab_size=300, special_tokens=["<end>", "<turn>"])
    PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<end>").save_pretrained(
        folder
    )
    return AutoTokenizer.from_pretrained(folder)


def test_killed_at_any_moment_and_on_other_workers_the_same_bytes(tmp_path):
    small_parts = with_fault(SCRIPT, tmp_path, "PART_BYTES = 8 * 2**20", "PART_BYTES = 1000")
    (tmp_path / "d.jsonl").write_text(jsonl(ROWS), encoding="utf-8")
    flags = ["--data", tmp_path / "d.jsonl"]
    whole, _ = prepare(tmp_path / "once", *flags, "--workers", 1, script=small_parts)
    folder = tmp_path / "killed"
    folder.mkdir()
    argv = command(small_parts, *flags, "--out", "tokens", "--workers", 2)

    def parts_made() -> list[Path]:
        return list(folder.glob("tokens/parts/*.documents"))

    def at_least(count: int) -> bool:
        return len(parts_made()) >= count

    for least in (1, 20):
        process = start(argv, folder)
        assert holds(process, partial(at_least, least))
        workers = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        assert not psutil.wait_procs(workers, timeout=60)[1]
        kill_all(process)
    made = {path: path.stat().st_mtime_ns for path in parts_made()}
    process = start(argv, folder)
    assert holds(process, partial(at_least, len(made) + 6))
    assert all(path.stat().st_mtime_ns == when for path, when in made.items())  # not made again
    kill_all(process)
    resumed, _ = prepare(folder, *flags, "--workers", 3, script=small_parts)
    assert resumed == whole
    assert set(whole) == {"train.npy", "held_out.npy", "corpus.json", "source.json"}
    assert sorted(documents(whole)) == sorted(ROWS)
    (tmp_path / "d.jsonl").write_text(jsonl(ROWS[1:]), encoding="utf-8")
    assert_refused(finish(start(argv, folder), folder), "--out tokens", "delete it")


@pytest.mark.full
def test_killed_when_all_is_joined(tmp_path):
    script = with_fault(
        SCRIPT,
        tmp_path,
        "    files.delete(args.out / helper.PARTS)\n",
        "    os.kill(os.getpid(), 9)\n",
    )
    (tmp_path / "d.txt").write_text("".join(ROWS), encoding="utf-8")
    flags = ["--data", tmp_path / "d.txt", "--workers", 1]
    run(script, tmp_path / "killed", "--out", "tokens", *flags)
    assert list(tmp_path.glob("killed/tokens/parts/*"))
    assert prepare(tmp_path / "killed", *flags)[0] == prepare(tmp_path / "once", *flags)[0]


def test_a_worker_that_is_killed_ends_the_run(tmp_path):
    script = with_fault(
        SCRIPT, tmp_path, "    began = time.process_time()\n", "    os.kill(os.getpid(), 9)\n"
    )
    assert_refused(run(script, tmp_path / "run", "--workers", 2), "--workers")
    assert not list(tmp_path.glob("run/runs/tokens/corpus.json"))


def test_a_mixed_folder_loses_nothing(tmp_path):
    texts = [f"{text} in file {i}" for i, text in enumerate(ROWS)]
    web = tmp_path / "web"
    (web / "deep").mkdir(parents=True)
    (web / "a.jsonl").write_text(jsonl(texts[:50]) + "\n", encoding="utf-8")
    (web / "b.jsonl.gz").write_bytes(gzip.compress(jsonl(texts[50:100]).encode()))
    with pa.output_stream(str(web / "d.jsonl.zst")) as file:
        file.write(jsonl(texts[100:200]).encode())
    parquet.write_table(
        pa.table({"text": texts[200:397]}), web / "deep/e.parquet", row_group_size=40
    )
    (web / "deep/f.md").write_text(texts[397], encoding="utf-8")
    (web / "g.txt.bz2").write_bytes(bz2.compress(texts[398].encode()))
    (web / "h.txt").write_text(texts[399], encoding="utf-8")
    files, _ = prepare(tmp_path, "--data", "web", "--workers", 2)
    assert sorted(documents(files)) == sorted(texts)
    (web / ".cache").mkdir()
    (web / ".cache/a.metadata").write_text("left by a download", encoding="utf-8")
    prepare(tmp_path, "--data", "web")
    (web / "notes.csv").write_text("a,b", encoding="utf-8")
    assert_refused(run(SCRIPT, tmp_path, "--data", "web", "--out", "other"), "web/notes.csv")


@pytest.mark.full  # tests/test_data.py reads one
def test_a_data_set_that_was_saved(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"body": ROWS}).save_to_disk(tmp_path / "saved")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub/d.jsonl").write_text(jsonl(ROWS, "body"), encoding="utf-8")
    for name in ("saved", "hub"):
        files, _ = prepare(
            tmp_path / f"of-{name}", "--data", f"hf:{tmp_path / name}", "--column", "body"
        )
        assert sorted(documents(files)) == sorted(ROWS)


def parquet_file(**columns) -> bytes:
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


REFUSED = {  # file: its bytes, then words of the error message
    "utf16.txt": ("a text\n".encode("utf-16"), "byte 0", "position 0"),
    "latin1.jsonl": (b'{"text": "a"}\n{"text": "\xe9"}\n', "byte 14"),
    "missing.jsonl": (b'{"text": "a"}\n{"body": "b"}\n', "byte 14", "column text", "body"),
    "null.jsonl": (b'{"text": "a"}\n\n{"text": null}\n', "byte 15", "column text"),
    "broken.jsonl": (b'{"text": "a"}\n{"text": "b\n{"text": "c"}\n', "byte 14"),
    "cut.jsonl.gz": (gzip.compress(os.urandom(9000))[:5000], "cut.jsonl.gz"),
    "missing.parquet": (parquet_file(body=["a"]), "column text", "body"),
    "null.parquet": (parquet_file(text=["a", None]), "column text", "None"),
    "a.json": (b'[{"text": "a"}]', "a.json"),
    "empty.txt": (b"",),
}


def test_what_is_no_text_is_refused_with_its_place(tmp_path):
    for name, (content_of_file, *words) in REFUSED.items():
        (tmp_path / name).write_bytes(content_of_file)
        flags = ("--data", name, "--workers", 1, "--out", f"tokens of {name}")
        assert_refused(run(SCRIPT, tmp_path, *flags), "--data", *words)
    assert not list(tmp_path.glob("*/*.npy"))


def test_special_tokens_in_a_text_are_text_and_one_ends_a_document(tmp_path, tokenizer):
    rows = [f"{text}<end> and <turn>{text}" for text in ROWS]
    (tmp_path / "d.jsonl").write_text(jsonl(rows), encoding="utf-8")
    flags = ["--data", tmp_path / "d.jsonl", "--tokenizer", tokenizer.name_or_path]
    for case, end_flags in {"eos": [], "named": ["--end-token", "<turn>"]}.items():
        files, summary = prepare(tmp_path / case, *flags, *end_flags)
        end = summary["end_id"]
        train_tokens, held_out_tokens = tokens(files)
        assert (train_tokens == end).sum() + (held_out_tokens == end).sum() == len(rows)
        assert train_tokens[-1] == end
        assert held_out_tokens[-1] == end
        first_end = train_tokens.tolist().index(end)
        assert tokenizer.decode(train_tokens[:first_end]) == rows[0]
    assert_refused(run(SCRIPT, tmp_path, *flags, "--end-token", "<eot>"), "--end-token <eot>")


def test_a_long_text_becomes_several_documents(tmp_path):
    lines = [f"line {i} of a long text\n" for i in range(120_000)]
    (tmp_path / "long.txt").write_text("".join(lines), encoding="utf-8")
    files, summary = prepare(tmp_path, "--data", tmp_path / "long.txt")
    # of 1 MB, each with more than 5 % of the text: the last 5 % of each are held out
    texts = documents(files)
    assert summary["documents"] == len(texts) == 6
    assert "".join(train + held for train, held in zip(texts[:3], texts[3:], strict=True)) == (
        "".join(lines)
    )


@pytest.mark.full
def test_a_long_document_has_the_tokens_of_the_whole_text(tmp_path):
    """The tokenizer puts a space before each text that it gets, and pieces are texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    special = ["<unk>", "<end>"]
    core.train_from_iterator(ROWS, trainers.BpeTrainer(vocab_size=400, special_tokens=special))
    with_space = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<end>", unk_token="<unk>"
    )
    with_space.save_pretrained(tmp_path / "tokenizer")
    text = "".join(ROWS * 20)[:700_000].replace("\n", " ")
    others = [f"{i} {ROWS[i % 400]}" * 400 for i in range(300)]
    (tmp_path / "long.jsonl").write_text(jsonl([text, *others]), encoding="utf-8")
    flags = ["--data", "long.jsonl", "--tokenizer", "tokenizer"]
    files, summary = prepare(tmp_path, *flags)
    expected = [*with_space(text, add_special_tokens=False).input_ids, summary["end_id"]]
    first_of_side = [side[: len(expected)].tolist() for side in tokens(files)]
    assert expected in first_of_side


def test_ids_with_gaps(tmp_path):
    """The largest id decides about the size of the model and the type of the tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"word": 0, "other": 1, "<end>": 700}, unk_token="other"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>").save_pretrained(
        tmp_path / "gaps"
    )
    rows = ["word word other".ljust(20 + i) for i in range(300)]  # no copies: they would be cut
    (tmp_path / "d.jsonl").write_text(jsonl(rows), encoding="utf-8")
    flags = ["--tokenizer", "gaps", "--data"]
    files, summary = prepare(tmp_path, *flags, "d.jsonl")
    assert summary["vocab_size"] == 701
    assert summary["dtype"] == "uint16"
    assert np.concatenate(tokens(files)).tolist() == [0, 0, 1, 700] * 300
    flags += ["d.jsonl", "--model", "nano", "--steps", 1, "--seq-len", 16]
    for name in ("d.jsonl", "tokens"):
        more = ["--data", name, "--run-dir", f"run of {name}", "--keep", 0]
        assert train(BASELINE, tmp_path, *flags, *more).summary["steps"] == 1
    result = run(BASELINE, tmp_path, *flags, "--model", "tiny.json", "--device", "cpu")
    assert_refused(result, "--model tiny.json", "701")


def test_a_folder_of_tokens_trains_as_its_text_does(tmp_path, tokenizer):
    """The same documents are held out, also of copies and where a document is cut."""
    rows = [*ROWS, *ROWS[:100], "a long row: " + ROWS[6] * 40]
    (tmp_path / "d.jsonl").write_text(jsonl(rows), encoding="utf-8")
    (tmp_path / "wide.json").write_text(json.dumps({**TINY, "vocab_size": 320}), encoding="utf-8")
    flags = ["--steps", 3, "--model", tmp_path / "wide.json"]
    for name in ("bytes", tokenizer.name_or_path):
        folder = tmp_path / Path(name).name
        prepare(folder, "--data", tmp_path / "d.jsonl", "--tokenizer", name)
        text = train(
            BASELINE, folder / "text", *flags, "--data", tmp_path / "d.jsonl", "--tokenizer", name
        )
        mapped = train(BASELINE, folder / "mapped", *flags, "--data", folder / "tokens")
        assert mapped.column("loss") == text.column("loss")
        for key in ("val_loss", "weights_sha256"):
            assert mapped.summary[key] == text.summary[key]
    result = run(
        BASELINE, tmp_path / "other", *flags, "--data", folder / "tokens", "--tokenizer", "bytes"
    )
    assert_refused(result, "--tokenizer bytes", f"--tokenizer {tokenizer.name_or_path}")


def test_a_large_text_names_the_command_that_prepares_it(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "LARGEST_TEXT", 1000)
    with pytest.raises(UserError, match=f"{SCRIPT} --data {TEXT} --tokenizer bytes --out"):
        data.tokenize([str(TEXT)], "bytes", tmp_path / "tokens", str(TEXT))


@pytest.mark.full
def test_ten_times_the_text_takes_no_more_memory(tmp_path):
    peaks = []
    for copies in (5, 50):
        # documents of a usual size: each takes about 70 bytes when the parts are joined
        rows = [f"{i} " + ROWS[i % 400] * 20 for i in range(500 * copies)]
        (tmp_path / "d.jsonl").write_text(jsonl(rows), encoding="utf-8")
        _, summary = prepare(tmp_path / str(copies), "--data", tmp_path / "d.jsonl", "--workers", 2)
        peaks.append(summary["peak_memory_bytes"] + summary["worker_peak_memory_bytes"])
    assert peaks[1] < 1.1 * peaks[0]
