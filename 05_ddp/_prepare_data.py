"""Flags, damaged folders, the comparison with transformers and the summary of prepare_data.py."""

import argparse
import os
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from common import cli, exits, files, report
from lm import documents, token_folder
from lm.tokenizer import open_tokenizer

CPU = SimpleNamespace(type="cpu")  # stands for torch.device: this script does not import torch
PARTS = "parts"  # the folder in --out with what is not joined yet
RESULTS = ("source.json", *token_folder.NAMES)
# What a part holds of each document, beside its tokens. Copies have the same hash.
DOCUMENT = np.dtype([("hash", np.uint64), ("bytes", np.int64), ("tokens", np.int64)])
COMPARED_BYTES = 2**20  # of text, which transformers tokenizes as well


# --- flags


def parse_args(doc: str) -> argparse.Namespace:
    """Parse the flags. Raise UserError if torchrun has started several processes."""
    parser = cli.Parser(doc)
    parser.add_argument(
        "--data",
        default="stdlib",
        help="stdlib, a .txt, .md, .py, .jsonl or .parquet file, a folder, or hf:NAME",
    )
    parser.add_argument(
        "--tokenizer", default="bytes", help="bytes, or a Hugging Face name or folder"
    )
    parser.add_argument(
        "--end-token", help="written after each document (default: the tokenizer's eos)"
    )
    parser.add_argument(
        "--column",
        default="text",
        help="of .jsonl, .parquet and hf:NAME: the one that holds the text",
    )
    parser.add_argument("--config", help="of hf:NAME")
    parser.add_argument("--split", default="train", help="of hf:NAME")
    parser.add_argument(
        "--out",
        type=cli.output_folder,
        default=Path("runs/tokens"),
        help="the folder of tokens (default: runs/tokens)",
    )
    parser.add_argument(
        "--workers",
        type=cli.positive_int,
        default=os.cpu_count(),
        help="processes (default: one per core)",
    )
    parser.add_argument(
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
    return args


def find_sources(args: argparse.Namespace) -> documents.Sources:
    """Find what --data refers to. Raise UserError for a file whose type is not read."""
    sources = documents.find(args.data, args.config, args.split, outputs=[args.out])
    if sources.other_files:
        raise exits.UserError(
            f"--data {args.data} holds {sources.other_files[0]}, which cannot be read: "
            "convert or move it"
        )
    if sources.run_outputs:
        print(f"--data {args.data}: {sources.left_out()}")
    return sources


def print_end_token(args: argparse.Namespace, about: dict) -> None:
    """Print which token ends a document."""
    end = f"each document ends with {about['end_token']!r}"
    if about["end_id"] is None:
        end = "a document has no end token"
    print(f"{args.data}, --tokenizer {args.tokenizer}: {end}", flush=True)


# --- files


def open_out(out: Path) -> None:
    """Create --out and the folder of its parts. Raise UserError if there are files of others."""
    if not (out / "source.json").exists():
        for name in RESULTS:
            files.check_replaceable(out / name, None)
    files.open_folder(out / PARTS, files.UNFINISHED)


def part_file(out: Path, number: int, content: str) -> Path:
    """Return the file of a part with its "tokens", or with the table of its "documents"."""
    return out / PARTS / f"{number:06}.{content}"


def is_finished(out: Path, number: int, dtype: str) -> bool:
    """Return whether a part has all its files."""
    try:
        size = part_file(out, number, "tokens").stat().st_size
        return size == read_table(out, number)["tokens"].sum() * np.dtype(dtype).itemsize
    except OSError:
        return False


def read_table(out: Path, number: int) -> np.ndarray:
    """Return what a part holds of its documents, as DOCUMENT."""
    return np.fromfile(part_file(out, number, "documents"), DOCUMENT)


# --- results


def compare_with_transformers(out: Path, documents: Iterable[tuple[bytes, int]]) -> float | None:
    """Assert that transformers makes the same first tokens. Return its tokens per CPU second.

    `documents` yields each document of the input with its side. The documents in the first
    COMPARED_BYTES are compared.
    """
    about, train, _ = token_folder.read(out, f"--out {out}", "delete the folder")
    texts = []
    size = 0
    for document, side_of_document in documents:
        size += len(document)
        if size > COMPARED_BYTES:
            break
        for side, text in token_folder.split(document, side_of_document):
            if side == token_folder.TRAIN:
                texts.append(text.decode(errors="replace"))

    tokenizer = open_tokenizer(about["tokenizer"])
    began = time.process_time()
    tokens_of_texts = []
    for text in texts:
        encoding = tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        tokens_of_texts.append(encoding.input_ids)
    seconds = time.process_time() - began

    expected = []
    for tokens in tokens_of_texts:
        expected += tokens
        if about["end_id"] is not None:
            expected.append(about["end_id"])
    expected = expected[: about["train_tokens"]]
    assert train[: len(expected)].tolist() == expected, "transformers makes other tokens"
    print(f"checked: the first {len(expected):,} tokens are those of transformers")
    if not expected:
        return None
    return len(expected) / seconds


def report_summary(
    args: argparse.Namespace,
    about: dict,
    costs: list[dict],
    reference_tokens_per_second: float | None,
    began: float,
) -> None:
    """Print the summary and write --json. `costs` are of the parts that were missing."""
    cpu_seconds = None
    tokens_per_second = None
    worker_peak = None
    if costs:
        cpu_seconds = sum(cost["cpu_seconds"] for cost in costs)
        tokens_per_second = sum(cost["tokens"] for cost in costs) / cpu_seconds
        worker_peak = max(cost["peak_memory_bytes"] for cost in costs)
    summary = {
        **about,
        "tokens": about["train_tokens"] + about["held_out_tokens"],
        "text_bytes": about.get("text_bytes"),  # older folders do not have it
        "cpu_seconds": cpu_seconds,
        "cpu_tokens_per_second": tokens_per_second,
        "transformers_cpu_tokens_per_second": reference_tokens_per_second,
        "worker_peak_memory_bytes": worker_peak,
        "peak_memory_bytes": report.peak_memory_bytes(CPU),
        "seconds": time.perf_counter() - began,
    }
    for name, value in summary.items():
        print(f"{name:<34} {report.for_people(name, value)}")
    if about["end_id"] is not None:
        print(f"checked: {about['documents']:,} documents, and as many end-of-text tokens")
    report.write_json(summary | {"data": args.data, "workers": args.workers}, args.json)
