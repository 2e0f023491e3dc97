"""What pipeline_parallel.py stands on: stages, one process to compare with, timelines, torch's schedules, checks."""

import argparse
import dataclasses
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _stages import keep_stage
from torch import Tensor, nn

from common import measure, runtime
from common.exits import UserError
from lm import data, model, shapes, weights

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
    "messages": "messages, all ranks",
    "gradient_error": "gradient error",
}


@dataclass
class Stage:
    number: int
    is_last: bool
    net: nn.Module


@dataclass
class Baseline:
    """What all schedules are given, and what one process makes of it."""

    config: shapes.Config
    device: torch.device
    # inputs and targets of a step: [micro-batches, sequences, length]
    batches: list[tuple[Tensor, Tensor]]
    tokens: int  # of a step, without padding
    micro_batches: int
    losses: list[float]
    gradients: list[dict[str, Tensor]]  # of each step, clipped


def load_config(args: argparse.Namespace) -> shapes.Config:
    """The model's shape. UserError for what so many ranks cannot run."""
    ranks = runtime.world_size_after_relaunch(args.device)
    stages = ranks * args.chunks if ranks > 1 else 1
    config = shapes.load_config(args.model.replace(UNTIED_NANO, "nano"), 256, args.seq_len)
    if args.model == UNTIED_NANO:
        layers = max(config.num_hidden_layers, stages)
        config = dataclasses.replace(config, tie_word_embeddings=False, num_hidden_layers=layers)
    if config.tie_word_embeddings:  # the first and the last stage would hold the same matrix
        raise UserError(
            f"--model {args.model} has tied embeddings: use {UNTIED_NANO} or an untied one"
        )
    if (layers := config.num_hidden_layers) < stages:
        needed = f"--chunks {args.chunks} on {ranks} processes needs {stages} layers"
        raise UserError(
            f"{needed}, --model {args.model} has {layers}: use fewer chunks or processes"
        )
    return config


def build_stage(config: shapes.Config, number: int, stages: int, device: torch.device) -> Stage:
    """Stage 0 of 1 is the whole model. A weight depends on its name alone; gradients are 0."""
    with torch.device("meta"):
        net = model.Transformer(config)
    keep_stage(net, number, stages).to_empty(device=device)
    weights.init_weights(net, seed=0)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return Stage(number, number == stages - 1, net)


def loss_share(logits: Tensor, targets: Tensor, tokens: int) -> Tensor:
    """A micro-batch's part of the mean over the tokens of the whole batch. Its own mean would be another number."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / tokens


def train_one_process(
    config: shapes.Config, args: argparse.Namespace, device: torch.device
) -> Baseline:
    """Train the whole model, with the whole batch at once. Every rank does so, for itself."""
    micro_batches = args.micro_batches_per_rank * dist.get_world_size()
    sequences = micro_batches * args.micro_batch_size  # of a step
    inputs, targets = data.one_batch(args.steps * sequences, args.seq_len, device)
    lengths = torch.arange(sequences, device=device) * 7 % args.seq_len + 1  # the rest is padding
    padding = torch.arange(args.seq_len, device=device) >= lengths.repeat(args.steps)[:, None]
    targets[padding] = data.PADDING
    shape = (args.steps, micro_batches, args.micro_batch_size, args.seq_len)
    batches = [*zip(inputs.view(shape), targets.view(shape), strict=True)]
    tokens = int(lengths.sum())
    net = build_stage(config, 0, 1, device).net
    optimizer = make_optimizer(net.parameters())
    losses, gradients = [], []
    for inputs, targets in batches:
        loss = loss_share(net(inputs.flatten(0, 1)), targets.flatten(0, 1), tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), LARGEST_NORM)
        losses.append(loss.item())
        gradients.append(
            {name: parameter.grad.clone() for name, parameter in net.named_parameters()}
        )
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return Baseline(config, device, batches, tokens, micro_batches, losses, gradients)


# The time line of a schedule, by arithmetic alone: which rank computes what when, if messages take no time.
UNITS = {"Forward": 1, "Backward": 2}  # of time, for one stage


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
                done[name, micro_batch, chunk * ranks + rank] = end
        assert sum(map(len, queues)) < left, "deadlock: each rank waits for another"
    return lines


def input_of(
    name: str, micro_batch: int, chunk: int, rank: int, ranks: int, last_stage: int
) -> tuple | None:
    """What must be done before, as name, micro-batch and stage."""
    stage = chunk * ranks + rank
    if name == "Forward":
        return (name, micro_batch, stage - 1) if stage > 0 else None
    return (
        ("Forward", micro_batch, stage)
        if stage == last_stage
        else ("Backward", micro_batch, stage + 1)
    )


def idle_share(lines: list[list[tuple]]) -> dict:
    """The bubble: the share of all ranks' units of time in which nothing is computed."""
    busy = sum(end - start for line in lines for *_, start, end in line)
    total = len(lines) * max(line[-1][-1] for line in lines)
    return {"timelines": lines, "idle_share": (total - busy) / total}


def picture(row: dict) -> str:
    """A line per rank, a letter per unit of time: what the rank computes in it."""
    end = max(line[-1][-1] for line in row["timelines"])
    drawn = [f"\n{row['name']}"]
    for rank, line in enumerate(row["timelines"]):
        shown = ""
        for name, micro_batch, _, start, stop in line:
            letter = chr(ord("a" if name == "Forward" else "A") + micro_batch % 26)
            shown = shown.ljust(start, ".") + letter * (stop - start)
        drawn.append(f"    rank {rank}  {shown.ljust(end, '.')}")
    return "\n".join(drawn)


def torch_step(name: str, stages: list[Stage], baseline: Baseline) -> Callable:
    """A step by torch.distributed.pipelining."""
    from torch.distributed import pipelining  # a second that wrong flags need not wait for

    total = dist.get_world_size() * len(stages)
    parts = [
        pipelining.PipelineStage(stage.net, stage.number, total, baseline.device)
        for stage in stages
    ]
    kinds = {"GPipe": pipelining.ScheduleGPipe, "1F1B": pipelining.Schedule1F1B}
    schedule = kinds.get(name, pipelining.ScheduleInterleaved1F1B)(
        parts if len(parts) > 1 else parts[0],
        n_microbatches=baseline.micro_batches,
        loss_fn=partial(loss_share, tokens=baseline.tokens),
        # the default divides the gradients by the micro-batches, as a mean of means would
        scale_grads=False,
    )

    def step(inputs: Tensor, targets: Tensor) -> tuple[Tensor, None]:
        losses = []
        first = [inputs.flatten(0, 1)] if stages[0].number == 0 else []
        last = {"target": targets.flatten(0, 1), "losses": losses} if stages[-1].is_last else {}
        schedule.step(*first, **last, return_outputs=False)
        return sum(losses, torch.zeros((), device=baseline.device)).detach(), None

    return step


def formulas(name: str, chunks: int, baseline: Baseline) -> dict:
    """Of a schedule, from the sizes alone: Huang et al. 2019, Narayanan et al. 2021 (2.2)."""
    ranks, micro_batches = dist.get_world_size(), baseline.micro_batches
    held = []
    for rank in range(ranks):
        warm_up = 2 * (ranks - rank - 1) + (chunks - 1) * ranks  # of interleaved 1F1B, in stages
        most = {"GPipe": micro_batches, "1F1B": ranks - rank}
        held.append(most.get(name, min(warm_up + 1, chunks * micro_batches)))
    idle = (ranks - 1) / (chunks * micro_batches + ranks - 1)
    # activations there, gradients back, between all stages
    messages = 2 * micro_batches * (chunks * ranks - 1)
    return {"idle_share": idle, "most_held_per_rank": tuple(held), "messages": messages}


def check(rows: list[dict], baseline: Baseline, args: argparse.Namespace) -> list[str]:
    largest = 0.0
    for row in rows[1:]:
        loss_error = measure.relative_error(
            torch.tensor(row["losses"]), torch.tensor(baseline.losses)
        )
        for error in (loss_error, row["gradient_error"]):
            assert error <= TOLERANCE, (
                f"{row['name']}: losses or gradients differ from one process by {error:.0e}"
            )
            largest = max(largest, error)
        by_hand = "by torch" not in row["name"]
        for key, expected in (
            formulas(row["name"], row["stages_per_rank"], baseline).items() if by_hand else ()
        ):
            assert row[key] == expected, (
                f"{row['name']}: {key} is {row[key]}, and must be {expected}"
            )
    most_bytes = {row["name"]: row["most_activation_bytes"] for row in rows[1:]}
    assert most_bytes["1F1B"] < most_bytes["GPipe"] or args.micro_batches_per_rank == 1, (
        "1F1B holds as much as GPipe"
    )
    return [
        f"each schedule has the losses and gradients of one process in {args.steps} steps ({largest:.0e})",
        "idle units, micro-batches held and messages are those of the formulas, on every rank",
    ]
