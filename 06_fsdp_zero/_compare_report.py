"""What compare.py makes of its counts: rows, tables, a picture, and whether they are what the formulas give."""

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path

from _compare_count import Counts
from _compare_least_time import Machine
from _zero_from_scratch_report import expect
from torch import nn

from old import hardware, model, report, runtime, shapes
from old.report import table

# What another order of the same sums may change in a loss; in bf16, also where each method rounds
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}


@dataclass
class Result:
    """What is known of a method; None: not in a dry run."""

    method: str
    counts: Counts
    loss: float | None = None
    seconds: float | None = None  # per step
    least: dict | None = None  # seconds per step, by what they are for

    def row(self, world_size: int, tokens: int) -> dict:
        """As --json has it; `tokens` in a step, over all ranks."""
        traffic = self.counts.traffic
        return {
            "method": self.method,
            "world_size": world_size,
            "parameter_bytes_per_rank": self.counts.parameter_bytes,
            "gradient_bytes_per_rank": self.counts.gradient_bytes,
            "optimizer_bytes_per_rank": self.counts.optimizer_bytes,
            "peak_memory_bytes": self.counts.peak_bytes,
            "all_gathers_per_step": traffic.count("all_gathers"),
            "reduce_scatters_per_step": traffic.count("reduce_scatters"),
            "all_reduces_per_step": traffic.count("all_reduces"),
            "bytes_sent_per_rank_per_step": traffic.all_bytes_sent(),
            "tokens_per_second": tokens / self.seconds if self.seconds else None,
            "predicted_seconds_per_step": self.least["step"],
        }


def conclude(results: list[Result], job, args: argparse.Namespace, machine: Machine, began: float) -> None:
    """Say what was counted, then whether it is what it must be. Every rank may call it."""
    if not runtime.is_rank0():
        return
    world_size = args.world_size
    tokens = world_size * job.micro_batch_size * job.seq_len
    parameters = shapes.parameter_count(job.config)
    rows = [result.row(world_size, tokens) for result in results]
    device = hardware.device_name(job.device)
    place = "in a dry run" if job.dry else f"on {device}"
    title = f"{job.model}, {parameters:,} parameters, {job.dtype}, {world_size} ranks"
    print(f"{title} {place}, {job.micro_batch_size} x {job.seq_len} tokens each, recomputed: {args.checkpointing}")
    if "HSDP" in args.methods:
        print(f"HSDP: {job.replicas} copies, each on {world_size // job.replicas} ranks")
    else:
        print(f"no HSDP: --replicate {job.replicas} leaves {world_size} ranks nothing to shard or nothing to copy")
    print_rows(rows, measured=not job.dry)
    print_times(results, machine)
    summary = {
        "device": device,
        "world_size": world_size,
        "dtype": job.dtype,
        "model": job.model,
        "parameters": parameters,
        "steps": None if job.dry else args.steps,
        "tokens": None if job.dry else args.steps * tokens,
        "peak_memory_bytes": report.peak_memory_bytes(job.device),
        "seconds": time.perf_counter() - began,
        "dry_run": job.dry,
        "replicas_of_hsdp": job.replicas if "HSDP" in args.methods else None,
        "rows": rows,
        "losses": {result.method: result.loss for result in results},
        "least_seconds_on": machine.name,
        "least_seconds": {result.method: result.least for result in results},
    }
    report.write_json(summary, args.json)
    if plot(rows, title, args.plot):
        print(f"picture: {args.plot}")
    check(rows, job, world_size)
    if not job.dry:
        check_losses(results, TOLERANCE[job.dtype])


def expected(method: str, net: nn.Module, world_size: int, replicas: int, gathered_bytes: int) -> dict[str, int]:
    """What a method must hold and call and send, from the shapes alone; on rank 0, which holds the largest part.

    `gathered_bytes` is the size of a weight as fully_shard gathers it.
    """
    parameters = list(net.parameters())
    if method.startswith("ZeRO"):
        of_zero = expect(int(method[-1]), net, world_size)
        del of_zero["other_bytes_per_rank"]
        return of_zero
    if method == "DDP":
        of_ddp = expect(0, net, world_size)
        names = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
        return {f"{name}_per_rank": of_ddp[f"{name}_per_rank"] for name in names} | {
            "all_gathers_per_step": 0,
            "reduce_scatters_per_step": 0,
            "bytes_sent_per_rank_per_step": of_ddp["bytes_sent_per_rank_per_step"],
        }
    shards = world_size // replicas
    in_blocks = {id(parameter) for block in net.model.layers.values() for parameter in block.parameters()}
    part = part_of_blocks = 0
    for parameter in parameters:
        rows = math.ceil(parameter.shape[0] / shards)  # a rank with fewer rows sends zeros for the rest
        size = rows * parameter.shape[1:].numel()
        part += size
        part_of_blocks += size if id(parameter) in in_blocks else 0
    groups = len(net.model.layers) + 1
    gathered = gathered_bytes * (part + part_of_blocks)  # the root once, a block in forward and in backward
    between_copies = 2 * 4 * part * (replicas - 1) / replicas
    return {
        "parameter_bytes_per_rank": 4 * part,
        "gradient_bytes_per_rank": 4 * part,
        "optimizer_bytes_per_rank": 8 * part + 4 * len(parameters),
        "all_gathers_per_step": 2 * groups - 1 if shards > 1 else 0,
        "reduce_scatters_per_step": groups if shards > 1 else 0,
        "all_reduces_per_step": groups if replicas > 1 else 0,
        "bytes_sent_per_rank_per_step": round((gathered + 4 * part) * (shards - 1) + between_copies),
    }


def check(rows: list[dict], job, world_size: int) -> None:
    """What was counted is what the formulas give; fails where it is not."""
    net = model.build("", job.config, seed=0, device="meta")
    gathered_bytes = 2 if job.dtype == "bf16" else 4
    for row in rows:
        copies = job.replicas if row["method"] == "HSDP" else 1
        for name, value in expected(row["method"], net, world_size, copies, gathered_bytes).items():
            assert row[name] == value, f"{row['method']}: {name} is {row[name]:,}, and must be {value:,}"
    print("checked: bytes held, calls and bytes sent are those of the formulas, padding included")


def check_losses(results: list[Result], tolerance: float) -> None:
    differences = {result.method: abs(result.loss / results[0].loss - 1) for result in results}
    for method, difference in differences.items():
        assert difference <= tolerance, (
            f"{method}: its loss differs from DDP's by {difference:.0e}: no rounding does that"
        )
    print(
        f"checked: all have DDP's loss in the third step, relative difference {max(differences.values()):.0e} at most"
    )


def print_rows(rows: list[dict], measured: bool) -> None:
    last = "tokens/s" if measured else "step, at least"
    lines = [["method", "weights", "gradients", "AdamW", "peak", "calls*", "sent a step", last]]
    for row in rows:
        held = [row[f"{kind}_bytes_per_rank"] for kind in ("parameter", "gradient", "optimizer")]
        calls = [row[f"{kind}_per_step"] for kind in ("all_gathers", "reduce_scatters", "all_reduces")]
        speed = row["tokens_per_second"] if measured else row["predicted_seconds_per_step"]
        told = "n/a" if speed is None else f"{speed:,.0f}" if measured else f"{speed:.3g} s"
        sizes = [size_for_people(size) for size in (*held, row["peak_memory_bytes"])]
        sent = size_for_people(row["bytes_sent_per_rank_per_step"])
        lines.append([row["method"], *sizes, " + ".join(map(str, calls)), sent, told])
    print(f"\n{table(lines)}")
    print("* all-gathers + reduce-scatters + all-reduces; all figures are for one rank, sizes in powers of 1,024")


def print_times(results: list[Result], machine: Machine) -> None:
    """What the least time of a step consists of, on which machine."""
    if all(value is None for result in results for value in result.least.values()):
        print("least time of a step: n/a without the device's figures and the links' (--device-name, --link)")
        return
    lines = [["method", "products", "links", "AdamW", "step, at least"]]
    for result in results:
        seconds = [result.least[name] for name in ("compute", "links", "update", "step")]
        lines.append([result.method, *("n/a" if value is None else f"{value:.3g} s" for value in seconds)])
    if results[0].seconds:
        lines[0].append("measured")
        for line, result in zip(lines[1:], results, strict=True):
            line.append(f"{result.seconds:.3g} s")
    print(f"\nLeast time of a step on {machine.name} ({machine.links_for_people()})")
    print(table(lines))
    too_large = [result.method for result in results if result.counts.peak_bytes > (machine.memory_bytes or math.inf)]
    if too_large:
        print(f"more than the {machine.memory_bytes / 1e9:g} GB of {machine.name}: {', '.join(too_large)}")


def size_for_people(size: int) -> str:
    """In MiB up to 1,000, then in GiB."""
    return f"{size / 2**20:,.2f} MiB" if size < 1000 * 2**20 else f"{size / 2**30:,.2f} GiB"


def plot(rows: list[dict], title: str, file: Path) -> bool:
    """Memory by what it is for, and bytes sent, a bar for each method. False without matplotlib."""
    pyplot = report.pyplot()
    if pyplot is None:
        return False
    methods = [row["method"] for row in rows]
    canvas, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4))
    ends = [0.0] * len(rows)
    for what, key in (("weights", "parameter"), ("gradients", "gradient"), ("AdamW's moments", "optimizer")):
        sizes = [row[f"{key}_bytes_per_rank"] / 2**30 for row in rows]
        left.barh(methods, sizes, left=ends, label=what)
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    rest = [row["peak_memory_bytes"] / 2**30 - end for row, end in zip(rows, ends, strict=True)]
    left.barh(methods, rest, left=ends, label="for a moment: activations, gathered weights", color="lightgray")
    left.set(xlabel="GiB per rank")
    canvas.suptitle(title)
    canvas.legend(*left.get_legend_handles_labels(), loc="upper center", bbox_to_anchor=(0.5, 0), ncols=4)
    right.barh(methods, [row["bytes_sent_per_rank_per_step"] / 2**30 for row in rows], color="C4")
    right.set(xlabel="GiB sent per rank and step")
    for axes in (left, right):
        axes.invert_yaxis()
    canvas.savefig(file, format="png", dpi=120, bbox_inches="tight")
    pyplot.close(canvas)
    return True
