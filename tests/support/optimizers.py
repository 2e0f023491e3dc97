"""Check what an optimizer of a lesson has to do for those who copy it."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed.checkpoint as dcp

from training import checkpoint


class SavedRun(NamedTuple):
    """Stand in for a run with one checkpoint, for training.checkpoint.resume."""

    folder: Path
    group: None = None

    def find_intact(self) -> Path:
        return self.folder


def assert_resumes(make_optimizer: Callable, folder: Path, dtype: torch.dtype) -> None:
    """Train a model, save after some steps, resume with new objects, and compare to the bit."""

    def start(seed: int) -> dict:
        torch.manual_seed(seed)
        net = torch.nn.Sequential(torch.nn.Linear(24, 40, bias=False)).to(dtype)
        optimizer = make_optimizer([*net.parameters()])
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, inverse)
        return {"net": net, "optimizer": optimizer, "scheduler": scheduler}

    def train(training: dict, steps: range) -> torch.Tensor:
        for step in steps:
            torch.manual_seed(step)
            output = training["net"](torch.randn(8, 24).to(dtype))
            output.square().mean().backward()
            training["optimizer"].step()
            training["scheduler"].step()
            training["optimizer"].zero_grad()
        return training["net"][0].weight.detach()

    expected = train(start(0), range(6))
    saved = start(0)
    train(saved, range(3))
    dcp.save(checkpoint.training_state(3, **saved), checkpoint_id=folder)
    resumed = start(1)
    assert checkpoint.resume(SavedRun(folder), **resumed) == 3
    saved_states = saved["optimizer"].state.values()
    states = resumed["optimizer"].state.values()
    for saved_state, state in zip(saved_states, states, strict=False):
        for name, value in saved_state.items():
            assert getattr(state[name], "dtype", None) == getattr(value, "dtype", None), name
    assert torch.equal(train(resumed, range(3, 6)), expected)


def inverse(step: int) -> float:
    """Return a factor of the learning rate that falls."""
    return 1 / (1 + step)


def assert_steps(make_optimizer: Callable) -> None:
    """Assert that a step calls its closure, and skips a weight without a gradient."""
    weights = [torch.nn.Parameter(torch.ones(2, 3)) for _ in range(3)]
    without_gradient, trained, frozen = weights
    frozen.requires_grad_(False)
    optimizer = make_optimizer(weights)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = trained.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 6
    assert (trained != 1).all()
    assert (without_gradient == 1).all()
    assert (frozen == 1).all()
