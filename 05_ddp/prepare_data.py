"""Tokenize text of any size once, on all cores, into a folder that every training script maps: --data FOLDER.

The documents are cut into parts: 8 MiB of a plain file, row groups of a .parquet file, a whole compressed file, a file
of a data set on the hub. A worker turns one part at a time into tokens in files of its own. A part depends on the input
alone. So no process hands text to another, more text takes no more memory, and after a kill the same command makes only
the parts that are missing, on any number of workers. In the end the parts are joined, in order.

    laptop    python 05_ddp/prepare_data.py
    one node  python 05_ddp/prepare_data.py --data web/ --tokenizer models/smollm2-135m --out tokens
    the hub   python 05_ddp/prepare_data.py --data hf:OWNER/NAME --config NAME --split train --column text --out tokens
    then      torchrun --nproc_per_node=8 05_ddp/train.py --data tokens --model models/smollm2-135m

It leaves train.npy and held_out.npy, the tokens one behind the other as uint8, uint16 or uint32, and corpus.json. Each
document ends with the tokenizer's end-of-text token. About 5 % of the documents are held out, by a hash of their text.

Look for: the token that ends a document (a chat model's ends a turn: --end-token names another), and the tokens per CPU
second, here and by transformers. Before: train.py. Next: 06_fsdp_zero/.
"""

import ctypes
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from _prepare_data import (
    CPU,
    TEXT_BYTES,
    finished_part,
    is_held_out,
    join,
    read_source,
    tokens_of_transformers,
    whole_file,
)

from common import cli, exits, report
from lm import corpus

PART_BYTES = 8 * 2**20  # of input: what one worker makes at once, and the most that a kill costs it


def list_parts(origins: list) -> Iterator[list[tuple]]:
    """Parts of about PART_BYTES, each a list of (origin, start, stop, bytes). No text is read for that."""
    part, size = [], 0
    for span in spans(origins):
        if part and size + span[3] > PART_BYTES:
            yield part
            part, size = [], 0
        part.append(span)
        size += span[3]
    yield part


def spans(origins: list) -> Iterator[tuple]:
    """The pieces of the input that a worker can read without what stands before them."""
    for origin in origins:
        if not isinstance(origin, str):  # a data set: a shard is one of its files
            shards = origin.num_shards
            yield from (
                (origin.shard(shards, index), 0, sys.maxsize, PART_BYTES) for index in range(shards)
            )
        elif corpus.file_type(origin) == ".parquet":
            with corpus.as_user_error(f"--data {origin}"):
                from pyarrow import parquet

                about = parquet.ParquetFile(origin).metadata
            sizes = [
                about.row_group(group).total_byte_size for group in range(about.num_row_groups)
            ]
            yield from ((origin, group, group + 1, size) for group, size in enumerate(sizes))
        elif origin.endswith(corpus.COMPRESSED):
            yield origin, 0, sys.maxsize, os.path.getsize(origin)
        else:  # the lines that begin in these bytes
            size = os.path.getsize(origin)
            for start in range(0, max(size, 1), PART_BYTES):
                yield origin, start, start + PART_BYTES, min(PART_BYTES, size - start)


def make_part(number: int, part: list[tuple], out: Path, column: str) -> dict:
    """A worker's task: read, tokenize and write one part. NUMBER.json comes last: a part that has it is whole."""
    began = time.process_time()
    about = {"documents": 0, "text_bytes": 0, "train": 0, "held_out": 0}
    with (
        whole_file(out, f"parts/{number:06}.train") as train,
        whole_file(out, f"parts/{number:06}.held_out") as held_out,
    ):
        for origin, start, stop, _ in part:
            for document in corpus.documents(origin, column, start, stop, TEXT_BYTES):
                tokens = encode(document)
                side, file = ("held_out", held_out) if is_held_out(document) else ("train", train)
                file.write(tokens)
                about[side] += len(tokens)
                about["documents"] += 1
                about["text_bytes"] += len(document)
    about["cpu_seconds"] = time.process_time() - began
    about["peak_memory_bytes"] = report.peak_memory_bytes(CPU)
    with whole_file(out, f"parts/{number:06}.json") as file:
        file.write(json.dumps(about).encode())
    return about


def start_worker(parent: int, definition: str, about: dict) -> None:
    global encode
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG: end with the parent, even by kill -9
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before that
        os._exit(1)
    encode = corpus.encoder(definition, about)


def make_parts(parts: list, args, definition: str, about: dict) -> list[dict]:
    """Make the parts that are not there yet, on --workers processes. Returns what each part's .json says."""
    done = {}
    for number in range(len(parts)):
        part = finished_part(args.out, number, about["dtype"])
        if part is not None:
            done[number] = part
    left = [number for number in range(len(parts)) if number not in done]
    sizes = [sum(span[3] for span in part) for part in parts]
    begin = sum(sizes[number] for number in done)
    bar = report.progress_bar(description="tokenizing", total=sum(sizes), initial=begin, unit="B")
    # a fork would copy locks that the parent's threads hold
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(args.workers, spawn, start_worker, (os.getpid(), definition, about))
    try:
        running = {
            pool.submit(make_part, number, parts[number], args.out, args.column): number
            for number in left
        }
        for future in as_completed(running):
            number = running[future]
            done[number] = future.result()
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
    return [done[number] for number in range(len(parts))]


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add(
        "--data",
        default="stdlib",
        help="stdlib, a .txt, .md, .py, .jsonl or .parquet file, a folder, or hf:NAME",
    )
    add("--tokenizer", default="bytes", help="bytes, or a Hugging Face name or folder")
    add("--end-token", help="written behind each document (default: the tokenizer's eos)")
    add(
        "--column",
        default="text",
        help="of .jsonl, .parquet and hf:NAME: the one that holds the text",
    )
    add("--config", help="of hf:NAME")
    add("--split", default="train", help="of hf:NAME")
    add(
        "--out",
        type=Path,
        default=Path("runs/tokens"),
        help="the folder of tokens (default: runs/tokens)",
    )
    add(
        "--workers",
        type=cli.positive_int,
        default=os.cpu_count(),
        help="processes (default: one per core)",
    )
    add(
        "--json",
        type=cli.writable_file,
        metavar="PATH",
        help="write the summary as one JSON object",
    )
    args = parser.parse_args()
    if cli.environment_number("WORLD_SIZE", cli.positive_int, "1") > 1:
        raise exits.UserError(
            "this script starts its own processes: start it with python, not with torchrun"
        )
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process per core has no use for threads
    began = time.perf_counter()

    found = corpus.sources(args.data, args.config, args.split, outputs=[args.out])
    origins = found.origins
    if found.other_files:
        raise exits.UserError(
            f"--data {args.data} holds {found.other_files[0]}, which cannot be read: "
            "convert or move it"
        )
    if found.run_outputs:
        names = ", ".join(found.run_outputs[:3])
        print(f"--data {args.data}: left out what runs and this script have written: {names}")
    definition, about = corpus.load_tokenizer(args.tokenizer, args.end_token)
    end = (
        "a document has no end token"
        if about["end_id"] is None
        else f"each document ends with {about['end_token']!r}"
    )
    print(f"{args.data}, --tokenizer {args.tokenizer}: {end}", flush=True)

    # The same command goes on with a folder. Anything else that its tokens depend on would mix two corpora.
    source = [
        found.fingerprint,
        args.column,
        args.config,
        args.split,
        about,
        PART_BYTES,
        TEXT_BYTES,
    ]
    source += [hashlib.sha256(definition.encode()).hexdigest()]
    (args.out / "parts").mkdir(parents=True, exist_ok=True)
    if not (args.out / "source.json").exists():
        with whole_file(args.out, "source.json") as file:
            file.write(json.dumps(source).encode())
    if read_source(args.out) != source:
        raise exits.UserError(
            f"--out {args.out} is of other data, flags or tokenizer: delete it, or name another"
        )

    done = []
    if not (args.out / "corpus.json").exists():
        done = make_parts(list(list_parts(origins)), args, definition, about)
        join(args.out, done, about)
    shutil.rmtree(args.out / "parts")
    about, _, _ = corpus.open_tokens(args.out, f"--out {args.out}", "delete the folder")
    cpu_seconds = sum(part["cpu_seconds"] for part in done)
    text = (
        text
        for origin in origins
        for text in corpus.documents(origin, args.column, longest=TEXT_BYTES)
    )
    summary = {
        **about,
        "tokens": about["train_tokens"] + about["held_out_tokens"],
        "text_bytes": sum(part["text_bytes"] for part in done) or None,
        "cpu_seconds": cpu_seconds or None,
        "cpu_tokens_per_second": sum(part["train"] + part["held_out"] for part in done)
        / cpu_seconds
        if done
        else None,
        "transformers_cpu_tokens_per_second": tokens_of_transformers(args.out, text, about),
        "worker_peak_memory_bytes": max((part["peak_memory_bytes"] for part in done), default=None),
        "peak_memory_bytes": report.peak_memory_bytes(CPU),
        "seconds": time.perf_counter() - began,
    }
    for name, value in summary.items():
        print(f"{name:<36} {report.for_people(name, value)}")
    if about["end_id"] is not None:
        print(f"checked: {about['documents']:,} documents, and as many end-of-text tokens")
    report.write_json(summary | {"data": args.data, "workers": args.workers}, args.json)
    return 0


if __name__ == "__main__":
    exits.run(main)
