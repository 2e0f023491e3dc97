"""What every strategy of infer_70b.py gives: a model that has its weights and generates, the same on every rank."""

from collections.abc import Callable
from typing import NamedTuple

from old.shapes import Config


class Served(NamedTuple):
    """`generate(prompts, *, max_new_tokens, sampler, stop, on_tokens)`: as common.generate.generate without its two
    passes and the device; it returns a Generated, and calls on_tokens, with the same tokens on every rank."""

    generate: Callable
    weight_bytes: int  # what a decode step reads of the weights on this device
    config: Config
