"""Tokenize text of any size once, on all cores, into a folder that every training script reads.

The documents are split into parts: 8 MiB of a plain file, row groups of a .parquet file, a whole
compressed file, or a file of a data set on the hub. A worker process turns one part at a time into
tokens, in files of its own. At the end the parts are joined, in order.

A part depends on the input alone. So the processes exchange no text, and more text takes no more
memory, except for about 70 bytes for each document when the parts are joined. After a kill the
same command makes only the parts that are missing, with any number of workers, and the tokens are
the same.

    laptop    python 05_ddp/prepare_data.py
    one node  python 05_ddp/prepare_data.py --data web/ --tokenizer models/smollm2-135m --out tokens
    the hub   python 05_ddp/prepare_data.py --data hf:OWNER/NAME --config NAME --split train \\
                  --column text --out tokens
    then      torchrun --standalone --nproc_per_node=8 05_ddp/train.py \
                  --data tokens --model models/smollm2-135m

The folder has train.npy and held_out.npy, all tokens in one row as uint8, uint16 or uint32, and
corpus.json. Each document ends with the tokenizer's end-of-text token. 5 % of the text is held out:
the documents with the lowest hashes, as in a training script that reads the text itself.

What to look at: the token that ends a document. In a chat model it ends a turn; --end-token names
another one. The tokens per CPU second, here and with transformers.

Previous: train.py. Next: 06_fsdp_zero/.
"""

import ctypes
import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before NumPy: it says what to do without it

# isort: split

import _prepare_data as helper
import numpy as np

from common import files, report
from lm import documents, encoder, token_folder

PART_BYTES = 8 * 2**20  # of input: what one worker makes at once, and the most that a kill costs it
TEXT_BYTES = 2**20  # a longer text file becomes several documents
PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal to send to this process when its parent dies


# --- 1. split the input into parts


class Span(NamedTuple):
    """A piece of the input that a worker can read without what comes before it."""

    origin: object  # a path, or a data set
    start: int  # bytes, or row groups of a .parquet file
    stop: int
    size: int  # in bytes, or an estimate


Part = list[Span]


def split_into_parts(origins: list) -> Iterator[Part]:
    """Yield parts of about PART_BYTES. This reads sizes, and no text."""
    part = []
    size = 0
    for origin in origins:
        for span in spans_of(origin):
            if part and size + span.size > PART_BYTES:
                yield part
                part = []
                size = 0
            part.append(span)
            size += span.size
    yield part


def spans_of(origin) -> Iterator[Span]:
    """Yield the spans of a file, or of a data set."""
    if not isinstance(origin, str):  # a data set: a shard is one of its files
        for index in range(origin.num_shards):
            shard = origin.shard(origin.num_shards, index)
            yield Span(shard, 0, sys.maxsize, PART_BYTES)
    elif documents.file_type(origin) == ".parquet":
        for group, size in enumerate(documents.row_group_sizes(origin)):
            yield Span(origin, group, group + 1, size)
    elif origin.endswith(documents.COMPRESSED):
        yield Span(origin, 0, sys.maxsize, os.path.getsize(origin))
    else:  # the lines that begin in these bytes
        size = os.path.getsize(origin)
        for start in range(0, max(size, 1), PART_BYTES):
            yield Span(origin, start, start + PART_BYTES, min(PART_BYTES, size - start))


# --- 2. make one part


def make_part(number: int, part: Part, out: Path, column: str) -> dict:
    """Read, tokenize and write a part, in a worker. Return what it cost.

    The table of its documents appears last: a part that has it is complete.
    """
    began = time.process_time()
    token_count = 0
    with (
        exits.writing("a part", out),
        files.complete_file(helper.part_file(out, number, "documents"), "wb") as table,
        files.complete_file(helper.part_file(out, number, "tokens"), "wb") as file,
    ):
        for document in documents_of([part], column):
            tokens = encode(document)  # of start_worker
            file.write(tokens)
            entry = (token_folder.hash_of(document), len(document), len(tokens))
            table.write(np.array(entry, helper.DOCUMENT))
            token_count += len(tokens)
    return {
        "tokens": token_count,
        "cpu_seconds": time.process_time() - began,
        "peak_memory_bytes": report.peak_memory_bytes(helper.CPU),
    }


def documents_of(parts: list[Part], column: str) -> Iterator[bytes]:
    """Yield the documents of parts."""
    for part in parts:
        for span in part:
            yield from documents.read(span.origin, column, span.start, span.stop, TEXT_BYTES)


# --- 3. make all parts, in worker processes


def make_missing_parts(parts: list[Part], args, definition: str, about: dict) -> list[dict]:
    """Make the parts that do not exist yet, on --workers processes. Return what each cost."""
    sizes = []
    missing = []
    for number, part in enumerate(parts):
        sizes.append(sum(span.size for span in part))
        if not helper.is_finished(args.out, number, about["dtype"]):
            missing.append(number)
    bar = report.progress_bar(
        description="tokenizing",
        total=sum(sizes),
        initial=sum(sizes) - sum(sizes[number] for number in missing),
        unit="B",
    )

    # Not fork: it would copy locks that threads of this process hold.
    pool = ProcessPoolExecutor(
        args.workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=start_worker,
        initargs=(os.getpid(), definition, about),
    )
    costs = []
    try:
        size_of = {}
        for number in missing:
            future = pool.submit(make_part, number, parts[number], args.out, args.column)
            size_of[future] = sizes[number]
        for future in as_completed(size_of):
            costs.append(future.result())
            bar.update(size_of[future])
    except BaseException as error:
        for worker in multiprocessing.active_children():
            worker.kill()
        if isinstance(error, BrokenProcessPool):
            raise exits.UserError(
                "a worker was killed (too little memory?): the same command with fewer --workers"
            ) from None
        raise
    finally:
        bar.close()
        pool.shutdown(cancel_futures=True)
    return costs


def start_worker(parent: int, definition: str, about: dict) -> None:
    """Prepare a worker process: make its tokenizer, and let it end with its parent."""
    global encode
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also after kill -9
    if os.getppid() != parent:  # the parent has ended before the line above
        os._exit(1)
    encode = encoder.encoder(definition, about)


# --- 4. join the parts


def join(args, parts: list[Part], definition: str, about: dict) -> np.ndarray:
    """Choose what is held out, and write the tokens of all parts, in order, to the folder.

    Return the side of each document: see choose_sides.
    """
    numbers = range(len(parts))
    hashes = np.concatenate([helper.read_table(args.out, number)["hash"] for number in numbers])
    sizes = np.concatenate([helper.read_table(args.out, number)["bytes"] for number in numbers])
    if not sizes.any():
        raise exits.UserError("--data holds no text")
    sides = token_folder.choose_sides(args.data, hashes, sizes)

    # A document that is cut becomes two, which have other tokens: read its text again.
    is_cut = sides == token_folder.CUT
    texts = documents_of(parts, args.column) if is_cut.any() else itertools.repeat(b"")
    encode = lru_cache(encoder.encoder(definition, about))  # such a document may have many copies
    about = {
        **about,
        "documents": len(sides) + int(is_cut.sum()),
        "text_bytes": int(sizes.sum()),
    }

    end_tokens = 0
    scratch = args.out / helper.PARTS
    with (
        exits.writing("the tokens", args.out),
        token_folder.writer(args.out, about, scratch) as write,
    ):
        all_tokens = tokens_of_documents(args.out, len(parts), np.dtype(about["dtype"]))
        for tokens, side, text in zip(all_tokens, sides.tolist(), texts, strict=False):
            pieces = [(side, tokens)]
            if side == token_folder.CUT:
                pieces = [(part, encode(piece)) for part, piece in token_folder.split(text, side)]
            for side_of_piece, tokens_of_piece in pieces:
                write(side_of_piece, tokens_of_piece)
                end_tokens += np.count_nonzero(tokens_of_piece == about["end_id"])
        if about["end_id"] is not None:
            assert end_tokens == about["documents"], (
                f"{end_tokens} end-of-text tokens for {about['documents']} documents"
            )
    return sides


def tokens_of_documents(out: Path, count: int, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Yield the tokens of each document, in the order of the parts."""
    for number in range(count):
        with open(helper.part_file(out, number, "tokens"), "rb") as file:
            for length in helper.read_table(out, number)["tokens"].tolist():
                yield np.frombuffer(file.read(length * dtype.itemsize), dtype)


# --- the program


def main() -> int:
    args = helper.parse_args(__doc__)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process per core has no use for threads
    began = time.perf_counter()

    sources = helper.find_sources(args)
    definition, about = encoder.load_tokenizer(args.tokenizer, args.end_token)
    helper.print_end_token(args, about)

    # The same command continues in its folder. Another one would mix two corpora: here is all that
    # the tokens depend on.
    source = [
        sources.fingerprint,
        args.column,
        args.config,
        args.split,
        about,
        PART_BYTES,
        TEXT_BYTES,
        hashlib.sha256(definition.encode()).hexdigest(),
    ]
    helper.open_out(args.out)
    source_file = args.out / "source.json"
    if not source_file.exists():
        with (
            exits.writing("source.json", args.out),
            files.complete_file(source_file, scratch=args.out / helper.PARTS) as file,
        ):
            json.dump(source, file)
    try:
        found = source_file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        found = None
    if found != json.dumps(source):
        raise exits.UserError(
            f"--out {args.out} is of other data, flags or tokenizer, or has a damaged source.json: "
            "delete it, or name another"
        )

    costs = []
    reference_tokens_per_second = None
    if not (args.out / "corpus.json").exists():
        parts = list(split_into_parts(sources.origins))
        costs = make_missing_parts(parts, args, definition, about)
        sides = join(args, parts, definition, about)
        if args.tokenizer != "bytes":
            chosen = zip(documents_of(parts, args.column), sides, strict=True)
            try:
                reference_tokens_per_second = helper.compare_with_transformers(args.out, chosen)
            except BaseException:
                # Without corpus.json, the next start joins and compares again.
                files.delete_files(args.out / helper.PARTS, "corpus.json")
                files.move(args.out / "corpus.json", args.out / helper.PARTS / "corpus.json")
                raise
    files.delete(args.out / helper.PARTS)

    about, _, _ = token_folder.read(args.out, f"--out {args.out}", "delete the folder")
    helper.report_summary(args, about, costs, reference_tokens_per_second, began)
    return 0


if __name__ == "__main__":
    exits.run(main)
