"""Corpora, tokenizers, and a batch order that does not depend on the number of processes."""

import hashlib
import itertools
import json
import math
import os
import signal
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from common.exits import UserError

HELD_OUT = 0.05
EVAL_SEQUENCES = 96  # evaluation reads at most so many, spread evenly over the held-out text


class Corpus(NamedTuple):
    train: np.ndarray  # token ids, one after the other
    held_out: np.ndarray
    vocab_size: int


def load_corpus(data: str, tokenizer: str) -> Corpus:
    """Read `data`, hold out 5 % of its documents, tokenize. UserError for a source that cannot be read."""
    documents = _read(data)
    if not any(documents):
        raise UserError(f"--data {data} holds no text")
    train, held_out = _split(documents)
    if tokenizer == "bytes":
        return Corpus(_join_bytes(train), _join_bytes(held_out), 256)
    encode, vocab_size = _hf_tokenizer(tokenizer)
    return Corpus(encode(train), encode(held_out), vocab_size)


def _read(data: str) -> list[bytes]:
    if data == "stdlib":
        files = []
        for folder, subfolders, names in os.walk(sysconfig.get_paths()["stdlib"]):
            skip = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
            subfolders[:] = [name for name in subfolders if name not in skip]
            files += [Path(folder, name) for name in names if name.endswith(".py")]
        return [file.read_bytes() for file in sorted(files)]
    if data.startswith("hf:"):
        try:
            from datasets import load_dataset

            rows = load_dataset(data.removeprefix("hf:"), split="train")["text"]
        except ImportError:
            raise UserError(f"--data {data} needs the package datasets: pip install datasets") from None
        except Exception as error:  # the hub's client raises dozens of kinds: network, name, licence, layout
            raise UserError(f"--data {data}: {type(error).__name__}: {error}") from None
        return [row.encode() for row in rows]
    path = Path(data)
    if not path.is_file():
        raise UserError(f"--data {data}: no such file (stdlib, a text, .jsonl or .parquet file, or hf:NAME)")
    try:
        if path.suffix.lower() == ".jsonl":
            return [json.loads(line)["text"].encode() for line in path.read_bytes().split(b"\n") if line.strip()]
        if path.suffix.lower() == ".parquet":
            from pyarrow import parquet

            return [row.encode() for row in parquet.read_table(path, columns=["text"])["text"].to_pylist()]
        return [path.read_bytes()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise UserError(f"--data {data} is no {path.suffix or 'text'} file with a text per row: {error!r}") from None


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


def _join_bytes(documents: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(d + b"\0" for d in documents), dtype=np.uint8)  # text holds no NUL: it ends one


def _hf_tokenizer(name: str):
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(name)
    except ImportError:
        raise UserError(f"--tokenizer {name} needs the package transformers: pip install transformers") from None
    except Exception as error:  # as above: not there, no network, no licence, not a tokenizer
        raise UserError(f"--tokenizer {name}: {type(error).__name__}: {error}") from None
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
    n: int, args, micro_batch_size: int, start_step: int, rank: int, world_size: int
) -> Iterator[list[int]]:
    """Which of n sequences a rank reads, micro-batch by micro-batch, from 0-based `start_step` on, for ever.

    Position p of the endless stream is item p % n of the permutation of epoch p // n, and step s of
    global batch size G reads positions s·G to (s+1)·G: a function of seed and step alone. Rank r takes
    the r-th equal part of each step, so ranks never overlap and each sequence comes once per epoch.
    """
    share = args.global_batch_size // world_size
    epoch, order = -1, np.empty(0)
    for step in itertools.count(start_step):
        first = step * args.global_batch_size + rank * share
        for start in range(first, first + share, micro_batch_size):
            batch = []
            for position in range(start, start + micro_batch_size):
                if position // n != epoch:
                    epoch = position // n
                    order = np.random.default_rng([args.seed, epoch]).permutation(n)
                batch.append(int(order[position % n]))
            yield batch


def train_batches(
    tokens: np.ndarray, args, micro_batch_size: int, start_step: int, rank: int, world_size: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's micro-batches, for ever: inputs and targets, each int64 [micro_batch_size, seq_len].

    `args` gives seq_len, global_batch_size, seed, num_workers. UserError if the text is too short.
    """
    dataset = Sequences(tokens, args.seq_len)
    if len(dataset) < args.global_batch_size:
        raise UserError(
            f"--data {args.data} gives {len(dataset)} training sequences of --seq-len {args.seq_len}, "
            f"less than one --global-batch-size {args.global_batch_size}: add text or lower these"
        )
    order = batch_order(len(dataset), args, micro_batch_size, start_step, rank, world_size)
    own = torch.Generator()  # or the loader would draw from the one that a resume restores
    more = {"generator": own, "num_workers": args.num_workers, "pin_memory": device.type == "cuda"}
    return iter(DataLoader(dataset, batch_sampler=order, worker_init_fn=_ignore_signals, **more))


def _ignore_signals(_worker: int) -> None:
    """A scheduler signals every process; the rank decides, and its workers must live for its last steps."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def eval_batches(tokens: np.ndarray, seq_len: int, batch_size: int, rank: int, world_size: int) -> DataLoader:
    """This rank's part of the held-out sequences; over all ranks each is read once.

    UserError if the held-out text is shorter than one sequence.
    """
    dataset = Sequences(tokens, seq_len)
    if not len(dataset):
        raise UserError(f"--data: held-out text has {len(tokens)} tokens, less than one --seq-len {seq_len}: add text")
    chosen = np.unique(np.linspace(0, len(dataset) - 1, min(EVAL_SEQUENCES, len(dataset)), dtype=np.int64))
    mine = Subset(dataset, chosen[rank::world_size].tolist())
    return DataLoader(mine, batch_size=batch_size, generator=torch.Generator())
