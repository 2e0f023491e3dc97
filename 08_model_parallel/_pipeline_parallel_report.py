"""The reporting side of pipeline_parallel.py: the bubbles, pictures, and whether all schedules equal one process."""

import argparse
import time

import torch
import torch.distributed as dist
from _pipeline_parallel_batches import Batch
from _pipeline_parallel_picture import letters, plot
from _pipeline_parallel_replay import Span, bubble_formula, idle_share, most_held, replay
from _pipeline_parallel_stages import Pipeline
from torch import nn

from old import hardware, report, runtime

TOLERANCE = 1e-5  # what another order of the same fp32 sums may change, relative to the norm of a tensor
WARM_UP_STEPS = 2  # not timed, where there are more: first allocations, and torch learns the shapes
BY_HAND = "hand"


def describe(pipeline: Pipeline, micro_batches: int, tokens_per_step: float) -> tuple[dict, list[list[Span]]]:
    """A schedule as --json has it, and the timelines of its fastest step. Every rank must call it."""
    record = pipeline.record
    of_ranks = runtime.gather(
        {
            "timelines": record.timelines,
            "step_seconds": record.step_seconds,
            "relative_errors": pipeline.relative_errors,
            "messages": record.messages,
            "bytes_sent": record.bytes_sent,
            "most_held": record.most_held,
        }
    )
    ranks = len(of_ranks)
    steps = len(pipeline.losses)
    timed_steps = range(WARM_UP_STEPS if steps > WARM_UP_STEPS else 0, steps)
    seconds = {step: max(rank["step_seconds"][step] for rank in of_ranks) for step in timed_steps}
    timelines = {step: [rank["timelines"][step] for rank in of_ranks] for step in timed_steps}
    bubbles = [idle_share(timelines[step]) for step in timed_steps]
    errors = [rank["relative_errors"] for rank in of_ranks]
    # where a schedule has no list, what its ranks have computed is one
    orders = pipeline.orders or [[span.instruction for span in rank["timelines"][-1]] for rank in of_ranks]
    replayed = idle_share(replay(orders))
    formula = bubble_formula(pipeline.name, ranks, micro_batches, len(pipeline.stages))
    assert replayed == formula, f"{pipeline.name}: {replayed} of the time units are idle, and must be {formula}"
    by_hand = pipeline.by == BY_HAND
    held = [most_held(order) for order in orders]
    if by_hand:
        found = [rank["most_held"] for rank in of_ranks]
        assert found == held, f"{pipeline.name}: ranks held {found} micro-batches, and their lists say {held}"
    row = {
        "schedule": pipeline.name,
        "by": pipeline.by,
        "stages_per_rank": len(pipeline.stages),
        "losses": pipeline.losses,
        "gradient_norms": pipeline.norms,
        # NaN stays in torch's maximum
        "relative_errors": {what: torch.tensor([rank[what] for rank in errors]).max().item() for what in errors[0]},
        "bubble_formula": float(formula),
        "bubble_replayed": float(replayed),
        "bubble_measured": report.spread(bubbles),
        "most_held_per_rank": held,
        "messages_per_step_per_rank": [rank["messages"] // steps for rank in of_ranks] if by_hand else None,
        "sent_per_step_bytes_per_rank": [rank["bytes_sent"] // steps for rank in of_ranks] if by_hand else None,
        "step_seconds": report.spread([*seconds.values()]),
        "tokens_per_second": report.spread([tokens_per_step / value for value in seconds.values()]),
    }
    return row, timelines[min(seconds, key=seconds.get)]


def check(rows: list[dict], micro_batches: int, hidden_bytes: int) -> None:
    """What the script teaches; fails where it does not hold."""
    for row in rows:
        for what, error in row["relative_errors"].items():
            name = f"{row['schedule']} by {row['by']}"
            assert error <= TOLERANCE, f"{name}: {what} differ from one process by {error:.0e}"
    errors = {what: max(row["relative_errors"][what] for row in rows) for what in rows[0]["relative_errors"]}
    told = ", ".join(f"{what} {error:.1g}" for what, error in errors.items())
    print(f"checked: each schedule equals one process at each step (tolerance {TOLERANCE:g}): {told}")
    for row in rows:
        if row["by"] != BY_HAND:
            continue
        ranks = len(row["messages_per_step_per_rank"])
        stages_per_rank = row["stages_per_rank"]
        # two for each stage and micro-batch, but the last stage sends no activations, and the first no gradients
        messages = [micro_batches * (2 * stages_per_rank - (rank == 0) - (rank == ranks - 1)) for rank in range(ranks)]
        found = row["messages_per_step_per_rank"], row["sent_per_step_bytes_per_rank"]
        expected = messages, [hidden_bytes * count for count in messages]
        assert found == expected, f"{row['schedule']}: messages and bytes are {found}, and must be {expected}"
        held = held_formula(row["schedule"], ranks, micro_batches, stages_per_rank)
        found = row["most_held_per_rank"]
        assert found == held, f"{row['schedule']}: ranks hold {found} micro-batches, and must hold {held}"
    print("checked: idle time units, micro-batches held, messages and bytes are those of the formulas, on every rank")


def held_formula(name: str, ranks: int, micro_batches: int, stages_per_rank: int) -> list[int]:
    """The micro-batches whose activations, of one stage, a rank keeps at most."""
    if name == "GPipe":
        return [micro_batches] * ranks
    if name == "1F1B":
        return [min(ranks - rank, micro_batches) for rank in range(ranks)]
    most = stages_per_rank * micro_batches
    return [min(2 * (ranks - rank - 1) + (stages_per_rank - 1) * ranks + 1, most) for rank in range(ranks)]


def table(rows: list[dict]) -> str:
    head = ["schedule", "by", "stages per rank", "idle by formula", "replayed", "measured (lowest to highest)"]
    lines = [[*head, "held at most, rank by rank"]]
    for row in rows:
        measured = row["bubble_measured"]
        held = row["most_held_per_rank"]
        lines.append(
            [
                row["schedule"],
                row["by"].rpartition(".")[2],
                str(row["stages_per_rank"]),
                f"{row['bubble_formula']:.3f}",
                f"{row['bubble_replayed']:.3f}",
                f"{measured['median']:.2f} ({measured['min']:.2f} to {measured['max']:.2f})",
                ", ".join(map(str, held)),
            ]
        )
    return report.table(lines)


def conclude(
    args: argparse.Namespace,
    pipelines: list[Pipeline],
    expected_losses: list[float],
    tokens: list[int],
    batch: Batch,
    whole: nn.Module,
    device: torch.device,
    began: float,
) -> None:
    """Say what was measured, then whether what the script teaches holds. Every rank must call it."""
    micro_batches = len(batch.inputs)
    described = [describe(pipeline, micro_batches, sum(tokens) / len(tokens)) for pipeline in pipelines]
    if not runtime.is_rank0():
        return
    rows = [row for row, _ in described]
    ranks = dist.get_world_size()
    parameters = sum(parameter.numel() for parameter in whole.parameters())
    layers = whole.config.num_hidden_layers
    sizes = f"{micro_batches} micro-batches of {args.micro_batch_size} sequences of up to {args.seq_len} tokens"
    what = f"{args.model}: {layers} layers, {parameters:,} parameters in fp32 on {ranks} ranks"
    print(f"{what}, {sizes}, {args.steps} steps")
    if ranks == 1:
        print("one rank: one stage, no neighbour, no bubble; torchrun --nproc_per_node=2 shows more")
    print()
    print("Idle: the share of all ranks' time in which nothing is computed. Formula and replay count a forward as one")
    print("unit of time, a backward as two, a message as none. Held: micro-batches whose activations a rank keeps.")
    print(table(rows))
    drawn = []
    for pipeline, (_, timelines) in zip(pipelines, described, strict=True):
        if pipeline.by == BY_HAND or "zero" in pipeline.name:  # torch's others compute in the same orders
            drawn.append((pipeline, timelines))
    print("\na, b, c: forward of a micro-batch; A, B, C: its backward; #: the weights' part of a backward; .: idle.")
    for pipeline, timelines in drawn:
        print(f"\n{pipeline.name}: replayed, and below as recorded in its fastest step")
        print("\n".join([*letters(replay(pipeline.orders)), *letters(timelines)]))
    print()
    if args.plot:
        title = f"{args.model}, {ranks} ranks, {sizes}"
        if plot([(pipeline.name, timelines) for pipeline, timelines in drawn], title, args.plot):
            print(f"picture: {args.plot}")
    one_f_one_b = next(row for row in rows if row["schedule"] == "1F1B")
    first, last = one_f_one_b["losses"][0], one_f_one_b["losses"][-1]
    print(f"1F1B's loss, the mean over all tokens of the batch: {first:.3f} at the first step, {last:.3f} at the last")
    summary = {
        "device": hardware.device_name(device),
        "world_size": ranks,
        "dtype": "fp32",
        "model": args.model,
        "parameters": parameters,
        "steps": args.steps,
        "tokens": sum(tokens),
        "first_loss": first,
        "last_loss": last,
        "tokens_per_second": one_f_one_b["tokens_per_second"]["median"],
        "peak_memory_bytes": report.peak_memory_bytes(device),
        "seconds": time.perf_counter() - began,
        "layers": layers,
        "micro_batches": micro_batches,
        "losses_of_one_process": expected_losses,
        "schedules": rows,
    }
    report.write_json(summary, args.json)
    check(rows, micro_batches, batch.hidden_bytes)
