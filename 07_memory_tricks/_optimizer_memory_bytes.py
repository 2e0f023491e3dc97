"""What optimizer_memory.py measures of a recipe: the bytes of each kind, and the peak of a step."""

import argparse
import gc
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from old.step_cost import held_tensors, record_memory

TOKENS_OF_PEAK = 32  # few, so that activations do not hide what the optimizer takes


class Bytes(NamedTuple):
    """What a run holds between backward and update, and the most that a step took."""

    weights: int
    gradients: int
    states: int
    peak: int


def measure_bytes(
    net: nn.Module, optimizers: list[torch.optim.Optimizer], step: Callable, job: argparse.Namespace
) -> Bytes:
    """Of a run that has trained. Trains two steps more, on one short sequence."""
    length = min(TOKENS_OF_PEAK, job.seq_len)
    inputs = torch.zeros(1, length, dtype=torch.int64, device=job.device)
    gc.collect()  # on CUDA what is left of the runs before would count
    parameters = list(net.parameters())
    state_bytes = sum(state.nbytes for state in states_of(optimizers))
    others_bytes = 0
    if job.device.type == "cuda":  # workspaces of its libraries
        held_bytes = sum(tensor.nbytes for tensor in held_tensors(net, optimizers))
        others_bytes = torch.cuda.memory_allocated(job.device) - held_bytes
    peak = record_memory(lambda: step(inputs, inputs), job.device, held_tensors(net, optimizers)).peak_bytes
    net(inputs, inputs).backward()
    return Bytes(
        weights=sum(parameter.nbytes for parameter in parameters),
        gradients=sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None),
        states=state_bytes,
        peak=peak - others_bytes,
    )


def states_of(optimizers: list[torch.optim.Optimizer]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for state in optimizer.state.values():
            # not the count of steps
            yield from (value for value in state.values() if isinstance(value, Tensor) and value.ndim)
