"""The training of tensor_parallel.py: several ways side by side, and the distance of each from one process."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from _tensor_parallel_count import CountCollectives, Traffic
from torch import Tensor, nn

from old import metrics, runtime

LEARNING_RATE = 0.05
Batch = tuple[Tensor, Tensor]  # inputs and targets


@dataclass
class Seen:
    """What was seen of a way of training, a value per step."""

    losses: list[Tensor] = field(default_factory=list)
    gradient_norms: list[Tensor] = field(default_factory=list)
    gradient_errors: list[Tensor] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)
    traffic_after_backward: list[Traffic] = field(default_factory=list)


@dataclass
class Way:
    """A model, how a step of it is made, and what was seen of it."""

    name: str
    net: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]  # inputs, targets: gives their mean loss
    clip: Callable[[float], Tensor]  # largest norm: gives the norm that was found
    context: Callable[[], AbstractContextManager] = nullcontext  # of forward and backward
    seen: Seen = field(default_factory=Seen)

    def backward(self, inputs: Tensor, targets: Tensor, share: float) -> Tensor:
        """Add to the gradients what this micro-batch has of them, by its share of the step. Gives its loss."""
        with self.context():
            loss = self.loss(inputs, targets)
            (loss * share).backward()
        return runtime.whole(loss.detach())


def train(
    ways: list[Way],
    steps: list[list[Batch]],
    largest_norm: float,
    cut_dimension: Callable[[str], int | None],
) -> None:
    """A step of each way in turn, so that gradients are compared before they are used.

    With SGD: AdamW divides a gradient by its size, which hides a wrong scale and enlarges rounding.
    """
    optimizers = [torch.optim.SGD(way.net.parameters(), lr=LEARNING_RATE) for way in ways]
    for micro_batches in steps:
        after_backward = [CountCollectives() for _ in ways]
        for way, count in zip(ways, after_backward, strict=True):
            with CountCollectives() as in_backward:
                losses = [way.backward(*micro_batch, 1 / len(micro_batches)) for micro_batch in micro_batches]
            with count:
                norm = way.clip(largest_norm)
            way.seen.losses.append(torch.stack(losses).mean())
            way.seen.gradient_norms.append(norm)
            way.seen.traffic.append(in_backward.traffic)
        compare_gradients(ways, cut_dimension)
        for way, optimizer, count in zip(ways, optimizers, after_backward, strict=True):
            with count:
                optimizer.step()
            optimizer.zero_grad()
            way.seen.traffic_after_backward.append(count.traffic)


@torch.no_grad()
def compare_gradients(ways: list[Way], cut_dimension: Callable[[str], int | None]) -> None:
    """Note the largest distance from one process of the gradient of any weight, relative to its norm. A rank looks at
    what it has: its part, or of a DTensor the whole, gathered."""
    baseline = {name: weight.grad for name, weight in ways[0].net.named_parameters()}
    least = metrics.least_norm(baseline.values())
    for way in ways:
        errors = []
        for name, weight in way.net.named_parameters():
            gradient = runtime.whole(weight.grad)
            expected = baseline[name]
            norm = torch.linalg.vector_norm(expected).clamp_min(least)
            if gradient.shape != expected.shape:
                parts = expected.tensor_split(dist.get_world_size(), cut_dimension(name))
                expected = parts[dist.get_rank()]
            errors.append(torch.linalg.vector_norm(gradient - expected) / norm)
        way.seen.gradient_errors.append(torch.stack(errors).max())
