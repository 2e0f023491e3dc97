"""What pipeline_parallel.py stands on: stages, one process to compare with, timelines, torch's schedules, checks."""

import argparse
import dataclasses
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _shared import keep_stage
from torch import Tensor, nn

from common import data, lesson, measure, model, shapes
from common.exits import UserError

UNTIED_NANO = "untied-nano"
LARGEST_NORM = 1.0  # of gradients
# SGD moves by the gradient itself. Adam divides by its size and would hide one that is N times too large.
make_optimizer = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
TOLERANCE = 1e-5  # relative; what another order of the same sums in fp32 may change
COLUMNS = {
    "name": "schedule",
    "stages_per_rank": "stages per rank",
    "idle_share": "idle units",
    "most_held_per_rank": "micro-batches held, rank by rank",
    "most_activation_bytes": "activations, at most",
    "sent_bytes": "sent, all ranks",
    "gradient_error": "gradient error",
}


@dataclass
class Stage:
    number: int
    is_last: bool
    net: nn.Module
    delayed: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)  # see SplitLinear in the lesson


@dataclass
class Baseline:
    """What all schedules are given, and what one process makes of it."""

    config: shapes.Config
    device: torch.device
    batches: list[tuple[Tensor, Tensor]]  # inputs and targets of a step: [micro-batches, sequences, length]
    tokens: int  # of a step, without padding
    micro_batches: int
    row: dict  # of the table
    gradients: list[dict[str, Tensor]]  # of each step, clipped


def load_config(args: argparse.Namespace) -> shapes.Config:
    """The model's shape. UserError for what so many ranks cannot run."""
    gpus = torch.cuda.device_count() if args.device != "cpu" else 0
    ranks = int(os.environ.get("WORLD_SIZE", max(2, gpus)))  # torchrun's, or what lesson.relaunch will start
    stages = ranks * args.chunks if ranks > 1 else 1
    config = shapes.load_config(args.model.replace(UNTIED_NANO, "nano"), 256, args.seq_len)
    if args.model == UNTIED_NANO:
        layers = max(config.num_hidden_layers, stages)
        config = dataclasses.replace(config, tie_word_embeddings=False, num_hidden_layers=layers)
    if config.tie_word_embeddings:
        reason = "the first and the last stage would hold the same matrix"
        raise UserError(f"--model {args.model} has tied embeddings, {reason}: use {UNTIED_NANO} or an untied one")
    if (layers := config.num_hidden_layers) < stages:
        fix = f"--chunks {layers // ranks}" if layers >= ranks else f"at most {layers} processes"
        needed = f"--chunks {args.chunks} on {ranks} processes needs {stages} layers"
        raise UserError(f"{needed}, --model {args.model} has {layers}: use {fix}")
    return config


def build_stage(config: shapes.Config, number: int, stages: int, device: torch.device) -> Stage:
    """Stage 0 of 1 is the whole model. A weight depends on its name alone; gradients are 0."""
    with torch.device("meta"):
        net = model.Transformer(config)
    keep_stage(net, number, stages).to_empty(device=device)
    net.init_weights(seed=0)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return Stage(number, number == stages - 1, net)


def loss_share(logits: Tensor, targets: Tensor, tokens: int) -> Tensor:
    """A micro-batch's part of the mean over the tokens of the whole batch. Its own mean would be another number."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / tokens


def train_one_process(config: shapes.Config, args: argparse.Namespace, device: torch.device) -> Baseline:
    """Train the whole model, with the whole batch at once. Every rank does so, for itself."""
    micro_batches = args.micro_batches_per_rank * dist.get_world_size()
    sequences = micro_batches * args.micro_batch_size  # of a step
    inputs, targets = lesson.one_batch(args.steps * sequences, args.seq_len, device)
    lengths = torch.arange(sequences, device=device) * 7 % args.seq_len + 1  # the rest is padding
    padding = torch.arange(args.seq_len, device=device) >= lengths.repeat(args.steps)[:, None]
    targets[padding] = data.PADDING
    shape = (args.steps, micro_batches, args.micro_batch_size, args.seq_len)
    batches = [*zip(inputs.view(shape), targets.view(shape), strict=True)]
    tokens = int(lengths.sum())
    net = build_stage(config, 0, 1, device).net
    optimizer = make_optimizer(net.parameters())
    losses, norms, gradients = [], [], []
    for inputs, targets in batches:
        loss = loss_share(net(inputs.flatten(0, 1)), targets.flatten(0, 1), tokens)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), LARGEST_NORM).item())
        losses.append(loss.item())
        gradients.append({name: parameter.grad.clone() for name, parameter in net.named_parameters()})
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    row = {"name": "one process", "losses": losses, "gradient_norms": norms}
    return Baseline(config, device, batches, tokens, micro_batches, row, gradients)


def gradient_error(stages: list[Stage], expected: dict[str, Tensor]) -> float:
    """The largest relative error of a weight's gradient on this rank."""
    found = {name: parameter.grad for stage in stages for name, parameter in stage.net.named_parameters()}
    return measure.relative_error([*found.values()], [expected[name] for name in found])


# The time line of a schedule, by arithmetic alone: which rank computes what when, if messages take no time.
UNITS = {"Forward": 1, "Backward": 2, "BackwardInput": 1, "BackwardWeight": 1}  # of time, for one stage


def timelines(orders: list[list[tuple]]) -> list[list[tuple]]:
    """For each rank (name, micro-batch, chunk, start, end). AssertionError if ranks wait for each other for ever."""
    ranks = len(orders)
    last_stage = ranks * (1 + max(chunk for _, _, chunk in orders[0])) - 1
    queues = [deque(order) for order in orders]
    lines = [[] for _ in orders]
    done = {None: 0}  # when a stage was done with a micro-batch; what needs no input can start at 0
    while any(queues):
        left = sum(map(len, queues))
        for rank, (queue, line) in enumerate(zip(queues, lines, strict=True)):
            while queue and (needed := input_of(*queue[0], rank, ranks, last_stage)) in done:
                name, micro_batch, chunk = queue.popleft()
                start = max(done[needed], line[-1][-1] if line else 0)
                end = start + UNITS[name]
                line.append((name, micro_batch, chunk, start, end))
                done[name.removesuffix("Input"), micro_batch, chunk * ranks + rank] = end
        assert sum(map(len, queues)) < left, "deadlock: each rank waits for another"
    return lines


def input_of(name: str, micro_batch: int, chunk: int, rank: int, ranks: int, last_stage: int) -> tuple | None:
    """What must be done before, as name, micro-batch and stage."""
    stage = chunk * ranks + rank
    if name == "Forward":
        return (name, micro_batch, stage - 1) if stage > 0 else None
    if name == "BackwardWeight":
        return "Backward", micro_batch, stage
    return ("Forward", micro_batch, stage) if stage == last_stage else ("Backward", micro_batch, stage + 1)


def idle_share(lines: list[list[tuple]]) -> Fraction:
    """The bubble: the share of all ranks' units of time in which nothing is computed."""
    busy = sum(end - start for line in lines for *_, start, end in line)
    return 1 - Fraction(busy, len(lines) * max(line[-1][-1] for line in lines))


def picture(row: dict) -> str:
    """A line per rank, a letter per unit of time: what the rank computes in it."""
    end = max(line[-1][-1] for line in row["timelines"])
    drawn = [f"\n{row['name']}"]
    for rank, line in enumerate(row["timelines"]):
        shown = ""
        for name, micro_batch, _, start, stop in line:
            letter = chr(ord("a") + micro_batch % 26)
            letter = {"Forward": letter, "BackwardWeight": "#"}.get(name, letter.upper())
            shown = shown.ljust(start, ".") + letter * (stop - start)
        drawn.append(f"    rank {rank}  {shown.ljust(end, '.')}")
    return "\n".join(drawn)


def torch_step(name: str, orders: list[list[tuple]], stages: list[Stage], baseline: Baseline) -> Callable:
    """A step by torch.distributed.pipelining. AssertionError if its list differs from `orders`."""
    from torch.distributed import pipelining  # a second that wrong flags need not wait for

    ranks = dist.get_world_size()
    schedule_class = {
        "GPipe": pipelining.ScheduleGPipe,
        "1F1B": pipelining.Schedule1F1B,
        "interleaved 1F1B": pipelining.ScheduleInterleaved1F1B,
        "zero bubble": pipelining.ScheduleInterleavedZeroBubble,  # takes one stage per rank, too
    }[name]
    sizes = ranks * len(stages), baseline.device
    parts = [pipelining.PipelineStage(stage.net, stage.number, *sizes) for stage in stages]
    schedule = schedule_class(
        parts[0] if name in ("GPipe", "1F1B") else parts,
        n_microbatches=baseline.micro_batches,
        loss_fn=partial(loss_share, tokens=baseline.tokens),
        scale_grads=False,  # the default divides the gradients by the micro-batches, as a mean of means would
    )

    def step(inputs: Tensor, targets: Tensor) -> tuple[Tensor, None]:
        losses = []
        first = [inputs.flatten(0, 1)] if stages[0].number == 0 else []
        last = {"target": targets.flatten(0, 1), "losses": losses} if stages[-1].is_last else {}
        schedule.step(*first, **last, return_outputs=False)
        return sum(losses, torch.zeros((), device=baseline.device)).detach(), None

    if name not in ("GPipe", "1F1B"):  # for those two torch makes no list
        for rank, order in enumerate(orders):
            listed = []
            for action in filter(None, schedule.pipeline_order[rank]):
                kind = action.computation_type.name.title().replace("_", "").removeprefix("Full")
                listed.append((kind, action.microbatch_index, action.stage_index // ranks))
            assert listed == order, f"{name}: torch computes in another order on rank {rank}"
    return step


def formulas(name: str, chunks: int, baseline: Baseline) -> dict:
    """Of a schedule, from the sizes alone: Huang et al. 2019, Narayanan et al. 2021 (2.2), Qi et al. 2023."""
    ranks, micro_batches = dist.get_world_size(), baseline.micro_batches
    held, sent = [], []
    one_message = 4 * baseline.batches[0][0][0].numel() * baseline.config.hidden_size  # bytes
    for rank in range(ranks):
        warm_up = 2 * (ranks - rank - 1) + (chunks - 1) * ranks  # of interleaved 1F1B, in stages
        most = {"GPipe": micro_batches, "1F1B": ranks - rank, "zero bubble": ranks}
        held.append(most.get(name, min(warm_up + 1, chunks * micro_batches)))
        # two for each stage and micro-batch, but the last stage sends no activations, and the first no gradients
        messages = micro_batches * (2 * chunks - (rank == 0) - (rank == ranks - 1))
        sent.append(messages * one_message)
    units = 1 if name == "zero bubble" else 3  # idle, for each other rank; a micro-batch takes 3
    idle = Fraction(units * (ranks - 1), 3 * chunks * micro_batches + units * (ranks - 1))
    return {"idle_share": float(idle), "most_held_per_rank": tuple(held), "sent_bytes_per_rank": tuple(sent)}


def check(rows: list[dict], baseline: Baseline, args: argparse.Namespace) -> list[str]:
    one_process, *others = rows
    largest = 0.0
    for row in others:
        errors = {"gradients": row["gradient_error"]}
        for what in ("losses", "gradient_norms"):  # as lists of steps
            errors[what] = measure.relative_error([*torch.tensor(row[what])], [*torch.tensor(one_process[what])])
        for what, error in errors.items():  # NaN fails, too
            assert error <= TOLERANCE, f"{row['name']}: {what} differ from one process by {error:.0e}"
            largest = max(largest, error)
        by_hand = "by torch" not in row["name"]
        for key, expected in formulas(row["name"], row["stages_per_rank"], baseline).items() if by_hand else ():
            assert row[key] == expected, f"{row['name']}: {key} is {row[key]}, and must be {expected}"
    most_bytes = {row["name"]: row["most_activation_bytes"] for row in others}
    if args.micro_batches_per_rank > 1:
        assert most_bytes["1F1B"] < most_bytes["GPipe"], "1F1B holds as much as GPipe"
    return [
        f"each schedule has losses, gradient norms and gradients of one process in {args.steps} steps ({largest:.0e})",
        "idle units, micro-batches held and bytes sent are those of the formulas, on every rank",
        "where torch makes a list of a schedule (not for GPipe and 1F1B), it is the list by hand",
    ]
