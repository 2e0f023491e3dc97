"""Compare planner/ with what was measured on a GPU: bytes and seconds of training and decode.

It reads the rows of nvidia-h200-2026-11-26.json and measures nothing. The seconds of some rows
served to set the constants of planner/measured.py. The table keeps these apart from rows that
were predicted. Bytes have no constant that was set by these rows.

    python benchmarks/predictions.py    written to benchmarks/results/

Look for: errors of the predicted rows within 10 % in seconds and 3 % in bytes, or the reason.
"""

import json
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from _measure import REPO, about, facts, write_results

from common import cli, exits
from common.report import table
from lm import shapes
from planner import inference, machine
from planner.memory import peak
from planner.plan import Plan
from planner.shape import from_config
from planner.step import decode_seconds, step

GIB = 2**30
DEVICE = "NVIDIA H200"
MEASURED = REPO / "benchmarks/results/nvidia-h200-2026-11-26.json"
CALIBRATED = "calibrated on"
PREDICTED = "predicted"
MERGED = "by commit 309bbc5, whose merged q, k, v kept {gib} GiB more{time}; removed since"
EXPLANATION = """The seconds of the rows "calibrated on", and the kernel times of llama-124m, set
the constants of planner/measured.py. The other rows set none, and no row set one of bytes."""


@dataclass(frozen=True)
class Row:
    """A measured row, and what it was for."""

    name: str  # in MEASURED
    model: str
    use: str  # of its seconds
    plan: Plan | None = None  # None: decode, of one sequence
    weights: str = "bf16"  # of decode
    with_evaluation: bool = True  # the measured peak has an evaluation's
    reason: str = ""


TRAIN_124M = Plan(seq_len=1024, micro_batch_size=64, compile=True)
TRAIN_1B = Plan(seq_len=4096, micro_batch_size=4, compile=True)
FSDP_1B = Plan(seq_len=4096, micro_batch_size=4, compile=True, zero=3)
ROWS = (
    Row(
        "variants of the llama-124m step: separate",
        "llama-124m",
        CALIBRATED,
        TRAIN_124M,
        with_evaluation=False,
    ),
    Row("decode llama-8b, bf16", "llama-8b", CALIBRATED),
    Row(
        "decode llama-70b, int4",
        "llama-70b",
        CALIBRATED,
        weights="int4",
        reason="bytes: the measured peak is while loading, with a changed CHUNK",
    ),
    Row("train llama-1b, FSDP on one rank", "llama-1b", PREDICTED, FSDP_1B),
    Row("decode llama-70b, bf16", "llama-70b", PREDICTED),
    Row("train llama-1b", "llama-1b", PREDICTED, TRAIN_1B, reason=MERGED.format(gib=1.25, time="")),
    Row(
        "train llama-124m",
        "llama-124m",
        PREDICTED,
        TRAIN_124M,
        reason=MERGED.format(gib=2.25, time=" and took 7.3 % longer"),
    ),
)


def measured_figures(entry: dict) -> tuple[float, float]:
    """Return the measured seconds of a step and the peak in bytes."""
    if "decode_tokens_per_second" in entry:
        return 1 / entry["decode_tokens_per_second"], entry["peak_memory_bytes"]
    if "peak_memory_gib_printed" in entry:
        return entry["step_seconds"], entry["peak_memory_gib_printed"] * GIB
    return entry["step_seconds"], entry["peak_memory_bytes"]


def predict_training(row: Row) -> tuple[float, float]:
    """Return the predicted seconds of a step and the peak in bytes."""
    shape = from_config(row.model, shapes.SIZES[row.model])
    memory = peak(shape, row.plan)
    size = memory.allocated_bytes() if row.with_evaluation else memory.step_bytes()
    return step(shape, row.plan, machine.read(DEVICE)).seconds, size


def predict_decode(row: Row, entry: dict) -> tuple[float, float]:
    """Return the predicted seconds of a token and the peak in bytes."""
    shape = from_config(row.model, shapes.SIZES[row.model])
    where = machine.read(DEVICE)
    held = {"weights": row.weights, "head_divided": True}
    read = inference.weight_bytes(shape, **held, count_embedding=False)
    cache = inference.kv_cache_bytes(shape, tokens=entry["tokens"])
    seconds = decode_seconds(shape, where, bytes_read=read + cache, weights=row.weights)
    size = inference.weight_bytes(shape, **held) + cache
    prompt_tokens = entry["tokens"] - entry["new_tokens"]
    size += inference.prefill_bytes(shape, tokens=prompt_tokens, bytes_each=2)
    return seconds, size + inference.logits_bytes(shape, sequences=1, bytes_each=2)


def compare(row: Row, entry: dict) -> dict:
    """Return the measured and predicted figures of a row, and their relative errors."""
    seconds, size = measured_figures(entry)
    if row.plan is None:
        predicted_seconds, predicted_size = predict_decode(row, entry)
    else:
        predicted_seconds, predicted_size = predict_training(row)
    return {
        "row": row.name,
        "seconds_use": row.use,
        "measured_seconds": seconds,
        "predicted_seconds": predicted_seconds,
        "seconds_error": predicted_seconds / seconds - 1,
        "measured_bytes": round(size),
        "predicted_bytes": round(predicted_size),
        "bytes_error": predicted_size / size - 1,
        "reason": row.reason,
    }


def main() -> int:
    cli.Parser(__doc__).parse_args()
    entries = {
        entry["name"]: entry for entry in json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]
    }
    comparisons = [compare(row, entries[row.name]) for row in ROWS]
    headings = ["seconds were", "row", "measured, ms", "planner", "error"]
    rows = [[*headings, "measured, GiB", "planner", "error", "why"]]
    for found in comparisons:
        cells = [
            found["seconds_use"],
            found["row"],
            f"{found['measured_seconds'] * 1e3:.2f}",
            f"{found['predicted_seconds'] * 1e3:.2f}",
            f"{found['seconds_error']:+.1%}",
            f"{found['measured_bytes'] / GIB:.2f}",
            f"{found['predicted_bytes'] / GIB:.2f}",
            f"{found['bytes_error']:+.1%}",
            found["reason"],
        ]
        rows.append(cells)
    facts_ = {
        "measured": f"one {DEVICE}, n = 1 for each row: {Path(MEASURED).name}",
        "commit": about("benchmarks/predictions.py", "cpu")["commit"],
        "date": date.today().isoformat(),
        "command": "python benchmarks/predictions.py",
    }
    text = f"# planner/ beside one {DEVICE}\n\n{EXPLANATION}\n\n{table(rows)}\n\n{facts(facts_)}"
    write_results("planner", DEVICE, {"about": facts_, "rows": comparisons}, text)
    print(table(rows))
    return 0


if __name__ == "__main__":
    exits.run(main)
