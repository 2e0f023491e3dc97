"""The measuring side of ddp_from_scratch.py: who holds which weights, and how much communication is hidden."""

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common import checkpoint, hardware, report, runtime

WARMUP_STEPS = 2  # not counted: DDP rebuilds its buckets after the first step
TOLERANCE = 1e-4  # of the way that the weights have gone: what another order of the same sums may change


def timed(seconds: list[float], work: Callable, *args) -> None:
    """Append the seconds from all ranks' common start to the end of the work of the last of them."""
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    wait()
    dist.barrier()
    start = time.perf_counter()
    work(*args)
    wait()
    elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    seconds.append(elapsed.item())


def communicate(run: SimpleNamespace, gradients: Tensor) -> None:
    """The all-reduces of a step and nothing else: one after the other, or all under way at once."""
    works = []
    for part in gradients.split(run.sizes):
        works.append(dist.all_reduce(part, async_op=True))
        if run.in_turn:
            works.pop().wait()
    for work in works:
        work.wait()


def time_communication(run: SimpleNamespace, gradients: Tensor) -> None:
    if run.module is not run.net and (rebuilt := run.module._get_ddp_logging_data().get("rebuilt_bucket_sizes")):
        run.sizes = [int(size) // gradients.itemsize for size in rebuilt.split(",")]  # DDP's own, after its first step
    if run.sizes:
        timed(run.comm_seconds, communicate, run, gradients)


def spread(values: list[float]) -> dict[str, float]:
    values = values[WARMUP_STEPS:]
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def off(net: nn.Module, whole: nn.Module, start: nn.Module) -> float:
    """How far net is from the weights that one process reached, as a share of the way that those have gone."""
    ours, theirs, old = (torch.cat([p.detach().flatten() for p in n.parameters()]) for n in (net, whole, start))
    return (torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs - old)).item()


def results(runs: list[SimpleNamespace], whole: SimpleNamespace, start: nn.Module) -> list[dict]:
    """Each run as --json has it, complete on rank 0; collective. The first run is the control, which sends nothing.
    Exposed is what a step takes longer than the control's; hidden, the rest of what the all-reduces take alone."""
    world_size = dist.get_world_size()
    losses = torch.stack([torch.stack(run.losses) for run in runs])
    dist.all_reduce(losses)  # a rank's loss is the mean over its part, and the parts are equal
    rows = []
    for run, means in zip(runs, (losses / world_size).tolist(), strict=True):
        row = {
            "name": run.name,
            "losses": means,
            "weights_sha256": runtime.gather(checkpoint.digest(run.net)),
            "off_one_process": off(run.net, whole.net, start),
            "bucket_bytes": [size * next(start.parameters()).itemsize for size in run.sizes],
            "started_in_backward": run.early,
            "step_seconds": spread(run.step_seconds),
            **dict.fromkeys(("communication_seconds", "exposed_seconds", "hidden_share")),
        }
        if run.sizes and world_size > 1:
            exposed = [a - b for a, b in zip(run.step_seconds, runs[0].step_seconds, strict=True)]
            row["communication_seconds"], row["exposed_seconds"] = spread(run.comm_seconds), spread(exposed)
            row["hidden_share"] = 1 - row["exposed_seconds"]["median"] / row["communication_seconds"]["median"]
        rows.append(row)
    return rows


def check(rows: list[dict]) -> None:
    """What the script teaches; fails where it does not hold."""
    silent, *averaged = ([*row["weights_sha256"]] for row in rows)
    world_size = len(silent)
    if world_size == 1:
        print("one rank: an all-reduce is a sum of one term, so there is nothing to hide")
    assert all(len(set(ranks)) == 1 for ranks in averaged), f"ranks hold different weights: {averaged}"
    print(f"checked: in each variant, all {world_size} ranks hold the same weights to the bit")
    if world_size > 1:
        assert len(set(silent)) == world_size, "ranks that never talk hold the same weights: they read the same data"
        print(f"checked: without communication they do not ({rows[0]['off_one_process']:.0%} of the way off)")
    assert averaged[1] == averaged[2], "starting the same all-reduces earlier has changed their sums"
    same = all(ranks == averaged[0] for ranks in averaged)
    if world_size <= 2:  # a + b = b + a; with three terms the order counts, and a bucket's layout decides it
        assert same, f"a sum of {world_size} terms came out differently: {averaged}"
    print(
        f"checked: (1) to (4) and every bucket size give {'the same bits' if same else 'one result, but for rounding'}"
    )
    far = max(row["off_one_process"] for row in rows[1:])
    assert far <= TOLERANCE, f"weights are {far:.0e} of the way off those of one process: that is no rounding"
    print(f"checked: one process with the whole batch ends there too, {far:.0e} of the way off at most (rounding)")
    for row in rows:
        early, count = row["started_in_backward"], len(row["bucket_bytes"])
        assert early in (None, count - 1), f"{row['name']}: {early} of {count} all-reduces started in backward"


def table(rows: list[dict]) -> str:
    """For people."""
    letters = list(dict.fromkeys(row["weights_sha256"][0] for row in rows))
    head = ["variant", "all-reduces", "alone, ms", "step, ms", "exposed, ms (lowest to highest)", "hidden", "bits"]
    lines = [head]
    for row in rows:
        early, count, alone = row["started_in_backward"], len(row["bucket_bytes"]), row["communication_seconds"]
        exposed = {name: value * 1e3 for name, value in (row["exposed_seconds"] or {}).items()}
        lines.append(
            [
                row["name"],
                f"{count}" + (f", {early} in backward" if early is not None else ""),
                f"{alone['median'] * 1e3:.1f}" if alone else "n/a",
                f"{row['step_seconds']['median'] * 1e3:.1f}",
                "{median:.1f} ({min:.1f} to {max:.1f})".format(**exposed) if exposed else "n/a",
                f"{row['hidden_share']:.0%}" if alone else "n/a",
                "ABCDEFGHI"[letters.index(row["weights_sha256"][0])],
            ]
        )
    legend = (
        f"n = {rows[0]['step_seconds']['n']}; times are medians, of the slowest rank; equal letters: equal weights.\n"
        "hidden = 1 - exposed / alone: it means something where the range of exposed is narrow against alone."
    )
    return f"{report.table(lines)}\n{legend}"


def conclude(
    args: argparse.Namespace,
    runs: list[SimpleNamespace],
    whole: SimpleNamespace,
    start: nn.Module,
    device: torch.device,
    began: float,
) -> None:
    """Say what was measured, then whether what the script teaches holds; collective."""
    rows = results(runs, whole, start)
    if not runtime.is_rank0():
        return
    print(table(rows))
    parameters, steps = list(start.parameters()), WARMUP_STEPS + args.steps
    summary = {
        **{"device": hardware.device_name(device), "world_size": dist.get_world_size(), "dtype": "fp32"},
        **{"model": args.model, "parameters": sum(p.numel() for p in parameters), "steps": steps},
        **{"tokens": steps * args.global_batch_size * args.seq_len},
        **{"first_loss": rows[1]["losses"][0], "last_loss": rows[1]["losses"][-1]},
        **{"peak_memory_bytes": report.peak_memory_bytes(device), "seconds": time.perf_counter() - began},
        **{"gradient_bytes": sum(p.nbytes for p in parameters), "warmup_steps": WARMUP_STEPS, "variants": rows},
    }
    report.write_json(summary, args.json)
    check(rows)
