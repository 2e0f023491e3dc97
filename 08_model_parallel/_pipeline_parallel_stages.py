"""The stages of pipeline_parallel.py: which layers each one holds, and the sizes that cannot be."""

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from _pipeline_parallel_record import Record
from torch import Tensor, nn

from common import model, shapes
from common.exits import UserError

UNTIED_NANO = "untied-nano"
LEARNING_RATE = 0.03
LAYERS = 8  # of UNTIED_NANO, if it has no more stages than that
MICRO_BATCHES_PER_RANK = 4  # Huang et al. 2019, section 3.3: from there on the bubble is small


class Stage(NamedTuple):
    number: int
    is_last: bool
    net: nn.Module


@dataclass
class Pipeline:
    """A rank's stages under one schedule, with an optimizer of their own."""

    name: str
    by: str
    stages: list[Stage]
    record: Record
    clip: Callable[[list[nn.Parameter]], Tensor]
    orders: list[list[tuple]] = field(default_factory=list)  # of every rank: what it computes
    train_step: Callable | None = None  # a batch to this rank's part of the loss, the update included
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    relative_errors: dict[str, float] = field(default_factory=dict)  # the largest so far, of one process
    norm: Tensor | None = None

    def __post_init__(self) -> None:
        self.optimizer = make_optimizer(self.parameters())

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for stage in self.stages for parameter in stage.net.parameters()]

    def update(self) -> None:
        self.norm = self.clip(self.parameters())
        self.optimizer.step()

    @torch.no_grad()
    def compare(self, loss: Tensor, expected_loss: Tensor, expected_norm: Tensor, whole: nn.Module) -> None:
        """Note how far loss, norm and this rank's gradients are from those of one process, then drop the gradients."""
        self.losses.append(loss.item())
        self.norms.append(self.norm.item())
        self.note_error("losses", loss, expected_loss)
        self.note_error("gradient norms", self.norm, expected_norm)
        expected = dict(whole.named_parameters())
        for stage in self.stages:
            for name, parameter in stage.net.named_parameters():
                self.note_error("gradients", parameter.grad, expected[name].grad)
        self.optimizer.zero_grad()

    def note_error(self, what: str, got: Tensor, expected: Tensor) -> None:
        error = (torch.linalg.vector_norm(got - expected) / torch.linalg.vector_norm(expected)).item()
        if not error <= self.relative_errors.get(what, 0.0):  # NaN stays
            self.relative_errors[what] = error


def make_optimizer(parameters: Iterator[nn.Parameter] | list[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD moves by the gradient itself. Adam divides by its size and would hide one that is N times too large."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)


def load_config(name: str, seq_len: int, stages: int) -> shapes.Config:
    """The shape of that name. nano has tied embeddings: the default is nano without, and with a layer per stage."""
    if name == UNTIED_NANO:
        nano = shapes.load_config("nano", 256, seq_len)
        return dataclasses.replace(nano, tie_word_embeddings=False, num_hidden_layers=max(LAYERS, stages))
    return shapes.load_config(name, 256, seq_len)


def check_sizes(args: argparse.Namespace, config: shapes.Config, ranks: int) -> int:
    """The number of micro-batches. UserError for what no schedule can do."""
    if config.tie_word_embeddings:
        raise UserError(
            f"--model {args.model} has tied embeddings: the first and the last stage would hold the same matrix, and "
            f"would have to add up its gradients; use --model {UNTIED_NANO}, llama-8b or a config.json with "
            "tie_word_embeddings false"
        )
    layers = config.num_hidden_layers
    if ranks * args.chunks > layers:
        fix = f"--chunks {layers // ranks}" if layers >= ranks else f"at most {layers} processes"
        raise UserError(
            f"--chunks {args.chunks} on {ranks} processes makes {ranks * args.chunks} stages, and {args.model} has "
            f"{layers} layers: a stage would have none; use {fix}"
        )
    if args.global_batch_size is None:
        args.global_batch_size = MICRO_BATCHES_PER_RANK * ranks * args.micro_batch_size
    size = args.micro_batch_size
    micro_batches, rest = divmod(args.global_batch_size, size)
    unit = ranks * size if args.chunks > 1 else size
    below = args.global_batch_size // unit * unit
    nearest = f"use {f'{below} or ' if below else ''}{below + unit}"
    if rest:
        raise UserError(
            f"--global-batch-size {args.global_batch_size} is no whole number of micro-batches of --micro-batch-size "
            f"{size}: {nearest}"
        )
    if micro_batches < ranks:
        raise UserError(
            f"--global-batch-size {args.global_batch_size} makes {micro_batches} micro-batch(es) of {size} for {ranks} "
            f"stages, and 1F1B needs one for each: use {ranks * size} or more"
        )
    if args.chunks > 1 and micro_batches % ranks:
        raise UserError(
            f"--global-batch-size {args.global_batch_size} makes {micro_batches} micro-batches of {size}, and "
            f"interleaving takes {ranks} at a time, one for each process: {nearest}, or --chunks 1"
        )
    return micro_batches


def layers_of(stage: int, stages: int, layers: int) -> range:
    """As many as any other stage has; the first stages have one more where they do not divide."""
    each, more = divmod(layers, stages)
    start = stage * each + min(stage, more)
    return range(start, start + each + (stage < more))


def build_stages(
    name: str, config: shapes.Config, stages_per_rank: int, seed: int, device: torch.device
) -> list[Stage]:
    """This rank's stages: rank, ranks + rank, 2 ranks + rank, ... with their own weights, and nobody else's."""
    ranks = dist.get_world_size()
    stages = ranks * stages_per_rank
    mine = []
    for number in range(dist.get_rank(), stages, ranks):
        with torch.device("meta"):
            net = model.Transformer(config)
        is_last = number == stages - 1
        kept = layers_of(number, stages, config.num_hidden_layers)
        for layer in range(config.num_hidden_layers):
            if layer not in kept:
                del net.model.layers[str(layer)]
        if number > 0:
            net.model.embed_tokens = None  # it takes the hidden states of the stage before
        if not is_last:
            net.model.norm = None
            net.lm_head = None  # it gives hidden states
        mine.append(Stage(number, is_last, model.materialize(net, name, seed=seed, device=device)))
    return mine
