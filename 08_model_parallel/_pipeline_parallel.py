"""The reference on one process, the measurements and the checks of pipeline_parallel.py."""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common import lesson, measure, runtime
from common.exits import UserError
from lm import shapes, stdlib_text
from training.batches import PADDING

UNTIED = {"untied-nano": "nano", "untied-wide": "wide"}
LARGEST_NORM = 1.0  # of gradients
TOLERANCE = 1e-5  # relative; what another order of the same sums in fp32 may change
COLUMNS = {
    "name": "schedule",
    "stages_per_rank": "stages per rank",
    "idle_share": "idle units",
    "most_held_per_rank": "micro-batches held",
    "activation_bytes": "activations",
    "messages": "messages",
    "step_seconds": "step",
    "gradient_error": "from one process",
    "from_hand_error": "from by hand",
}


def load_config(args: argparse.Namespace) -> shapes.Config:
    """Return the model's shape. Raise UserError if it cannot be split into so many stages."""
    ranks = lesson.world_size_after_relaunch(args.device)
    stages = 1
    if ranks > 1:
        stages = ranks * args.chunks
    config = shapes.load_config(UNTIED.get(args.model, args.model), 256, args.seq_len)
    if args.model in UNTIED:
        config = dataclasses.replace(
            config,
            tie_word_embeddings=False,
            num_hidden_layers=max(config.num_hidden_layers, stages),
        )
    if config.tie_word_embeddings:  # the first and the last stage would hold the same matrix
        raise UserError(
            f"--model {args.model} has tied embeddings: use untied-nano or an untied model"
        )
    layers = config.num_hidden_layers
    if layers < stages:
        raise UserError(
            f"--chunks {args.chunks} on {ranks} processes needs {stages} layers, "
            f"--model {args.model} has {layers}: use fewer chunks or processes"
        )
    return config


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD, whose step is proportional to the gradient.

    Adam divides by the gradient's size, which would hide a gradient that is N times too large.
    """
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


# --- one process


@dataclass
class Baseline:
    """The data that every schedule trains on, and the losses and gradients of one process."""

    config: shapes.Config
    device: torch.device
    micro_batches: int
    batches: list[tuple[Tensor, Tensor]]  # of each step: [micro-batches, sequences, tokens]
    tokens: int  # targets of a step, without padding
    losses: list[float]  # of each step
    gradients: list[dict[str, Tensor]]  # of each step, clipped


def make_batches(
    args: argparse.Namespace, micro_batches: int, device: torch.device
) -> tuple[list[tuple[Tensor, Tensor]], int]:
    """Return inputs and targets of each step, and the number of targets that are not padding.

    Sequences have unequal lengths: 1, 8, 15, ... tokens, again from the start beyond --seq-len.
    """
    sequences = micro_batches * args.micro_batch_size  # of a step
    inputs, targets = stdlib_text.one_batch(args.steps * sequences, args.seq_len, device)
    lengths = torch.arange(sequences, device="cpu") * 7 % args.seq_len + 1
    positions = torch.arange(args.seq_len, device=device)
    lengths_of_all_steps = lengths.repeat(args.steps).to(device)
    padding = positions >= lengths_of_all_steps[:, None]  # [steps * sequences, tokens]
    targets[padding] = PADDING
    shape = (args.steps, micro_batches, args.micro_batch_size, args.seq_len)
    batches = list(zip(inputs.view(shape), targets.view(shape), strict=True))
    return batches, int(lengths.sum())


def train_one_process(net: nn.Module, args: argparse.Namespace, device: torch.device) -> Baseline:
    """Train the full model without a pipeline. Every rank does so, for itself."""
    micro_batches = args.micro_batches_per_rank * dist.get_world_size()
    batches, tokens = make_batches(args, micro_batches, device)
    optimizer = make_optimizer(net.parameters())
    losses = []
    gradients = []
    for inputs, targets in batches:
        loss = 0.0
        # One micro-batch after the other: a GPU may not hold the activations of the full batch.
        for some_inputs, some_targets in zip(inputs, targets, strict=True):
            loss_sum = net(some_inputs, some_targets, reduction="sum")
            (loss_sum / tokens).backward()
            loss += loss_sum.item() / tokens
        nn.utils.clip_grad_norm_(net.parameters(), LARGEST_NORM)
        losses.append(loss)
        gradients.append({name: weight.grad.clone() for name, weight in net.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return Baseline(net.config, device, micro_batches, batches, tokens, losses, gradients)


# --- measurements


class StepMeter:
    """Measure the steps of a schedule: the memory of the first, and the time of the others.

    `held` are the gradients. They are there before the step, so they do not count.
    """

    def __init__(self, held: list[Tensor], device: torch.device) -> None:
        self.held = held
        self.device = device
        self.activation_bytes = None
        self.seconds = []

    def __enter__(self) -> None:
        if self.activation_bytes is None:
            self.live = measure.LiveBytes(self.held, self.device)
            self.live.__enter__()
            self.bytes_before = self.live.now
        else:
            runtime.synchronize(self.device)
            dist.barrier()  # all ranks start together
            self.start = time.perf_counter()

    def __exit__(self, *error) -> None:
        if self.activation_bytes is None:
            self.live.__exit__(*error)
            self.activation_bytes = self.live.peak - self.bytes_before
        else:
            runtime.synchronize(self.device)
            self.seconds.append(time.perf_counter() - self.start)

    def results(self) -> dict:
        """Return the most bytes of a rank, and the median step. Every rank must call this."""
        step_seconds = None
        if self.seconds:
            step_seconds = statistics.median(self.seconds)
            step_seconds = max(runtime.all_gather(step_seconds))
        activation_bytes = max(runtime.all_gather(self.activation_bytes))
        return {"activation_bytes": activation_bytes, "step_seconds": step_seconds}


def largest_of_ranks(errors: list[float]) -> float:
    """Return the largest of the errors of all ranks. It is NaN if one of them is NaN."""
    return torch.tensor(runtime.all_gather(errors)).max().item()


def count_messages(programs: list[list]) -> int:
    """Return how many messages the ranks send in a step."""
    count = 0
    for program in programs:
        for step in program:
            if isinstance(step, list):
                count += sum(message.name.startswith("Send") for message in step)
    return count


def idle_share(timelines: list[list[tuple]]) -> float:
    """Return the bubble: the share of all ranks' units of time in which nothing is computed."""
    busy = 0
    for timeline in timelines:
        busy += sum(end - start for _, start, end in timeline)
    total = len(timelines) * end_of(timelines)
    return (total - busy) / total


def end_of(timelines: list[list[tuple]]) -> int:
    """Return when the last rank is done."""
    last_instructions = [timeline[-1] for timeline in timelines]
    return max(end for _, _, end in last_instructions)


def picture(row: dict) -> str:
    """Return a line per rank. Each letter is a unit of time, and says what the rank computes."""
    lines = [f"\n{row['name']}"]
    for rank, timeline in enumerate(row["timelines"]):
        line = ""
        for instruction, start, end in timeline:
            first_letter = "a" if instruction.name == "Forward" else "A"
            letter = chr(ord(first_letter) + instruction.micro_batch % 26)
            line = line.ljust(start, ".")
            line += letter * (end - start)
        line = line.ljust(end_of(row["timelines"]), ".")
        lines.append(f"    rank {rank}  {line}")
    return "\n".join(lines)


# --- checks


def formulas(name: str, chunks: int, micro_batches: int) -> dict:
    """Return what a schedule must be, from the sizes alone.

    Sources: Huang et al. 2019; Narayanan et al. 2021, section 2.2.
    """
    ranks = dist.get_world_size()
    most_held = []
    for rank in range(ranks):
        if name == "GPipe":
            held = micro_batches
        elif name == "1F1B":
            held = ranks - rank
        else:
            warm_up = 2 * (ranks - rank - 1) + (chunks - 1) * ranks
            held = min(warm_up + 1, chunks * micro_batches)
        most_held.append(held)
    return {
        "idle_share": (ranks - 1) / (chunks * micro_batches + ranks - 1),
        "most_held_per_rank": most_held,
        # between neighbouring stages: activations forward, gradients back
        "messages": 2 * micro_batches * (chunks * ranks - 1),
    }


def how_equal(error: float) -> str:
    """Return a text that says how far two results are apart."""
    if error == 0:
        return "to the bit"
    return f"up to a relative error of {error:.1g}"


def check(rows: list[dict], baseline: Baseline, args: argparse.Namespace) -> list[str]:
    """Assert that all schedules train as one process, and cost what the formulas say.

    Return a line for each thing that was checked.
    """
    largest_from_one_process = 0.0
    largest_from_hand = 0.0
    expected_losses = torch.tensor(baseline.losses)
    losses_by_hand = None
    activation_bytes = {}
    for row in rows[1:]:
        losses = torch.tensor(row["losses"])
        activation_bytes[row["name"]] = row["activation_bytes"]
        errors = [measure.relative_error(losses, expected_losses), row["gradient_error"]]
        for error in errors:
            assert error <= TOLERANCE, (
                f"{row['name']}: losses or gradients differ from one process by {error:.0e}"
            )
        largest_from_one_process = max(largest_from_one_process, *errors)

        if "from_hand_error" in row:  # by torch; the row before is the same schedule by hand
            errors = [measure.relative_error(losses, losses_by_hand), row["from_hand_error"]]
            for error in errors:
                assert error <= TOLERANCE, (
                    f"{row['name']}: losses or gradients differ from by hand by {error:.0e}"
                )
            largest_from_hand = max(largest_from_hand, *errors)
        else:
            losses_by_hand = losses
            expected = formulas(row["name"], row["stages_per_rank"], baseline.micro_batches)
            for key, value in expected.items():
                assert row[key] == value, f"{row['name']}: {key} is {row[key]}, and must be {value}"

    if args.micro_batches_per_rank > 1:
        assert activation_bytes["1F1B"] < activation_bytes["GPipe"], "1F1B holds as much as GPipe"
    return [
        "in each step the schedules have the loss and the gradients of one process, "
        + how_equal(largest_from_one_process),
        "torch.distributed.pipelining has the losses and the gradients of the same schedules by "
        "hand, " + how_equal(largest_from_hand),
        "idle units, micro-batches held and messages are those of the formulas, on every rank",
    ]
