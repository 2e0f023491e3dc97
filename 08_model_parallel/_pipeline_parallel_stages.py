"""The stages of pipeline_parallel.py: which layers a rank holds, their optimizer, how far they are from one process."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from _pipeline_parallel_record import Record
from torch import Tensor, nn

from old import metrics, model, shapes

LEARNING_RATE = 0.01


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
        expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
        least = metrics.least_norm(expected.values())
        for stage in self.stages:
            for name, parameter in stage.net.named_parameters():
                self.note_error("gradients", parameter.grad, expected[name], least)
        self.optimizer.zero_grad()

    def note_error(self, what: str, got: Tensor, expected: Tensor, least: Tensor | float = 0.0) -> None:
        """The distance relative to the norm of what is expected, or to `least` if that is larger."""
        norm = torch.linalg.vector_norm
        error = (norm(got - expected) / norm(expected).clamp_min(least)).item()
        if math.isnan(error) or error > self.relative_errors.get(what, -1.0):  # nothing is above NaN: it stays
            self.relative_errors[what] = error


def make_optimizer(parameters: Iterator[nn.Parameter] | list[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD moves by the gradient itself. Adam divides by its size and would hide one that is N times too large."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)


def layers_of(stage: int, stages: int, layers: int) -> range:
    """As many as any other stage has; the first stages have one more where they do not divide."""
    each, more = divmod(layers, stages)
    start = stage * each + min(stage, more)
    return range(start, start + each + (stage < more))


def build_stages(config: shapes.Config, stages_per_rank: int, seed: int, device: torch.device) -> list[Stage]:
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
        mine.append(Stage(number, is_last, fill(net, seed, device)))
    return mine


def build_whole(config: shapes.Config, seed: int, device: torch.device) -> model.Transformer:
    """The model that one process trains, with the weights of all stages."""
    with torch.device("meta"):
        net = model.Transformer(config)
    return fill(net, seed, device)


def fill(net: model.Transformer, seed: int, device: torch.device) -> model.Transformer:
    """Memory, and random weights: those of a parameter depend on the seed and its name alone, so stages start equal."""
    net.to_empty(device=device)
    net.init_weights(seed)
    return net
