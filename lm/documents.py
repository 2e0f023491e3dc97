"""Find and read documents: in files, in data sets, and in the standard library.

A document is one text: a file, a line of a .jsonl file, a row of a .parquet file or of a data set.
It is passed on as UTF-8 bytes. This file does not import torch: see lm/token_folder.py.
"""

import contextlib
import hashlib
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from common.exits import UserError
from lm import stdlib_text
from training.run_folder import is_checkpoint, is_run_folder, read_settings

# File types that are read.
TEXTS = (".txt", ".md", ".py")
ROWS = (".jsonl", ".parquet")
COMPRESSED = (".gz", ".zst", ".bz2")  # behind one of the others, as in .jsonl.gz

# A fingerprint is a hash of the files' content. Of more bytes than these, it is a hash of samples.
MOST_HASHED_BYTES = 10**9
SAMPLES = 8  # of each file
SAMPLE_BYTES = 4096


@contextlib.contextmanager
def as_user_error(what: str) -> Iterator[None]:
    """Raise UserError in place of any exception of the `with` block; `what` starts its message.

    Use it around library calls that read what the user named. Libraries raise many types of
    exceptions: for a missing network, a wrong name, a licence that was not accepted, an unknown
    format, a truncated file.
    """
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError as error:
        missing = str(error.filename or error)
        where = what if missing in what else f"{what}: {missing}"
        raise UserError(f"{where} does not exist") from None
    except Exception as error:
        raise UserError(f"{what}: {type(error).__name__}: {error}") from None


class Sources(NamedTuple):
    """The files or the data set that --data refers to."""

    origins: list  # paths as strings, or one iterable data set, in order. read() reads each
    fingerprint: list  # of the content of the origins; can be written as JSON
    other_files: list[str]  # files in the folder that have no type that is read
    run_outputs: list[str]  # what runs have written and is left out: folders, metrics.jsonl

    def left_out(self) -> str:
        """Return what to tell the user if there are `run_outputs`."""
        names = ", ".join(self.run_outputs[:3])
        more = ", ..." if len(self.run_outputs) > 3 else ""
        return f"left out what scripts have written: {names}{more}"


def find(
    data: str,
    config: str | None = None,
    split: str = "train",
    *,
    outputs: Sequence[Path] = (),
) -> Sources:
    """Find what `data` refers to: "stdlib", a file, a folder, or hf:NAME.

    Args:
        data: The value of --data. hf:NAME is a data set on the Hugging Face hub, or a local folder
            that Dataset.save_to_disk wrote.
        config: The configuration of a data set on the hub.
        split: The split of a data set on the hub.
        outputs: Folders that the script writes to. They are left out of `data`.

    Raises:
        UserError: There is nothing to read, or a file or folder cannot be read.
    """
    if data.startswith("hf:"):
        with as_user_error(f"--data {data}"):
            origins, fingerprint = _find_data_set(data.removeprefix("hf:"), config, split)
            return Sources(origins, fingerprint, [], [])

    if data == "stdlib":
        found = Sources([str(path) for path in stdlib_text.source_files()], [], [], [])
    else:
        with as_user_error(f"--data {data}"):
            found = _find_files(Path(data), outputs)
    if not found.origins:
        readable = ", ".join(TEXTS + ROWS + COMPRESSED)
        raise UserError(f"--data {data}: nothing to read ({readable}, stdlib or hf:NAME)")
    with as_user_error(f"--data {data}"):
        found.fingerprint.extend(fingerprint_of(found.origins))
    return found


def fingerprint_of(paths: list[str]) -> list:
    """Return a list that changes when the content of the files changes, and can be JSON.

    The content is hashed, because another file can have the same path, size and time. 200 MB take
    0.3 s on one core. Files of more than MOST_HASHED_BYTES together take too long: of these,
    samples are hashed, and their times count, too.
    """
    total_bytes = sum(os.path.getsize(path) for path in paths)
    entries = []
    for path in paths:
        place = os.path.realpath(path)
        status = os.stat(path)
        with open(path, "rb") as file:
            if total_bytes <= MOST_HASHED_BYTES:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                entries.append([place, status.st_size, sha256])
            else:
                sha256 = _hash_of_samples(file, status.st_size)
                entries.append([place, status.st_size, sha256, status.st_mtime_ns])
    return entries


def _hash_of_samples(file: BinaryIO, size: int) -> str:
    """Return the SHA-256 of SAMPLES parts of a file, evenly spaced. A small file is read whole."""
    sha256 = hashlib.sha256()
    if size <= SAMPLES * SAMPLE_BYTES:
        sha256.update(file.read())
        return sha256.hexdigest()
    for sample in range(SAMPLES):
        file.seek((size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
        sha256.update(file.read(SAMPLE_BYTES))
    return sha256.hexdigest()


def _find_data_set(name: str, config: str | None, split: str) -> tuple[list, list]:
    """Open a data set of the datasets library; return it in a list, and its fingerprint."""
    from datasets import load_dataset_builder, load_from_disk

    saved_to_disk = Path(name, "state.json").is_file()
    if saved_to_disk:
        rows = load_from_disk(name)
        shards = rows.data.nbytes >> 24  # of 16 MiB
        shards = max(1, min(len(rows), shards))
        files = [file["filename"] for file in rows.cache_files]
        entries = [rows._fingerprint, *fingerprint_of(files)]
        return [rows.to_iterable_dataset(shards)], entries
    builder = load_dataset_builder(name, config)
    # The hash of the builder has the paths of local files, and not their content. On the hub, a
    # path has the revision.
    files = []
    for files_of_split in (builder.config.data_files or {}).values():
        files += [path for path in files_of_split if os.path.isfile(path)]
    return [builder.as_streaming_dataset(split)], [builder.hash, *fingerprint_of(files)]


def _find_files(root: Path, outputs: Sequence[Path]) -> Sources:
    """Find a file, or the files in a folder, sorted, without hidden ones.

    Links are followed. If several paths lead to one file, only the first is read. Folders of runs,
    and `outputs`, are left out. Raise OSError if a folder cannot be read, or a link is broken.
    """
    if root.is_file():
        origins = [str(root)] if file_type(root) in TEXTS + ROWS else []
        return Sources(origins, [], [], [])

    output_folders = {os.path.realpath(folder) for folder in outputs}
    walked = {os.path.realpath(root)}  # real paths of folders, so that a loop of links ends
    files = []
    run_outputs = []

    def fail(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(root, onerror=fail, followlinks=True):
        folders.sort()
        entered = []
        for name in _visible(folders):
            path = Path(folder, name)
            real_path = os.path.realpath(path)
            if real_path in walked:
                continue
            walked.add(real_path)
            if real_path in output_folders or is_run_folder(path):
                run_outputs.append(str(path))
            elif not is_checkpoint(path):
                entered.append(name)
        folders[:] = entered  # os.walk does not enter the others
        for name in _visible(names):
            path = Path(folder, name)
            if name == "metrics.jsonl" and read_settings(path.parent):
                run_outputs.append(str(path))
            else:
                files.append(path)

    origins = []
    other_files = []
    real_files = set()
    for path in sorted(files):
        is_text = file_type(path) in TEXTS + ROWS
        if not path.is_file() and (is_text or path.is_symlink()):
            raise OSError(f"{path} is a broken link, or no regular file: mend or remove it")
        if not is_text:
            if path.is_file():
                other_files.append(str(path))
            continue
        real_path = os.path.realpath(path)
        if real_path not in real_files:
            real_files.add(real_path)
            origins.append(str(path))
    return Sources(origins, [], other_files, sorted(run_outputs))


def _visible(names: list[str]) -> list[str]:
    return [name for name in names if not name.startswith(".")]


def file_type(path: str | Path) -> str:
    """Return the suffix that tells how to read a file: ".jsonl" for web.jsonl and web.jsonl.gz."""
    path = Path(path)
    if path.suffix in COMPRESSED:
        path = Path(path.stem)
    return path.suffix.lower()


def read(
    origin,
    column: str = "text",
    start: int = 0,
    stop: int = sys.maxsize,
    longest: int = 2**28,
) -> Iterator[bytes]:
    """Yield the documents of an origin, or of a part of it, in UTF-8.

    Args:
        origin: A path or a data set, as find() returns them.
        column: The column, or the key of a .jsonl line, that holds the text.
        start: The first byte of the part. For .parquet: the first row group. A data set is always
            read as a whole.
        stop: The first byte, or row group, after the part. A line belongs to the part that its
            first byte is in.
        longest: Bytes after which a text file is split into several documents, at the end of a
            line.

    Raises:
        UserError: Something cannot be read. The message has its place in the origin.
    """
    with as_user_error(f"--data {origin}"):
        if not isinstance(origin, str):
            for number, row in enumerate(origin):
                yield _text_of(row, column, origin, f"row {number}")
        elif file_type(origin) == ".parquet":
            yield from _parquet_documents(origin, column, start, stop)
        elif file_type(origin) == ".jsonl":
            yield from _jsonl_documents(origin, column, start, stop)
        else:
            yield from _text_documents(origin, start, stop, longest)


def _text_of(row: object, column: str, origin, where: str) -> bytes:
    """Return the text of a row in UTF-8; raise UserError, which names the place, if it has none."""
    if not isinstance(row, dict) or not isinstance(row.get(column), str):
        raise UserError(
            f"--data {origin}: {where} has no text in a column {column}: {str(row)[:80]}"
        )
    # JSON can hold half of a surrogate pair, which UTF-8 cannot: it becomes "?".
    return row[column].encode("utf-8", "replace")


def _parquet_documents(path: str, column: str, start: int, stop: int) -> Iterator[bytes]:
    """Yield the documents in the row groups from `start` to `stop` of a .parquet file."""
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    groups = range(start, min(stop, file.num_row_groups))
    columns = None  # all, so that the error shows what a row has
    if column in file.schema_arrow.names:
        columns = [column]
    # 64 rows at a time, because one row may be large
    for batch in file.iter_batches(64, row_groups=groups, columns=columns):
        for row in batch.to_pylist():
            yield _text_of(row, column, path, f"a row from row group {start} on")


def row_group_sizes(path: str) -> list[int]:
    """Return the bytes of each row group of a .parquet file."""
    with as_user_error(f"--data {path}"):
        from pyarrow import parquet

        metadata = parquet.ParquetFile(path).metadata
    sizes = []
    for group in range(metadata.num_row_groups):
        sizes.append(metadata.row_group(group).total_byte_size)
    return sizes


def _jsonl_documents(path: str, column: str, start: int, stop: int) -> Iterator[bytes]:
    """Yield the documents of the lines of a .jsonl file that begin at bytes `start` to `stop`."""
    for position, line in _blocks(path, start, stop, size=1):  # a block of one line
        if not line.strip():
            continue
        with as_user_error(f"--data {path}: the line at byte {position} is no JSON in UTF-8"):
            row = json.loads(line.decode("utf-8-sig"))
        yield _text_of(row, column, path, f"the line at byte {position}")


def _text_documents(path: str, start: int, stop: int, longest: int) -> Iterator[bytes]:
    """Yield the lines of a text file that begin at bytes `start` to `stop`, as long documents."""
    if os.path.getsize(path) == 0:
        yield b""
    for position, block in _blocks(path, start, stop, longest):
        with as_user_error(f"--data {path}: no text in UTF-8, counted from byte {position}"):
            # A text has no byte 0: replace it by a byte that decode() does not accept.
            block.replace(b"\0", b"\xff").decode()
        yield block


def _blocks(path: str, start: int, stop: int, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield (position in bytes, block) for the lines that begin at bytes `start` to `stop`.

    A block has at least `size` bytes, if the lines have, and ends with a line. Files are
    decompressed; positions count decompressed bytes.
    """
    import pyarrow

    # Unlike the zstandard library, pyarrow raises an error if a compressed file is truncated.
    with io.BufferedReader(pyarrow.input_stream(path), 2**20) as file:
        position = start
        if start > 0:
            # A line that began before `start` belongs to the part before. Read from the byte
            # before: if a line begins at `start`, then only the newline before it is skipped.
            file.seek(start - 1)
            position += len(file.readline()) - 1
        while position < stop:
            wanted = min(size, stop - position)
            block = file.read(wanted - 1) + file.readline()  # readline() ends the last line
            if not block:
                break
            yield position, block
            position += len(block)
