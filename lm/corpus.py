"""Documents, and the tokens they become. Without torch, or each worker of 05_ddp/prepare_data.py would load it."""

import contextlib
import hashlib
import io
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from common.exits import UserError

HELD_OUT = 0.05  # share of the documents
TEXTS, ROWS, COMPRESSED = (".txt", ".md", ".py"), (".jsonl", ".parquet"), (".gz", ".zst", ".bz2")
# folders of the standard library
NO_TEXT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
# characters to encode at once: encoding takes 110 to 170 bytes of memory per byte of text
PIECE = 2**18


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """A UserError in place of whatever a library raises: network, name, licence, layout, a file that is cut."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what}: {type(error).__name__}: {error}") from None


def load_tokenizer(name: str, end_token: str | None = None) -> tuple[str, dict]:
    """Its tokenizer.json, or "bytes", and what corpus.json says of it. Documents end with its eos by default."""
    definition, size, vocabulary, eos = "bytes", 256, {"\0": 0}, "\0"  # a text holds no NUL
    if name != "bytes":
        with told(f"--tokenizer {name}"):
            from transformers import AutoTokenizer

            found = AutoTokenizer.from_pretrained(name)
            definition, size, vocabulary = (
                found.backend_tokenizer.to_str(),
                len(found),
                found.get_vocab(),
            )
            eos = found.eos_token
    if end_token and end_token not in vocabulary:
        raise UserError(f"--end-token {end_token} is no token of --tokenizer {name}")
    sha = hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()
    about = {"tokenizer": name, "vocabulary_sha256": sha, "vocab_size": size}
    about["dtype"] = "uint8" if size <= 2**8 else "uint16" if size <= 2**16 else "uint32"
    return definition, {
        **about,
        "end_token": end_token or eos,
        "end_id": vocabulary.get(end_token or eos),
    }


def encoder(definition: str, about: dict) -> Callable[[bytes], np.ndarray]:
    """What turns a document into its tokens and an end. A special token that a text shows is text like any other."""
    if definition == "bytes":
        return lambda document: np.frombuffer(document.replace(b"\0", b"?") + b"\0", "uint8")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(definition)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # or a web page about <|endoftext|> would end there
    end = [] if about["end_id"] is None else [about["end_id"]]

    def encode(document: bytes) -> np.ndarray:
        # what was held out of one document may cut a character
        text = document.decode(errors="replace")
        pieces = (text[start : start + PIECE] for start in range(0, len(text), PIECE))
        ids = [
            token
            for piece in pieces
            for token in tokenizer.encode(piece, add_special_tokens=False).ids
        ]
        return np.array(ids + end, about["dtype"])

    return encode


def sources(data: str, config: str | None = None, split: str = "train") -> tuple[list, list]:
    """What documents() reads, in order, and what changes when that does. UserError if there is nothing to read."""
    if data.startswith("hf:"):
        with told(f"--data {data}"):
            from datasets import load_dataset_builder, load_from_disk

            name = data.removeprefix("hf:")
            if Path(name, "state.json").is_file():  # of save_to_disk
                rows = load_from_disk(name)
                return [rows.to_iterable_dataset(max(1, min(len(rows), rows.data.nbytes >> 24)))], [
                    rows._fingerprint
                ]
            builder = load_dataset_builder(name, config)
            return [builder.as_streaming_dataset(split)], [builder.hash]
    stdlib = data == "stdlib"
    root = Path(sysconfig.get_paths()["stdlib"] if stdlib else data)
    found = [root] if root.is_file() else []
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name for name in folders if name[0] != "." and not (stdlib and name in NO_TEXT)
        ]
        found += [Path(folder, name) for name in names if name[0] != "."]
    paths = [
        str(path) for path in sorted(found) if kind(path) in ((".py",) if stdlib else TEXTS + ROWS)
    ]
    if not paths:
        raise UserError(
            f"--data {data}: nothing to read ({', '.join(TEXTS + ROWS + COMPRESSED)}, stdlib or hf:NAME)"
        )
    return paths, [
        [os.path.realpath(path), (at := os.stat(path)).st_size, at.st_mtime_ns] for path in paths
    ]


def kind(path: str | Path) -> str:
    path = Path(path)
    return Path(path.stem if path.suffix in COMPRESSED else path.name).suffix.lower()


def documents(
    origin, column: str = "text", start=0, stop=sys.maxsize, longest=2**28
) -> Iterator[bytes]:
    """The documents of a data set or a file in UTF-8, or of its lines that begin at bytes `start` to `stop`; of a
    .parquet file of these row groups. A text is a document, or one for every `longest` bytes."""

    def text(row: object, where: str) -> bytes:
        if not isinstance(row, dict) or not isinstance(row.get(column), str):
            raise UserError(
                f"--data {origin}: {where} has no text in a column {column}: {str(row)[:80]}"
            )
        return row[column].encode("utf-8", "replace")  # half of a surrogate pair becomes "?"

    with told(f"--data {origin}"):
        if not isinstance(origin, str):
            yield from (text(row, f"row {number}") for number, row in enumerate(origin))
        elif kind(origin) == ".parquet":
            from pyarrow import parquet

            file = parquet.ParquetFile(origin)
            groups = range(start, min(stop, file.num_row_groups))
            # all, for text() to show
            columns = [column] if column in file.schema_arrow.names else None
            # 64: a row may be large
            for batch in file.iter_batches(64, row_groups=groups, columns=columns):
                yield from (
                    text(row, f"a row from row group {start} on") for row in batch.to_pylist()
                )
        elif kind(origin) == ".jsonl":
            for at, line in _blocks(origin, start, stop, 1):
                if line.strip():
                    with told(f"--data {origin}: the line at byte {at} is no JSON in UTF-8"):
                        row = json.loads(line.decode("utf-8-sig"))
                    yield text(row, f"the line at byte {at}")
        else:
            if os.path.getsize(origin) == 0:
                yield b""
            for at, block in _blocks(origin, start, stop, longest):
                with told(f"--data {origin}: no text in UTF-8, counted from byte {at}"):
                    block.replace(b"\0", b"\xff").decode()  # NUL is no text, either
                yield block


def _blocks(path: str, start: int, stop: int, size: int) -> Iterator[tuple[int, bytes]]:
    """Blocks of `size` bytes and the rest of their last line, with their place in the file. The first begins with the
    first line that begins at `start` or later, the last ends with the line that holds byte `stop` - 1."""
    import pyarrow

    # unlike zstandard it notices a compressed file that is cut; others it reads as they are
    with io.BufferedReader(pyarrow.input_stream(path), 2**20) as file:
        at = start
        if start:
            file.seek(start - 1)
            at += len(file.readline()) - 1
        while at < stop and (block := file.read(min(size, stop - at) - 1) + file.readline()):
            yield at, block
            at += len(block)
