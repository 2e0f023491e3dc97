"""Corpora, tokenizers, and a batch order that does not depend on the number of processes."""

import hashlib
import itertools
import json
import math
import os
import shutil
import signal
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import filelock
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from old.exits import UserError

HELD_OUT = 0.05
EVAL_SEQUENCES = 96  # evaluation reads at most so many, spread evenly over the held-out text
PADDING = -100  # a target that no loss counts: cross_entropy's ignore_index
ROWS_PER_READ = 1000  # documents tokenized at a time
CACHE_FILES = ("train.npy", "held_out.npy", "corpus.json")
CACHE_VERSION = 1  # to be raised by whoever changes how text becomes tokens: what lies in a cache is of the old way


class Corpus(NamedTuple):
    train: np.ndarray  # token ids, one after the other, mapped from a file that the processes of a node share
    held_out: np.ndarray
    vocab_size: int
    sha256: str  # of both


def load_corpus(data: str = "stdlib", tokenizer: str = "bytes") -> Corpus:
    """Read `data`, hold out 5 % of its documents, tokenize. UserError for a source that cannot be read.

    The first process of a node does this and leaves the tokens in a folder of its own in CORPUS_CACHE (default: in the
    system's folder for temporary files), under a name made of the source's files, their sizes and times; the others
    wait and map them.
    """
    read, source = _source(data)
    known_by = repr((CACHE_VERSION, source, _tokenizer_source(tokenizer), HELD_OUT))
    cache = Path(os.environ.get("CORPUS_CACHE") or Path(tempfile.gettempdir(), f"corpus-cache-{os.getuid()}"))
    try:
        _make_private(cache)
        folder = cache / hashlib.sha256(known_by.encode()).hexdigest()[:20]
        with filelock.FileLock(folder.with_suffix(".lock")):
            if not all((folder / name).is_file() for name in CACHE_FILES):  # also if somebody cleared old files away
                shutil.rmtree(folder, ignore_errors=True)
                _tokenize(read(), data, tokenizer, folder)
    except OSError as error:  # numpy's has no errno when the disk is full
        raise UserError(f"cannot keep the tokens in {cache}: {error}; set CORPUS_CACHE to another folder") from None
    about = json.loads((folder / "corpus.json").read_text())
    train, held_out = (np.load(folder / f"{part}.npy", mmap_mode="r") for part in ("train", "held_out"))
    return Corpus(train, held_out, **about)


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise UserError(f"{folder} belongs to somebody else: set CORPUS_CACHE to a folder of yours")


def _tokenize(documents: list[bytes], data: str, tokenizer: str, folder: Path) -> None:
    """Leave tokens and vocabulary in `folder`, all of them or none."""
    if not any(documents):
        raise UserError(f"--data {data} holds no text")
    encode, vocab_size = (_encode_bytes, 256) if tokenizer == "bytes" else _hf_tokenizer(tokenizer)
    unfinished = folder.with_suffix(".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    sha = hashlib.sha256()
    for part, chosen in zip(("train", "held_out"), _split(documents), strict=True):
        tokens = np.concatenate([encode(chosen[i : i + ROWS_PER_READ]) for i in range(0, len(chosen), ROWS_PER_READ)])
        np.save(unfinished / f"{part}.npy", tokens)
        sha.update(tokens)
    about = {"vocab_size": vocab_size, "sha256": sha.hexdigest()}
    (unfinished / "corpus.json").write_text(json.dumps(about))
    unfinished.rename(folder)


def _files(paths: list[Path]) -> list[tuple]:
    """Path, size and time of change of each file: what the cache is known by."""
    return [(str(path.resolve()), (found := path.stat()).st_size, found.st_mtime_ns) for path in paths]


def _tokenizer_source(name: str) -> object:
    return _files(sorted(Path(name).iterdir())) if Path(name).is_dir() else name


def _source(data: str) -> tuple[Callable[[], list[bytes]], object]:
    """A function that reads the documents of `data`, and what the cache knows them by."""
    if data == "stdlib":
        files = []
        for folder, subfolders, names in os.walk(sysconfig.get_paths()["stdlib"]):
            skip = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
            subfolders[:] = [name for name in subfolders if name not in skip]
            files += [Path(folder, name) for name in names if name.endswith(".py")]
        return lambda: [file.read_bytes() for file in sorted(files)], _files(sorted(files))
    if data.startswith("hf:"):
        try:
            from datasets import load_dataset

            rows = load_dataset(data.removeprefix("hf:"), split="train")
            texts = rows["text"]
        except ImportError:
            raise UserError(f"--data {data} needs the package datasets: pip install datasets") from None
        except Exception as error:  # the hub's client raises dozens of kinds: network, name, licence, layout
            raise UserError(f"--data {data}: {type(error).__name__}: {error}") from None
        return lambda: _encode_rows(texts, data), (data, rows._fingerprint)
    path = Path(data)
    if not path.is_file():
        raise UserError(f"--data {data}: no such file (stdlib, a text, .jsonl or .parquet file, or hf:NAME)")
    return lambda: _read_file(path), _files([path])


def _read_file(path: Path) -> list[bytes]:
    try:
        if path.suffix.lower() == ".jsonl":
            lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
            return _encode_rows([json.loads(line)["text"] for line in lines], str(path))
        if path.suffix.lower() == ".parquet":
            from pyarrow import parquet

            return _encode_rows(parquet.read_table(path, columns=["text"])["text"].to_pylist(), str(path))
        return [path.read_bytes()]
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise UserError(
            f"--data {path} cannot be read as {path.suffix or 'text'} with a column text: {error!r}"
        ) from None


def _encode_rows(texts: Iterable[object], data: str) -> list[bytes]:
    """UserError for a row that is no text, such as a missing value."""
    documents = []
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise UserError(f"--data {data}: in row {number} the column text is {text!r}, no text")
        documents.append(text.encode())
    return documents


def _split(documents: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Hold out the 5 % whose contents hash lowest: stable, and copies of a file fall on one side."""
    if len(set(documents)) == 1:
        cut = int(len(documents[0]) * (1 - HELD_OUT))
        return [documents[0][:cut]], [documents[0][cut:]]
    hashes = [hashlib.sha256(document).digest() for document in documents]
    unique = sorted(set(hashes))
    held_out = set(unique[: math.ceil(len(unique) * HELD_OUT)])
    train = [d for d, h in zip(documents, hashes, strict=True) if h not in held_out]
    return train, [d for d, h in zip(documents, hashes, strict=True) if h in held_out]


def _encode_bytes(documents: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(d + b"\0" for d in documents), dtype=np.uint8)  # text holds no NUL: it ends one


def load_tokenizer(name: str):
    """The Hugging Face tokenizer of that name or folder; UserError if it cannot be had."""
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name)
    except ImportError:
        raise UserError(f"--tokenizer {name} needs the package transformers: pip install transformers") from None
    except Exception as error:  # as above: not there, no network, no licence, not a tokenizer
        raise UserError(f"--tokenizer {name}: {type(error).__name__}: {error}") from None


def _hf_tokenizer(name: str) -> tuple[Callable[[list[bytes]], np.ndarray], int]:
    """What turns documents into tokens, and the size of its vocabulary."""
    tokenizer = load_tokenizer(name)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def encode(documents: list[bytes]) -> np.ndarray:
        texts = [d.decode("utf-8", errors="replace") for d in documents]
        ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return np.array([token for one in ids for token in (*one, *end)], dtype=np.uint32)

    return encode, len(tokenizer)


class Sequences(Dataset):
    """Non-overlapping windows: item i is (inputs, targets), each int64 [seq_len], targets one token on."""

    def __init__(self, tokens: np.ndarray, seq_len: int) -> None:
        self.tokens, self.seq_len = tokens, seq_len

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        window = self.tokens[i * self.seq_len : (i + 1) * self.seq_len + 1].astype(np.int64)
        return torch.from_numpy(window[:-1]), torch.from_numpy(window[1:])


def batch_order(
    n: int,
    *,
    global_batch_size: int,
    micro_batch_size: int,
    seed: int,
    start_step: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[list[int]]:
    """Which of n sequences a rank reads, micro-batch by micro-batch, from 0-based `start_step` on, for ever.

    Position p of the endless stream is item p % n of the permutation of epoch p // n, and step s of
    global batch size G reads positions s·G to (s+1)·G: a function of seed and step alone. Rank r takes
    the r-th equal part of each step, so ranks never overlap and each sequence comes once per epoch.
    `rank` of `world_size` counts along the data-parallel dimension: ranks that share a batch share a number.
    """
    share = global_batch_size // world_size
    epoch, order = -1, np.empty(0)
    for step in itertools.count(start_step):
        first = step * global_batch_size + rank * share
        for start in range(first, first + share, micro_batch_size):
            batch = []
            for position in range(start, start + micro_batch_size):
                if position // n != epoch:
                    epoch = position // n
                    order = np.random.default_rng([seed, epoch]).permutation(n)
                batch.append(int(order[position % n]))
            yield batch


def require_sequences(tokens: np.ndarray, *, seq_len: int, count: int, asked: str) -> None:
    """UserError, by what asked for them, if a text of these tokens has fewer than `count` sequences."""
    if (there := len(Sequences(tokens, seq_len))) < count:
        raise UserError(f"{asked}: the text has {there} sequences of --seq-len {seq_len}, lower one")


def train_batches(
    tokens: np.ndarray,
    *,
    seq_len: int,
    global_batch_size: int,
    micro_batch_size: int,
    seed: int,
    device: torch.device,
    start_step: int = 0,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's micro-batches, for ever: inputs and targets, each int64 [micro_batch_size, seq_len].

    They stay on the CPU, in pinned memory if `device` is a GPU. The order is batch_order's. UserError if the text is
    too short.
    """
    dataset = Sequences(tokens, seq_len)
    if len(dataset) < global_batch_size:
        raise UserError(
            f"--data gives {len(dataset)} training sequences of --seq-len {seq_len}, "
            f"less than one --global-batch-size {global_batch_size}: add text or lower these"
        )
    order = batch_order(
        len(dataset),
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        seed=seed,
        start_step=start_step,
        rank=rank,
        world_size=world_size,
    )
    loader = DataLoader(
        dataset,
        batch_sampler=order,
        generator=torch.Generator(),  # or the loader would draw from the one that a resume restores
        num_workers=num_workers,
        worker_init_fn=_ignore_signals,
        pin_memory=device.type == "cuda",
    )
    return iter(loader)


def _ignore_signals(_worker: int) -> None:
    """A scheduler signals every process; the rank decides, and its workers must live for its last steps."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def eval_batches(
    tokens: np.ndarray, *, seq_len: int, batch_size: int, rank: int = 0, world_size: int = 1
) -> list[tuple[Tensor, Tensor]]:
    """This rank's part of the held-out sequences: inputs and targets, each int64 [batch_size, seq_len].

    Over all (data-parallel) ranks each sequence is read once. Every rank gets equally many batches, because a sharded
    model gathers its weights in forward, and a rank that calls it once more than the others waits for ever; rows that
    only pad have PADDING as their targets. UserError if the held-out text is shorter than one sequence.
    """
    dataset = Sequences(tokens, seq_len)
    if not len(dataset):
        raise UserError(
            f"--data: held-out text has {len(tokens)} tokens, and one sequence of --seq-len {seq_len} needs "
            f"{seq_len + 1}: add text"
        )
    chosen = np.unique(np.linspace(0, len(dataset) - 1, min(EVAL_SEQUENCES, len(dataset)), dtype=np.int64))
    rows_of_largest_share = math.ceil(len(chosen) / world_size)
    batches = math.ceil(rows_of_largest_share / batch_size)
    inputs = torch.zeros(batches * batch_size, seq_len, dtype=torch.int64)
    targets = torch.full_like(inputs, PADDING)
    for row, i in enumerate(chosen[rank::world_size].tolist()):
        inputs[row], targets[row] = dataset[i]
    return list(zip(inputs.split(batch_size), targets.split(batch_size), strict=True))
