"""What prepare_data.py does with a part's tokens: files that are whole, the join, and a look at transformers'."""

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from common import exits
from lm import corpus

TEXT_BYTES = 2**20  # a longer text file becomes several documents
CPU = SimpleNamespace(type="cpu")  # torch.device in a script without torch


def is_held_out(document: bytes) -> bool:
    """True for 5 % of all texts. It depends on the text alone: copies of a document fall on one side."""
    return int.from_bytes(hashlib.sha256(document).digest()[:8], "big") < corpus.HELD_OUT * 2**64


@contextmanager
def whole_file(out: Path, name: str) -> Iterator:
    """A file that is there whole or not at all, whenever a kill comes."""
    # one that was killed may have left its own
    unfinished = out / f"parts/{Path(name).name}.{os.getpid()}"
    with open(unfinished, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(out / name)


def read_source(out: Path) -> list:
    """Return what the folder's source.json says; raise UserError if it is damaged."""
    try:
        return json.loads((out / "source.json").read_text())
    except (OSError, ValueError) as error:
        raise exits.UserError(
            f"--out {out}: source.json is damaged ({error}): delete the folder"
        ) from None


def finished_part(out: Path, number: int, dtype: str) -> dict | None:
    """Return what the part's .json says, or None if the part is not finished or has lost files."""
    try:
        about = json.loads((out / f"parts/{number:06}.json").read_text())
        for side in ("train", "held_out"):
            size = (out / f"parts/{number:06}.{side}").stat().st_size
            if size != about[side] * np.dtype(dtype).itemsize:
                return None
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return about


def join(out: Path, parts: list[dict], about: dict) -> None:
    """Write the parts' tokens, in order, as train.npy and held_out.npy; corpus.json comes last."""
    dtype = np.dtype(about["dtype"])
    train_tokens = sum(part["train"] for part in parts)
    tokens = train_tokens + sum(part["held_out"] for part in parts)
    if not any(part["text_bytes"] for part in parts):
        raise exits.UserError("--data holds no text")
    # Of a few documents, the hashes may hold out none, or most of the text: then hold out the last
    # tokens.
    if train_tokens == tokens or train_tokens < tokens / 2:
        train_tokens = int(tokens * (1 - corpus.HELD_OUT))
    left, sha, ends = train_tokens * dtype.itemsize, hashlib.sha256(), 0
    with whole_file(out, "train.npy") as train, whole_file(out, "held_out.npy") as held_out:
        for file, count in ((train, train_tokens), (held_out, tokens - train_tokens)):
            header = {"descr": dtype.str, "fortran_order": False, "shape": (count,)}
            np.lib.format.write_array_header_1_0(file, header)
        for path in (
            out / f"parts/{number:06}.{side}"
            for side in ("train", "held_out")
            for number in range(len(parts))
        ):
            with open(path, "rb") as file:
                while block := file.read(2**20):
                    train.write(block[:left])
                    held_out.write(block[left:])
                    left = max(0, left - len(block))
                    sha.update(block)
                    ends += np.count_nonzero(np.frombuffer(block, dtype) == about["end_id"])
    documents = sum(part["documents"] for part in parts)
    assert about["end_id"] is None or ends == documents, (
        f"{ends} end-of-text tokens for {documents} documents"
    )
    counts = {
        "documents": documents,
        "train_tokens": train_tokens,
        "held_out_tokens": tokens - train_tokens,
    }
    with whole_file(out, "corpus.json") as file:
        file.write(json.dumps({**about, "sha256": sha.hexdigest(), **counts}).encode())


def tokens_of_transformers(out: Path, documents: Iterable[bytes], about: dict) -> float | None:
    """Have transformers tokenize the first MiB as well, and find the same in train.npy. Its tokens per CPU second."""
    if about["tokenizer"] == "bytes":
        return None
    from transformers import AutoTokenizer

    texts, size = [], 0
    for document in documents:
        size += len(document)
        if size > 2**20 or len(document) > corpus.PIECE:
            break
        texts += [] if is_held_out(document) else [document.decode()]
    tokenizer = AutoTokenizer.from_pretrained(about["tokenizer"])
    began = time.process_time()
    found = [
        tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        for text in texts
    ]
    seconds = time.process_time() - began
    end = [] if about["end_id"] is None else [about["end_id"]]
    tokens = [token for ids in found for token in (*ids, *end)][: about["train_tokens"]]
    assert np.load(out / "train.npy", mmap_mode="r")[: len(tokens)].tolist() == tokens, (
        "transformers' are others"
    )
    print(f"checked: the first {len(tokens):,} tokens are those of transformers")
    return len(tokens) / seconds if tokens else None
