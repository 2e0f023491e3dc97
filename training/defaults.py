"""What the training scripts train if --model is not given: a small model on a CPU, more on a GPU.

This file does not import torch, so that the planner can describe the scripts on any machine.
"""

from typing import NamedTuple


class Defaults(NamedTuple):
    """The values of flags that are not given. Other flags have the same default everywhere."""

    model: str
    global_batch_size: int  # sequences per step, all ranks
    steps: int
    compile: bool


# Ends within a minute on two CPU cores. On a GPU, a step of nano only waits for kernel launches.
ON_CPU = Defaults(model="nano", global_batch_size=24, steps=100, compile=False)

# Planned to end within a minute on one H100. On an H200, start and compilation took 38 s, and a
# step of 64 sequences took 0.12 s (benchmarks/results/nvidia-h200-2026-11-26.md).
ON_GPU = Defaults(model="llama-124m", global_batch_size=48, steps=120, compile=True)


def default_flags(*, on_gpu: bool, model: str | None) -> Defaults:
    """Return the values of the flags that are not given, if --model is `model`; None: not given.

    A model that is given has the defaults of the CPU on every device.
    """
    if model is not None:
        return ON_CPU._replace(model=model)
    return ON_GPU if on_gpu else ON_CPU
