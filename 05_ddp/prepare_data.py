"""Tokenize text of any size once, on all cores, into a folder that every training script reads.

The documents are split into parts: 8 MiB of a plain file, row groups of a .parquet file, a whole
compressed file, or a file of a data set on the hub. A worker process turns one part at a time into
tokens, in files of its own. At the end the parts are joined, in order.

A part depends on the input alone. So the processes exchange no text, and more text takes no more
memory. After a kill the same command makes only the parts that are missing, with any number of
workers, and the tokens are the same.

    laptop    python 05_ddp/prepare_data.py
    one node  python 05_ddp/prepare_data.py --data web/ --tokenizer models/smollm2-135m --out tokens
    the hub   python 05_ddp/prepare_data.py --data hf:OWNER/NAME --config NAME --split train \\
                  --column text --out tokens
    then      torchrun --standalone --nproc_per_node=8 05_ddp/train.py \
                  --data tokens --model models/smollm2-135m

The folder has train.npy and held_out.npy, all tokens in one row as uint8, uint16 or uint32, and
corpus.json. Each document ends with the tokenizer's end-of-text token. About 5 % of the documents
are held out, by a hash of their text.

What to look at: the token that ends a document. In a chat model it ends a turn; --end-token names
another one. The tokens per CPU second, here and with transformers.

Previous: train.py. Next: 06_fsdp_zero/.
"""

import ctypes
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before NumPy: it says what to do without it

# isort: split

import _prepare_data as helper
import numpy as np

from common import files, report
from lm import corpus, stdlib_text

PART_BYTES = 8 * 2**20  # of input: what one worker makes at once, and the most that a kill costs it
TEXT_BYTES = 2**20  # a longer text file becomes several documents
COPY_BYTES = 2**20  # read at once when parts are joined
SIDES = ("train", "held_out")
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
    elif corpus.file_type(origin) == ".parquet":
        for group, size in enumerate(helper.row_group_sizes(origin)):
            yield Span(origin, group, group + 1, size)
    elif origin.endswith(corpus.COMPRESSED):
        yield Span(origin, 0, sys.maxsize, os.path.getsize(origin))
    else:  # the lines that begin in these bytes
        size = os.path.getsize(origin)
        for start in range(0, max(size, 1), PART_BYTES):
            yield Span(origin, start, start + PART_BYTES, min(PART_BYTES, size - start))


# --- 2. make one part


def make_part(number: int, part: Part, out: Path, column: str) -> dict:
    """Read, tokenize and write a part, in a worker. Return its counts.

    The counts are also written, as the last file: a part that has this file is complete.
    """
    began = time.process_time()
    counts = {"documents": 0, "text_bytes": 0, "train": 0, "held_out": 0}
    with (
        complete_file(out, f"{helper.PARTS}/{number:06}.train") as train,
        complete_file(out, f"{helper.PARTS}/{number:06}.held_out") as held_out,
    ):
        for span in part:
            for document in corpus.documents(
                span.origin, column, span.start, span.stop, TEXT_BYTES
            ):
                tokens = encode(document)  # of start_worker
                if is_held_out(document):
                    held_out.write(tokens)
                    counts["held_out"] += len(tokens)
                else:
                    train.write(tokens)
                    counts["train"] += len(tokens)
                counts["documents"] += 1
                counts["text_bytes"] += len(document)
    counts["cpu_seconds"] = time.process_time() - began
    counts["peak_memory_bytes"] = report.peak_memory_bytes(helper.CPU)
    with complete_file(out, f"{helper.PARTS}/{number:06}.json") as file:
        file.write(json.dumps(counts).encode())
    return counts


def is_held_out(document: bytes) -> bool:
    """Return True for 5 % of all texts.

    It depends on the text alone, so copies of a document are never on both sides.
    """
    digest = hashlib.sha256(document).digest()
    return int.from_bytes(digest[:8], "big") < stdlib_text.HELD_OUT * 2**64


@contextmanager
def complete_file(out: Path, name: str) -> Iterator[IO]:
    """Open a file that appears under its name when it is complete, or, after a kill, not at all."""
    with (
        exits.writing(name, out),
        files.complete_file(out / name, "wb", scratch=out / helper.PARTS) as file,
    ):
        yield file


# --- 3. make all parts, in worker processes


def make_missing_parts(parts: list[Part], args, definition: str, about: dict) -> list[dict]:
    """Make the parts that do not exist yet, on --workers processes. Return the counts of all."""
    counts_of = {}
    missing = []
    for number in range(len(parts)):
        counts = helper.finished_part(args.out, number, about["dtype"])
        if counts is None:
            missing.append(number)
        else:
            counts_of[number] = counts

    sizes = []
    for part in parts:
        sizes.append(sum(span.size for span in part))
    finished_bytes = sum(sizes[number] for number in counts_of)
    bar = report.progress_bar(
        description="tokenizing", total=sum(sizes), initial=finished_bytes, unit="B"
    )

    # Not fork: it would copy locks that threads of this process hold.
    pool = ProcessPoolExecutor(
        args.workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=start_worker,
        initargs=(os.getpid(), definition, about),
    )
    try:
        running = {}
        for number in missing:
            future = pool.submit(make_part, number, parts[number], args.out, args.column)
            running[future] = number
        for future in as_completed(running):
            number = running[future]
            counts_of[number] = future.result()
            bar.update(sizes[number])
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
    return [counts_of[number] for number in range(len(parts))]


def start_worker(parent: int, definition: str, about: dict) -> None:
    """Prepare a worker process: make its tokenizer, and let it end with its parent."""
    global encode
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also after kill -9
    if os.getppid() != parent:  # the parent has ended before the line above
        os._exit(1)
    encode = corpus.encoder(definition, about)


# --- 4. join the parts


def join(out: Path, parts: list[dict], about: dict) -> None:
    """Write the tokens of all parts, in order, as train.npy and held_out.npy.

    corpus.json comes last: a folder that has it is complete.
    """
    dtype = np.dtype(about["dtype"])
    documents = sum(counts["documents"] for counts in parts)
    train_tokens = sum(counts["train"] for counts in parts)
    tokens = train_tokens + sum(counts["held_out"] for counts in parts)
    if not any(counts["text_bytes"] for counts in parts):
        raise exits.UserError("--data holds no text")
    # With few documents, the hashes may hold out none of them, or most of the text. Then the last
    # tokens are held out.
    if train_tokens == tokens or train_tokens < tokens / 2:
        train_tokens = int(tokens * (1 - stdlib_text.HELD_OUT))

    sha256 = hashlib.sha256()
    end_tokens = 0
    train_bytes_left = train_tokens * dtype.itemsize
    with complete_file(out, "train.npy") as train, complete_file(out, "held_out.npy") as held_out:
        helper.write_npy_header(train, dtype, train_tokens)
        helper.write_npy_header(held_out, dtype, tokens - train_tokens)
        for block in blocks_of_parts(out, len(parts)):
            train.write(block[:train_bytes_left])
            held_out.write(block[train_bytes_left:])
            train_bytes_left = max(0, train_bytes_left - len(block))
            sha256.update(block)
            end_tokens += np.count_nonzero(np.frombuffer(block, dtype) == about["end_id"])

    if about["end_id"] is not None:
        assert end_tokens == documents, f"{end_tokens} end-of-text tokens for {documents} documents"
    content = {
        **about,
        "sha256": sha256.hexdigest(),
        "documents": documents,
        "train_tokens": train_tokens,
        "held_out_tokens": tokens - train_tokens,
    }
    with complete_file(out, "corpus.json") as file:
        file.write(json.dumps(content).encode())


def blocks_of_parts(out: Path, count: int) -> Iterator[bytes]:
    """Yield the tokens of all parts as bytes: all for training, then all held out."""
    for side in SIDES:
        for number in range(count):
            with open(out / f"{helper.PARTS}/{number:06}.{side}", "rb") as file:
                while block := file.read(COPY_BYTES):
                    yield block


# --- the program


def main() -> int:
    args = helper.parse_args(__doc__)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process per core has no use for threads
    began = time.perf_counter()

    sources = helper.find_sources(args)
    definition, about = corpus.load_tokenizer(args.tokenizer, args.end_token)
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
    if not (args.out / "source.json").exists():
        with complete_file(args.out, "source.json") as file:
            file.write(json.dumps(source).encode())
    if helper.read_source(args.out) != source:
        raise exits.UserError(
            f"--out {args.out} is of other data, flags or tokenizer: delete it, or name another"
        )

    parts = []
    if not (args.out / "corpus.json").exists():
        spans = list(split_into_parts(sources.origins))
        parts = make_missing_parts(spans, args, definition, about)
        join(args.out, parts, about)
    files.delete(args.out / helper.PARTS)

    about, train, _ = corpus.open_tokens(args.out, f"--out {args.out}", "delete the folder")
    reference_tokens_per_second = None
    if about["tokenizer"] != "bytes":
        texts = helper.first_texts(sources.origins, args.column, TEXT_BYTES, is_held_out)
        reference_tokens_per_second = helper.compare_with_transformers(train, texts, about)
    helper.report_summary(args, about, parts, reference_tokens_per_second, began)
    return 0


if __name__ == "__main__":
    exits.run(main)
