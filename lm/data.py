"""Corpora, and a batch order that does not depend on the number of processes."""

import hashlib
import itertools
import json
import math
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import filelock
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from common.exits import UserError
from lm.corpus import HELD_OUT, documents, encoder, load_tokenizer, sources

CACHE_VERSION = 3  # to be raised by whoever changes how text becomes tokens
# bytes: a training script tokenizes in one process, and has all documents in memory
LARGEST_TEXT = 200_000_000
EVAL_SEQUENCES = 96  # evaluation reads at most so many, spread evenly over the held-out text
PADDING = -100  # a target that no loss counts: cross_entropy's ignore_index


class Corpus(NamedTuple):
    # token ids, one after the other, mapped from a file that the processes of a node share
    train: np.ndarray
    held_out: np.ndarray
    vocab_size: int
    sha256: str  # of both


def load_corpus(data: str, tokenizer: str | None = None, model: str = "nano") -> Corpus:
    """The tokens of `data`: a folder that 05_ddp/prepare_data.py has made, or a small text, 5 % of its documents held
    out. Without `tokenizer`: that of the folder `model`, or bytes. UserError for a source that cannot be read.
    A text's tokens stay in CORPUS_CACHE (default: a folder for temporary files), known by files, sizes and times."""
    tokenizer = tokenizer or (model if any(Path(model).glob("tokenizer*")) else None)
    if Path(data, "corpus.json").is_file():
        return _mapped(Path(data), tokenizer)
    tokenizer = tokenizer or "bytes"
    origins, known_by = sources(data)
    files = [
        (str(path), path.stat().st_mtime_ns)
        for path in sorted(Path(tokenizer).resolve().glob("token*"))
    ]
    key = repr((CACHE_VERSION, data.startswith("hf:") and data, known_by, files or tokenizer))
    cache = Path(
        os.environ.get("CORPUS_CACHE") or Path(tempfile.gettempdir(), f"corpus-cache-{os.getuid()}")
    )
    folder = cache / hashlib.sha256(key.encode()).hexdigest()[:20]
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with filelock.FileLock(folder.with_suffix(".lock")):
            if not all(
                (folder / name).is_file() for name in ("train.npy", "held_out.npy", "corpus.json")
            ):
                tokenize(origins, tokenizer, folder, data)
        return _mapped(folder)
    except OSError as error:  # numpy's has no errno when the disk is full
        raise UserError(
            f"cannot keep the tokens in {folder}: {error}; delete it, or set CORPUS_CACHE"
        ) from None


def _mapped(folder: Path, tokenizer: str | None = None) -> Corpus:
    """The corpus in a folder of tokens; UserError if they are not of `tokenizer`."""
    about = json.loads((folder / "corpus.json").read_text())
    if (
        tokenizer
        and load_tokenizer(tokenizer)[1]["vocabulary_sha256"] != about["vocabulary_sha256"]
    ):
        made = f"was made with --tokenizer {about['tokenizer']}"
        raise UserError(
            f"--data {folder} {made}, and --tokenizer {tokenizer} has other tokens: prepare it again"
        )
    train, held_out = (
        np.load(folder / f"{part}.npy", mmap_mode="r") for part in ("train", "held_out")
    )
    return Corpus(train, held_out, about["vocab_size"], about["sha256"])


def tokenize(origins: list, tokenizer: str, folder: Path, data: str) -> None:
    """Turn documents into a folder of tokens, whole or not at all: train.npy, held_out.npy and corpus.json."""
    texts, size = [], 0
    for text in itertools.chain.from_iterable(map(documents, origins)):
        texts.append(text)
        size += len(text)
        if size > LARGEST_TEXT:
            command = (
                f"python 05_ddp/prepare_data.py --data {data} --tokenizer {tokenizer} --out FOLDER"
            )
            raise UserError(
                f"--data {data} is more than 200 MB of text: {command} and then --data FOLDER"
            )
    if not size:
        raise UserError(f"--data {data} holds no text")
    definition, about = load_tokenizer(tokenizer)
    encode = encoder(definition, about)
    unfinished = folder.with_suffix(".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    sha = hashlib.sha256()
    for part, chosen in zip(("train", "held_out"), _split(texts), strict=True):
        tokens = np.concatenate([encode(text) for text in chosen])
        np.save(unfinished / f"{part}.npy", tokens)
        sha.update(tokens)
    (unfinished / "corpus.json").write_text(json.dumps({**about, "sha256": sha.hexdigest()}))
    shutil.rmtree(folder, ignore_errors=True)  # of which somebody has cleared a part away
    unfinished.rename(folder)


def _split(documents: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Hold out the 5 % whose contents hash lowest: stable, and copies of a file fall on one side."""
    unique = sorted(set(documents), key=lambda document: hashlib.sha256(document).digest())
    if len(unique) == 1:
        cut = int(len(unique[0]) * (1 - HELD_OUT))
        return [unique[0][:cut]], [unique[0][cut:]]
    held_out = set(unique[: math.ceil(len(unique) * HELD_OUT)])
    return [d for d in documents if d not in held_out], [d for d in documents if d in held_out]


class Sequences(Dataset):
    """Non-overlapping windows: item i is (inputs, targets), each int64 [seq_len], targets one token on."""

    def __init__(self, tokens: np.ndarray, seq_len: int) -> None:
        self.tokens, self.seq_len = tokens, seq_len

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        window = self.tokens[i * self.seq_len : (i + 1) * self.seq_len + 1].astype(np.int64)
        return torch.from_numpy(window[:-1]), torch.from_numpy(window[1:])


class Batches:
    """What one rank reads of a run's batches; `rank` of `world_size` counts along the data-parallel dimension.
    UserError for sizes that do not divide, and for a text that is too short."""

    def __init__(
        self, corpus: Corpus, args, *, rank: int, world_size: int, sequences: Callable = Sequences
    ) -> None:
        self.rank, self.world_size, self.seq_len = rank, world_size, args.seq_len
        self.global_batch_size = size = args.global_batch_size
        unit = world_size * (args.micro_batch_size or 1)
        if size % unit:
            near = " or ".join(
                str(n) for n in (size // unit * unit, (size // unit + 1) * unit) if n
            )
            raise UserError(
                f"--global-batch-size {size} is no multiple of {unit} (micro-batch x ranks): use {near}"
            )
        self.micro_batch_size = args.micro_batch_size or size // world_size  # of one forward
        self.accumulation_steps = size // (world_size * self.micro_batch_size)
        self.tokens_per_step = size * self.seq_len
        self.train, self.held_out = (
            sequences(part, self.seq_len) for part in (corpus.train, corpus.held_out)
        )
        for part, found, needed in (("training", self.train, size), ("held-out", self.held_out, 1)):
            if len(found) < needed:
                found = (
                    f"{len(found)} {part} sequences of --seq-len {self.seq_len}, and needs {needed}"
                )
                raise UserError(
                    f"--data has {found}: add text, or lower --seq-len or --global-batch-size"
                )

        def shuffled(epoch: int) -> np.ndarray:
            return np.random.default_rng([args.seed, epoch]).permutation(len(self.train))

        self.permutation = lru_cache(2)(shuffled)  # two: what prefetches may be an epoch ahead

    def global_batch(self, step: int) -> list[int]:
        """Which training sequences the 0-based `step` reads, all ranks together. Position p of the stream is item p % n
        of the permutation of epoch p // n: a function of seed and step alone."""
        n, first = len(self.train), step * self.global_batch_size
        return [
            int(self.permutation(p // n)[p % n])
            for p in range(first, first + self.global_batch_size)
        ]

    def order(self, start_step: int = 0) -> Iterator[list[int]]:
        """Which of them rank r reads, the r-th equal part: by micro-batch, from 0-based `start_step` on, for ever."""
        share = self.global_batch_size // self.world_size
        for batch in map(self.global_batch, itertools.count(start_step)):
            for start in range(self.rank * share, (self.rank + 1) * share, self.micro_batch_size):
                yield batch[start : start + self.micro_batch_size]

    def stream(
        self, start_step: int, *, pin: bool = False, num_workers: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's micro-batches, for ever: inputs and targets, each int64 [micro_batch_size, seq_len], on the CPU,
        with `pin` in memory that a GPU can copy from while it computes."""
        # or the loader would draw from the one that a resume restores
        generator = torch.Generator()
        how = {"num_workers": num_workers, "worker_init_fn": _ignore_signals, "pin_memory": pin}
        return iter(
            DataLoader(self.train, batch_sampler=self.order(start_step), generator=generator, **how)
        )

    def evaluation(self) -> list[tuple[Tensor, Tensor]]:
        """This rank's part of the held-out sequences, in batches as in stream(). All ranks get equally many, since a
        sharded model gathers its weights in forward; rows that only pad have PADDING as their targets."""
        count = min(EVAL_SEQUENCES, len(self.held_out))
        chosen = np.unique(np.linspace(0, len(self.held_out) - 1, count, dtype=np.int64))
        batches = math.ceil(math.ceil(len(chosen) / self.world_size) / self.micro_batch_size)
        inputs = torch.zeros(batches * self.micro_batch_size, self.seq_len, dtype=torch.int64)
        targets = torch.full_like(inputs, PADDING)
        for row, i in enumerate(chosen[self.rank :: self.world_size].tolist()):
            inputs[row], targets[row] = self.held_out[i]
        return list(
            zip(
                inputs.split(self.micro_batch_size),
                targets.split(self.micro_batch_size),
                strict=True,
            )
        )


def _ignore_signals(_worker: int) -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
        # a scheduler signals all; a rank needs its workers for its last steps
        signal.signal(number, signal.SIG_IGN)


def one_batch(batch_size: int, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A batch of the default corpus for lessons that need only one: inputs and targets, int64 [batch_size, seq_len]."""
    sequences = Sequences(load_corpus("stdlib").train, seq_len)
    if (most := len(sequences)) < batch_size:
        raise UserError(
            f"{batch_size} sequences of {seq_len} tokens, the text has {most}: lower the steps or batch"
        )
    inputs, targets = zip(*(sequences[i] for i in range(batch_size)), strict=True)
    return torch.stack(inputs).to(device), torch.stack(targets).to(device)
