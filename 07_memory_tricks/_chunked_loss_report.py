"""The reporting side of chunked_loss.py: what each way of computing the loss takes, and whether all agree."""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from old import hardware, report
from old.data import PADDING
from old.step_cost import Memory, record_memory

TOLERANCES = {  # of losses and gradients, relative; a GPU adds thousands of numbers one after the other
    "cpu": {"fp32": 1e-6, "bf16": 2e-2},
    "cuda": {"fp32": 1e-5, "bf16": 2e-2},
}
ELEMENT_BYTES = {"fp32": 4, "bf16": 2}


class Measured(NamedTuple):
    """One way of computing the loss."""

    name: str
    loss: float
    hidden_gradient: Tensor
    head_gradient: Tensor
    held_bytes: int  # before the step
    memory: Memory
    seconds: list[float]


def cannot_compile(device: torch.device) -> str | None:
    """Why torch.compile would fail here, None if it would not."""
    if device.type == "cpu" and not (shutil.which("g++") and Path(sysconfig.get_path("include"), "Python.h").exists()):
        return "torch.compile on a CPU needs g++ and Python.h"
    return None


def bytes_held(batch: Iterable[Tensor], device: torch.device) -> int:
    """On CUDA with the workspaces of its libraries, which stay from step to step."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return sum(tensor.nbytes for tensor in batch)


def record_allocations(
    step: Callable[[], object], device: torch.device, held_bytes: int, compiled: bool = False
) -> Memory:
    """As record_memory, and on a CPU from the allocator's own log. So it also sees what happens inside a compiled graph
    or inside an operator of several steps, as torch's linear_cross_entropy is one."""
    if device.type == "cuda":
        # under its mode torch runs a compiled function uncompiled: the line would be another step's than the peak
        timeline = [] if compiled else record_memory(step, device).timeline
        report.reset_peak_memory(device)
        step()  # not under a mode that sees operators: torch.compile may refuse to work there
        return Memory(timeline, torch.cuda.max_memory_allocated(device))
    with quiet_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as log:
        step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        log.export_chrome_trace(str(file))
        events = [event for event in json.loads(file.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    events.sort(key=lambda event: event["ts"])
    timeline = list(accumulate((event["args"]["Bytes"] for event in events), initial=held_bytes))
    return Memory(timeline, max(timeline))


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """The profiler writes lines about itself to file descriptor 2."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def relative_error(got: Tensor, expected: Tensor) -> float:
    got, expected = got.double(), expected.double()
    return ((got - expected).norm() / (expected.norm().item() or 1.0)).item()  # all zero: the error itself


def describe(way: Measured, plain: Measured) -> dict:
    """A row of the table, as --json has it."""
    gradient_bytes = way.hidden_gradient.nbytes + way.head_gradient.nbytes
    ratios = [own / other for own, other in zip(way.seconds, plain.seconds, strict=True)]
    return {
        "name": way.name,
        "loss": way.loss,
        "loss_relative_error": abs(way.loss - plain.loss) / (abs(plain.loss) or 1.0),
        "hidden_gradient_relative_error": relative_error(way.hidden_gradient, plain.hidden_gradient),
        "head_gradient_relative_error": relative_error(way.head_gradient, plain.head_gradient),
        "held_bytes": way.held_bytes,
        "gradient_bytes": gradient_bytes,
        "peak_bytes": way.memory.peak_bytes,
        "step_bytes": way.memory.peak_bytes - way.held_bytes,
        "seconds": report.spread(way.seconds),
        "seconds_beside_plain": report.spread(ratios),
    }


def print_rows(rows: list[dict]) -> None:
    lines = [["loss", "seconds (lowest to highest)", "time", "memory of the step", "of plain", "gradients differ by"]]
    for row in rows:
        seconds = row["seconds"]
        error = max(row["hidden_gradient_relative_error"], row["head_gradient_relative_error"])
        lines.append(
            [
                row["name"],
                f"{seconds['median']:.3g} ({seconds['min']:.3g} to {seconds['max']:.3g})",
                f"{row['seconds_beside_plain']['median']:.2f}x",
                f"{row['step_bytes'] / 2**20:,.1f} MiB",
                f"1/{rows[0]['step_bytes'] / row['step_bytes']:.1f}",
                f"{error:.1e}",
            ]
        )
    print(report.table(lines) + "\n")


def check(rows: list[dict], args: argparse.Namespace, device_type: str) -> None:
    """What the script teaches; fails where it does not hold."""
    tolerance = TOLERANCES[device_type][args.dtype]
    for row in rows[1:]:
        errors = [row[f"{what}_relative_error"] for what in ("loss", "hidden_gradient", "head_gradient")]
        assert max(errors) <= tolerance, f"{row['name']}: loss and gradients are off by {errors}"
    print(f"checked: losses and gradients of all rows equal the plain loss's within {tolerance:g} (relative)")

    plain, by_hand = rows[0], next(row for row in rows if row["name"].startswith("chunked"))
    formula, in_words = plain_bytes(args)
    share = plain["step_bytes"] / formula
    few_bytes = formula // 100 + 16 * args.tokens + 4096  # what has a number per token, and the allocator's rounding
    assert abs(plain["step_bytes"] - formula) <= few_bytes, f"{in_words} is {formula:,}, not {plain['step_bytes']:,}"
    print(
        f"checked: the plain loss takes {in_words} = {formula / 2**20:,.1f} MiB over what is held before "
        f"(measured: {share:.4f} of it)"
    )
    if args.dtype == "fp32":  # in bf16 a CPU's products make copies of their own
        most = chunked_bytes(args)
        assert by_hand["step_bytes"] <= most, f"the chunked loss takes {by_hand['step_bytes']:,} bytes, not {most:,}"
    print(
        f"checked: the chunked loss takes {by_hand['step_bytes'] / 2**20:,.1f} MiB, of which "
        f"{by_hand['gradient_bytes'] / 2**20:,.1f} MiB are the gradients that every row hands over"
    )


def plain_bytes(args: argparse.Namespace) -> tuple[int, str]:
    """Log-softmax, its gradient and that of the logits, in fp32; or the last of them and the gradients, if these are
    larger than the first two. And the formula, with N tokens, a vocabulary of V and a hidden size of H."""
    element = ELEMENT_BYTES[args.dtype]
    logits = args.tokens * args.vocab_size
    gradients = element * args.hidden_size * (args.tokens + args.vocab_size)
    if element * logits + gradients > 12 * logits:
        return element * logits + gradients, f"{element} (N V + N H + V H)"
    return 12 * logits, "12 N V"


def chunked_bytes(args: argparse.Namespace) -> int:
    """At the most, in fp32: the gradients, logits and log-softmax of a chunk, and what has a number per token."""
    chunk = min(args.chunk_tokens, args.tokens)
    gradients = 4 * args.hidden_size * (args.tokens + args.vocab_size)
    rows_of_a_chunk = 4 * 2 * chunk * args.hidden_size
    return gradients + 4 * 2 * chunk * args.vocab_size + rows_of_a_chunk + 64 * (args.tokens + chunk) + 2**16


def plot(measured: list[Measured], file: Path) -> None:
    """Memory over the step, a line for each way."""
    if (pyplot := report.pyplot()) is None:
        return
    figure, axes = pyplot.subplots(figsize=(7, 4))
    drawn = [way for way in measured if way.memory.timeline]
    for i, way in enumerate(drawn):  # thinner and thinner: the plain loss and torch's without options are one line
        timeline = way.memory.timeline
        share_of_step = [i / len(timeline) for i in range(len(timeline))]
        axes.step(share_of_step, [size / 2**20 for size in timeline], where="post", label=way.name, linewidth=5 - i)
    axes.set(xlabel="allocations of a step, from the first (0) to the last (1)", ylabel="MiB", ylim=(0, None))
    axes.legend()
    figure.savefig(file, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    print(f"plot: {file}")


def conclude(
    measured: list[Measured],
    targets: Tensor,
    args: argparse.Namespace,
    left_out: dict[str, str],
    device: torch.device,
    began: float,
) -> None:
    """Say what was measured, then whether what the script teaches holds."""
    plain = measured[0]
    rows = [describe(way, plain) for way in measured]
    counted = int((targets != PADDING).sum())
    print(
        f"{args.tokens:,} tokens ({counted:,} counted), hidden {args.hidden_size:,}, vocabulary {args.vocab_size:,}, "
        f"chunks of {args.chunk_tokens:,} tokens, {args.dtype}, {hardware.device_name(device)}\n"
    )
    print_rows(rows)
    plot(measured, args.plot)
    summary = {
        "device": hardware.device_name(device),
        "world_size": 1,
        "dtype": args.dtype,
        "parameters": args.vocab_size * args.hidden_size,
        "tokens": args.tokens,
        "first_loss": plain.loss,
        "last_loss": plain.loss,
        "peak_memory_bytes": report.peak_memory_bytes(device),
        "seconds": time.perf_counter() - began,
        "counted_tokens": counted,
        "chunk_tokens": args.chunk_tokens,
        "logits_bytes": 4 * args.tokens * args.vocab_size,
        "plain_formula_bytes": plain_bytes(args)[0],
        "left_out": left_out,
        "rows": rows,
    }
    report.write_json(summary, args.json)
    by_hand = next(row for row in rows if row["name"].startswith("chunked"))
    seconds = statistics.median(measured[0].seconds)
    print(
        f"chunked by hand: 1/{rows[0]['step_bytes'] / by_hand['step_bytes']:.0f} of the plain loss's memory, in "
        f"{by_hand['seconds_beside_plain']['median']:.2f} of its {seconds:.2g} s"
    )
    check(rows, args, device.type)
