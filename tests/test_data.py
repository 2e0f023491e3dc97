"""lm/data.py: the order of the training samples, the held-out split, and the cached tokens."""

import itertools
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.harness import ROOT, in_full

from common.exits import UserError
from lm import data
from training.batches import PADDING, Batches


def corpus_of(sequences: int) -> data.Corpus:
    """Return a corpus of sequences of 8 tokens. Each token is its position in the text."""
    tokens = np.arange(8 * sequences + 1, dtype=np.uint16)
    return data.Corpus(tokens, tokens, vocab_size=65536, sha256="")


def batches_of(
    sequences: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    micro: int | None = None,
    batch: int = 12,
    seed: int = 3,
) -> Batches:
    """Return the batches of one rank, for sequences of 8 tokens."""
    sizes = SimpleNamespace(seq_len=8, global_batch_size=batch, micro_batch_size=micro, seed=seed)
    samples = data.sequences(corpus_of(sequences), seq_len=8)
    return Batches(*samples, sizes, rank=rank, world_size=world_size)


def steps(
    sequences: int, world_size: int, count: int, start: int = 0, **options
) -> list[list[int]]:
    """Return the indices of the sequences that all ranks read at each step, in rank order."""
    read = [[] for _ in range(count)]
    for rank in range(world_size):
        batches = batches_of(sequences, rank=rank, world_size=world_size, **options)
        stream = batches.stream(start)
        for step in range(count):
            for inputs, targets in itertools.islice(stream, batches.accumulation_steps):
                assert torch.equal(inputs[:, 1:], targets[:, :-1])  # targets are the next tokens
                read[step] += (inputs[:, 0] // 8).tolist()
    return read


@pytest.mark.parametrize("world_size", [1, 3])
def test_order_depends_on_seed_and_step_alone(world_size):
    one_rank = steps(50, 1, 20)
    assert steps(50, world_size, 20, micro=2) == one_rank
    assert steps(50, world_size, 13, start=7) == one_rank[7:]
    assert steps(50, world_size, 20, seed=4) != one_rank


def test_each_sequence_once_per_epoch_in_a_new_permutation():
    stream = list(itertools.chain.from_iterable(steps(50, 3, 25)))  # 300 positions: 6 epochs
    epochs = [stream[i : i + 50] for i in range(0, 300, 50)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6


def test_a_mixture_has_its_weights_in_each_thousand_on_any_ranks_and_after_a_resume(tmp_path):
    sizes = {"a": 250, "b": 31, "c": 9}  # sequences of 8 tokens
    for name, count in sizes.items():
        text = "".join(f"{name}{i:06d}\n" for i in range(count))
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    names = [str(tmp_path / f"{name}.txt") for name in sizes]
    mixed = ",".join(f"{name}:{weight}" for name, weight in zip(names, (7, 2, 1), strict=True))
    eval_text = tmp_path / "eval.txt"
    eval_text.write_text("some other text", encoding="utf-8")
    corpus = data.load_corpus(mixed, "bytes", eval_data=str(eval_text))

    def texts(world_size: int, start: int, count: int) -> list[str]:
        """Return the sequences that all ranks read from a step on, in rank order."""
        sizes = SimpleNamespace(seq_len=8, global_batch_size=100, micro_batch_size=None, seed=3)
        steps = [[] for _ in range(count)]
        for rank in range(world_size):
            samples = data.sequences(corpus, seq_len=8)
            batches = Batches(*samples, sizes, rank=rank, world_size=world_size)
            for step, (inputs, _) in zip(steps, batches.stream(start), strict=False):
                step += [bytes(row.tolist()).decode() for row in inputs]
        return list(itertools.chain.from_iterable(steps))

    stream = texts(1, 0, 30)
    assert texts(2, 0, 30) == texts(5, 0, 30) == stream
    assert texts(4, 15, 15) == stream[1500:]
    for start in (0, 1000, 2000):
        block = "".join(text[0] for text in stream[start : start + 1000])
        assert [block.count(name) for name in sizes] == [700, 200, 100]
    for name, count in sizes.items():
        of_part = [text for text in stream if text[0] == name]
        assert len(set(of_part[:count])) == len(set(of_part[count : 2 * count])) == count

    same = data.load_corpus(mixed, "bytes", eval_data=str(eval_text))
    others = [mixed.replace(":7", ":6"), ",".join(names)]
    hashes = [data.load_corpus(m, "bytes", eval_data=str(eval_text)).sha256 for m in others]
    assert same.sha256 == corpus.sha256
    assert len({corpus.sha256, *hashes}) == 3
    whole = data.load_corpus(",".join(names), "bytes")
    assert (
        len(whole.train) + len(whole.held_out) == 8 * sum(sizes.values()) + 6
    )  # and an end for each side


MIXTURES_REFUSED = {
    "a.txt:1,b.txt": "b.txt:0.5",
    "a.txt:1,b.txt:0": "no weight above 0",
    "a.txt,a.txt": "twice",
    "a.txt,": "empty",
    "a.txt:1000000,b.txt:1": "thousandth",
    "a.txt,link.txt": "two parts",
}


@pytest.mark.parametrize("mixed", MIXTURES_REFUSED)
def test_a_mixture_that_cannot_be_read_is_refused(tmp_path, monkeypatch, mixed):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        Path(f"{name}.txt").write_text(f"text of {name}\n" * 200, encoding="utf-8")
    Path("link.txt").symlink_to("a.txt")
    sizes = SimpleNamespace(seq_len=8, global_batch_size=2, micro_batch_size=None, seed=3)
    with pytest.raises(UserError, match=MIXTURES_REFUSED[mixed]):
        Batches(*data.sequences(data.load_corpus(mixed), 8), sizes, rank=0, world_size=1)


@pytest.mark.parametrize("world_size", [1, 3, 64])
@pytest.mark.parametrize("n", [10, 96])
def test_ranks_share_the_held_out_sequences(world_size, n):
    """Each sequence is read once, and every rank has the same number of batches of one shape."""
    corpus = corpus_of(4 * world_size)._replace(held_out=corpus_of(n).held_out)
    sizes = SimpleNamespace(seq_len=8, global_batch_size=4 * world_size, micro_batch_size=4, seed=0)
    samples = data.sequences(corpus, seq_len=8)
    ranks = [
        Batches(*samples, sizes, rank=rank, world_size=world_size).evaluation()
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    sequences_read = []
    for inputs, targets in itertools.chain.from_iterable(ranks):
        assert inputs.shape == targets.shape == (4, 8)
        for row, wanted in zip(inputs, targets, strict=True):
            padding = wanted == PADDING
            assert padding.all() == padding.any()
            if not padding.all():
                sequences_read.append(int(row[0]) // 8)
    assert sorted(sequences_read) == list(range(n))


def test_standard_library_is_split_by_file():
    corpus = data.load_corpus("stdlib", "bytes")
    assert len(corpus.train) > 5e6
    assert corpus.vocab_size == 256
    train = bytes(corpus.train).split(b"\0")
    held_out = bytes(corpus.held_out).split(b"\0")
    assert 0.03 < len(held_out) / len(train) < 0.07
    on_both_sides = set(train) & set(held_out)
    assert on_both_sides <= {b""}  # an empty file, and what follows the last separator


def test_a_copy_of_a_held_out_document_is_held_out_too(tmp_path):
    rows = [f"document number {i}, as long as the others are" for i in range(40)] * 2
    file = tmp_path / "d.jsonl"
    file.write_text("\n".join(json.dumps({"text": row}) for row in rows), encoding="utf-8")
    corpus = data.load_corpus(str(file), "bytes")
    train = set(bytes(corpus.train).split(b"\0")) - {b""}
    held_out = set(bytes(corpus.held_out).split(b"\0")) - {b""}
    assert len(train) == 38
    assert len(held_out) == 2
    assert not train & held_out


def test_copies_of_one_document_are_split_within_it(tmp_path):
    file = tmp_path / "d.jsonl"
    line = json.dumps({"text": "a line with \u2028 in it " * 9}, ensure_ascii=False)
    file.write_text(f"{line}\n" * 5, encoding="utf-8")
    corpus = data.load_corpus(str(file), "bytes")
    assert len(corpus.train) > 10 * len(corpus.held_out) > 0


def documents() -> list[str]:
    return [f"line {i}: naïve café, 東京\n" * 3 for i in range(30)]


def test_text_jsonl_parquet_and_hf_hold_the_same(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pytest.importorskip("datasets")
    from pyarrow import parquet

    (tmp_path / "hub").mkdir()
    jsonl = tmp_path / "hub" / "d.jsonl"
    jsonl.write_text(
        "\n".join(json.dumps({"text": d, "id": 1}) for d in documents()), encoding="utf-8"
    )
    parquet.write_table(
        pa.table({"text": documents(), "id": list(range(30))}), tmp_path / "d.parquet"
    )
    expected = data.load_corpus(str(jsonl), "bytes")
    for source in (str(tmp_path / "d.parquet"), f"hf:{tmp_path / 'hub'}"):
        corpus = data.load_corpus(source, "bytes")
        assert bytes(corpus.train) == bytes(expected.train)
        assert bytes(corpus.held_out) == bytes(expected.held_out)

    # A text file is one document: its last 5 % are held out, and each part ends with a 0.
    text = "".join(documents())
    (tmp_path / "d.txt").write_text(text, encoding="utf-8")
    corpus = data.load_corpus(str(tmp_path / "d.txt"), "bytes")
    assert bytes(corpus.train)[:-1] + bytes(corpus.held_out)[:-1] == text.encode()


# --- the cached tokens


WORDS = "some words to train on, " * 50


@pytest.fixture
def text(tmp_path, monkeypatch) -> Path:
    """A text that has not been tokenized yet."""
    monkeypatch.setenv("CORPUS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "d.txt").write_text(WORDS, encoding="utf-8")
    return tmp_path / "d.txt"


def test_a_text_is_tokenized_once_and_then_mapped(text, monkeypatch):
    first = data.load_corpus(str(text))
    monkeypatch.setattr(data, "tokenize", lambda *_: pytest.fail("tokenized again"))
    second = data.load_corpus(str(text))
    assert isinstance(second.train, np.memmap)
    assert bytes(second.train) == bytes(first.train)
    assert second.sha256 == first.sha256
    with pytest.raises(ValueError, match="read-only"):
        second.train[0] = 0


def test_tokens_that_were_cleared_in_part_are_made_again(text):
    first = data.load_corpus(str(text))
    for gone in ("train.npy", "held_out.npy", "corpus.json"):
        [left] = text.parent.glob(f"cache/*/{gone}")
        left.unlink()
        assert data.load_corpus(str(text)).sha256 == first.sha256


@pytest.mark.parametrize("files_written", [2, *map(in_full, (0, 1))])
def test_a_killed_tokenization_leaves_no_corpus(text, files_written):
    """A process is killed while it writes a file, and the next one tokenizes again."""
    program = f"""
import os, signal
from lm import data

fsync, left = os.fsync, iter(range({files_written}))

def kill_at_last(file):  # each file is complete after an fsync
    if next(left, None) is None:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(file)

os.fsync = kill_at_last
data.load_corpus({str(text)!r})
"""
    killed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    found = data.load_corpus(str(text))
    assert bytes(found.train)[:-1] + bytes(found.held_out)[:-1] == WORDS.encode()
    [folder] = [path for path in (text.parent / "cache").iterdir() if path.is_dir()]
    assert not list(folder.glob("*.tmp"))


def test_a_folder_that_cannot_keep_tokens_is_told(text, monkeypatch):
    monkeypatch.setenv("CORPUS_CACHE", str(text))
    with pytest.raises(UserError, match="CORPUS_CACHE"):
        data.load_corpus("stdlib")


# --- imports


def test_workers_and_planner_need_no_torch():
    code = "import sys, lm.encoder, lm.shapes, lm.token_folder; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
