"""The values of flags that are not given: a small model on a CPU, more on a GPU.

This file does not import torch, so that the planner can describe the scripts on any machine.
"""

from typing import NamedTuple

# The models that --model knows by name. lm/shapes.py has their sizes.
MODEL_NAMES = ("nano", "wide", "llama-124m", "llama-1b", "llama-8b", "llama-70b", "llama-405b")


class Defaults(NamedTuple):
    """The values of flags that are not given. Other flags have the same default everywhere."""

    model: str
    global_batch_size: int  # sequences per step, all ranks
    steps: int
    compile: bool


# Ends within a minute on two CPU cores. On a GPU, a step of nano only waits for kernel launches.
ON_CPU = Defaults(model="nano", global_batch_size=24, steps=100, compile=False)

# Planned to end within a minute on one H100. On an H200, a step of 64 sequences took 0.132 s
# (benchmarks/results/nvidia-h200-2026-11-26.md).
ON_GPU = Defaults(model="llama-124m", global_batch_size=48, steps=120, compile=True)


def default_flags(*, on_gpu: bool, model: str | None) -> Defaults:
    """Return the values of the flags that are not given, if --model is `model`; None: not given.

    A model that is given has the defaults of the CPU on every device.
    """
    if model is not None:
        return ON_CPU._replace(model=model)
    return ON_GPU if on_gpu else ON_CPU


class Recipe(NamedTuple):
    """The values of three flags that depend on the model."""

    seq_len: int
    lr: float  # peak learning rate of AdamW
    warmup_steps: int  # for the default run of 100 steps; runs of a trillion tokens take 2,000


# For a small model, nano or one of your own. lm/shapes.py has those of larger models.
SMALL = Recipe(seq_len=64, lr=2e-3, warmup_steps=10)
