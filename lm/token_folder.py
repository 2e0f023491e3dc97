"""Choose which documents are held out, and keep tokens in a folder.

A folder of tokens has three files. train.npy and held_out.npy hold all tokens, in one row each.
corpus.json describes them. lm/data.py writes such a folder into its cache, for the text of a
training script. 05_ddp/prepare_data.py writes one for text of any size. This file does not import
torch, because every worker of prepare_data.py would have to load it.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from common import files
from common.exits import UserError
from lm import stdlib_text
from lm.stdlib_text import HELD_OUT

NAMES = ("train.npy", "held_out.npy", "corpus.json")
SIDES = ("train", "held_out")
COPY_BYTES = 2**20  # read at once

# What happens to a document.
TRAIN = 0  # all of it is for training: the index in SIDES
HELD = 1  # all of it is held out
CUT = 2  # its last 5 % are held out


# --- what is held out


def hash_of(document: bytes) -> int:
    """Return a hash of 64 bits, the same for copies of a document."""
    return int.from_bytes(stdlib_text.sha256(document)[:8], "big")


def choose_sides(data: str, hashes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return TRAIN, HELD or CUT for each document: 5 % of all bytes are held out.

    A document with more than 5 % of all bytes is cut: its own last 5 % are held out. Of the others,
    those with the lowest hashes are held out, until they are 5 % of the others. The choice does not
    depend on the order of the documents, and all copies of a document are treated alike.

    Args:
        data: The value of --data.
        hashes: hash_of(each document), uint64.
        sizes: The bytes of each document.
    """
    # Copies are one document, as large as all of them. np.unique sorts the hashes.
    unique, document_of = np.unique(hashes, return_inverse=True)
    sizes = np.bincount(document_of, weights=sizes, minlength=len(unique))
    sides = np.full(len(unique), TRAIN, np.uint8)
    if data == "stdlib":
        # Many figures were measured on this corpus. So it keeps its split: 5 % of the files.
        sides[: math.ceil(len(unique) * HELD_OUT)] = HELD
        return sides[document_of]

    is_large = sizes > sizes.sum() * HELD_OUT
    sides[is_large] = CUT
    wanted_bytes = sizes[~is_large].sum() * HELD_OUT
    held_bytes = 0
    for i in np.flatnonzero(~is_large):
        # Take the document if the sum is nearer to 5 % with it than without it.
        if held_bytes + sizes[i] / 2 <= wanted_bytes:
            sides[i] = HELD
            held_bytes += sizes[i]
    return sides[document_of]


def split(document: bytes, side: int) -> list[tuple[int, bytes]]:
    """Return the texts of a document, each with its side, TRAIN or HELD."""
    if side == CUT:
        end = int(len(document) * (1 - HELD_OUT))
        return [(TRAIN, document[:end]), (HELD, document[end:])]
    return [(side, document)]


# --- the folder


@contextlib.contextmanager
def writer(
    folder: Path, about: dict, scratch: Path | None = None
) -> Iterator[Callable[[int, np.ndarray], None]]:
    """Write a folder of tokens. The `with` block gets a function that appends tokens to a side.

    The files appear when they are complete, and corpus.json comes last. After a failure there is
    no corpus.json.

    Args:
        folder: The folder, which exists.
        about: What corpus.json says, in addition to the hash and the numbers of tokens. It has the
            dtype.
        scratch: As in files.complete_file.
    """
    dtype = np.dtype(about["dtype"])
    counts = [0, 0]
    sha256 = hashlib.sha256()
    with contextlib.ExitStack() as stack:
        streams = []
        for side in SIDES:
            file = files.complete_file(folder / f"{side}.npy", "w+b", scratch)
            streams.append(stack.enter_context(file))
            _write_header(streams[-1], dtype, 0)

        def write(side: int, tokens: np.ndarray) -> None:
            streams[side].write(tokens)
            counts[side] += len(tokens)
            if side == TRAIN:
                sha256.update(tokens.data)

        yield write

        for stream, count in zip(streams, counts, strict=True):
            stream.seek(0)
            _write_header(stream, dtype, count)  # of the same length: NumPy pads it
        while block := streams[HELD].read(COPY_BYTES):
            sha256.update(block)

    content = {
        **about,
        "sha256": sha256.hexdigest(),
        "train_tokens": counts[TRAIN],
        "held_out_tokens": counts[HELD],
    }
    with files.complete_file(folder / "corpus.json", scratch=scratch) as stream:
        json.dump(content, stream)


def _write_header(file, dtype: np.dtype, count: int) -> None:
    """Write the header of a .npy file of `count` elements."""
    header = {"descr": dtype.str, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)


def read(folder: Path, where: str, fix: str) -> tuple[dict, np.ndarray, np.ndarray]:
    """Return the corpus.json of a folder of tokens and the memory-mapped train and held_out.

    Raise UserError if a file is missing, truncated or not what the others say. `where` starts the
    message, and `fix` ends it.
    """
    name = "corpus.json"
    try:
        about = json.loads((folder / name).read_text(encoding="utf-8"))
        for key in ("tokenizer", "vocabulary_sha256", "sha256"):
            if not isinstance(about[key], str):
                raise ValueError(f"{key} is {about[key]!r}")
        if not isinstance(about["vocab_size"], int):
            raise ValueError(f"vocab_size is {about['vocab_size']!r}")
        dtype = np.dtype(about["dtype"])

        tokens = {}
        for part in SIDES:
            name = f"{part}.npy"
            tokens[part] = np.load(folder / name, mmap_mode="r")
            shape = (about.get(f"{part}_tokens", tokens[part].size),)
            if tokens[part].shape != shape or tokens[part].dtype != dtype:
                raise ValueError(
                    f"it has {tokens[part].dtype} {tokens[part].shape}, "
                    f"and corpus.json says {dtype} {shape}"
                )
    except Exception as error:  # numpy raises many types for a damaged file
        raise UserError(
            f"{where}: {name} is missing or damaged ({type(error).__name__}: {error}): {fix}"
        ) from None
    return about, tokens["train"], tokens["held_out"]
