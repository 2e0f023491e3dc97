"""How quantize.py and qat.py measure: the loss with some layers replaced, sequence by sequence, and what layers see."""

import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # old/, with nothing installed
from old import data, model

Forward = Callable[[Tensor], Tensor]
Batches = list[tuple[Tensor, Tensor]]


def linears(net: model.Transformer) -> dict[str, nn.Linear]:
    """The matrices inside the blocks; lm_head, which is the embedding, is not among them."""
    return {name: module for name, module in net.model.named_modules() if isinstance(module, nn.Linear)}


@torch.no_grad()
def measure(net: model.Transformer, forwards: dict[str, Forward], batches: Batches) -> tuple[Tensor, float]:
    """(loss of each sequence in nats per token, tokens/s), `forwards` standing in for those of the layers named."""
    layers = linears(net)
    for name, forward in forwards.items():
        layers[name].forward = forward
    losses, seconds = [], []
    for inputs, targets in batches:
        start = time.perf_counter()
        token_losses = F.cross_entropy(
            net(inputs).flatten(0, 1), targets.flatten(), ignore_index=data.PADDING, reduction="none"
        ).view(targets.shape)
        real = targets != data.PADDING
        sequence_losses = token_losses.sum(1) / real.sum(1)  # of a padding row nan: it has no token
        losses.append(sequence_losses[real.any(1)].cpu())  # waits for the GPU
        seconds.append(time.perf_counter() - start)
    for name in forwards:
        del layers[name].forward
    return torch.cat(losses).double(), inputs.numel() / statistics.median(seconds)


def difference(losses: Tensor, baseline: Tensor) -> tuple[float, float]:
    """Mean of the differences, sequence by sequence, and its standard error: what of it chance could be."""
    delta = losses - baseline
    return delta.mean().item(), delta.std().item() / math.sqrt(len(delta))


class Scheme(NamedTuple):
    """One row of the table: a way to keep and to multiply the weights of all layers."""

    name: str
    multiplied: str
    nbytes: int
    forwards: dict[str, Forward]  # by layer


def evaluate(net, tried: list[Scheme], evaluation_set: Batches) -> list[dict]:
    """Loss and speed of each scheme; the first is the baseline.

    Batch by batch all take turns, so that a disturbance hits all alike.
    """
    turns = []
    for batch in evaluation_set:
        turns.append([measure(net, scheme.forwards, [batch]) for scheme in tried])
    baseline = torch.cat([turn[0][0] for turn in turns])
    rows = []
    for i, scheme in enumerate(tried):
        losses = torch.cat([turn[i][0] for turn in turns])
        speeds = [turn[i][1] for turn in turns[1:]]  # the first turn warms up
        delta, standard_error = difference(losses, baseline)
        row = {
            "scheme": scheme.name,
            "multiplied": scheme.multiplied,
            "weight_bytes": scheme.nbytes,
            "val_loss": losses.mean().item(),
            "delta": delta,
            "standard_error": standard_error,
            "tokens_per_second": statistics.median(speeds),
            "lowest": min(speeds),
            "highest": max(speeds),
        }
        rows.append(row)
    return rows


def sensitivity(net: model.Transformer, forwards: dict[str, Forward], batches: Batches) -> dict[str, tuple]:
    """What each forward alone adds to the loss, and the standard error of that; the worst layer first."""
    baseline, _ = measure(net, {}, batches)
    added = {}
    for name, forward in forwards.items():
        losses, _ = measure(net, {name: forward}, batches)
        added[name] = difference(losses, baseline)
    return dict(sorted(added.items(), key=lambda item: -item[1][0]))


@torch.no_grad()
def observe(net: model.Transformer, inputs: Tensor, clipped_share: float) -> dict[str, tuple[float, float]]:
    """The range of each layer's input, the most extreme `clipped_share` at either end left out (0: min and max)."""
    activation_ranges = {}

    def note(name: str, _module, args: tuple[Tensor]) -> None:
        x = args[0].flatten()
        beyond = int(clipped_share * x.numel())
        low = x.kthvalue(1 + beyond)[0].item()
        high = x.kthvalue(x.numel() - beyond)[0].item()
        activation_ranges[name] = (low, high)

    hooks = [layer.register_forward_pre_hook(partial(note, name)) for name, layer in linears(net).items()]
    net(inputs)
    for hook in hooks:
        hook.remove()
    return activation_ranges
