"""The tiny model, the counts, the table and the checks of cuda_graphs.py."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from common.exits import UserError
from lm import shapes

TINY = "eager, tiny model"
# Relative, of losses. Kernels that add with atomics round differently each time.
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}
COLUMNS = {
    "tokens": "tokens",
    "name": "step",
    "operators": "operators",
    "seconds": "time",
    "time_ratio": "of eager",
    "graph_pool_bytes": "kept by the graph",
}


def parse_sizes(text: str) -> list[int]:
    """Return the sizes of --micro-batch-sizes, smallest first. Raise UserError for other text."""
    sizes = set()
    for part in text.split(","):
        if not part.isdecimal() or int(part) == 0:
            raise UserError(
                f"--micro-batch-sizes {text!r}: use numbers with commas between, such as 1,4,16"
            )
        sizes.add(int(part))
    return sorted(sizes)


def random_batch(
    config: shapes.Config, sequences: int, seq_len: int, device: torch.device
) -> list[Tensor]:
    """Return random inputs and targets, each [sequences, seq_len]."""
    tokens = torch.randint(config.vocab_size, (sequences, seq_len + 1), device=device)
    return [tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()]


def smallest(config: shapes.Config) -> shapes.Config:
    """Return the smallest config with as many layers and heads, which runs the same operators."""
    return dataclasses.replace(
        config,
        hidden_size=2 * config.num_attention_heads,
        head_dim=8,  # with fewer, the attention kernels of a GPU would pad
        intermediate_size=2,
        vocab_size=2,
        max_position_embeddings=2,
    )


def smallest_batch(config: shapes.Config, batch: list[Tensor]) -> list[Tensor]:
    """Return a batch of at most two sequences of two tokens.

    Not one of one token: with a dimension of size 1, some reshapes of attention are views, and they
    are copies in `batch`.
    """
    sequences, seq_len = batch[0].shape
    return random_batch(config, min(2, sequences), min(2, seq_len), batch[0].device)


class OperatorCount(TorchDispatchMode):
    """Count the operators that run in the with block."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += 1
        return operator(*args, **(kwargs or {}))


def count_operators(step: Callable[[], Tensor]) -> int:
    """Return how many operators a step runs."""
    step()  # in the first step AdamW creates its state
    with OperatorCount() as operators:
        step()
    return operators.count


def pool_bytes(graph: "torch.cuda.CUDAGraph") -> int:
    """Return the bytes that a graph keeps: for gradients, activations and temporaries."""
    total = 0
    for segment in torch.cuda.memory_snapshot():
        if segment["segment_pool_id"] == graph.pool():
            total += segment["total_size"]
    return total


def check(
    rows: list[dict], losses: tuple[list[float], list[float]] | None, dtype: str
) -> list[str]:
    """Assert that the tiny model runs as many operators as the model, and compare the losses."""
    checked = []
    for eager in rows:
        if eager["name"] != "eager":
            continue
        tokens = eager["tokens"]
        (tiny,) = [row for row in rows if row["name"] == TINY and row["tokens"] == tokens]
        operators = eager["operators"]
        assert tiny["operators"] == operators, (
            f"{tokens} tokens: the tiny model runs {tiny['operators']} operators, "
            f"the model {operators}"
        )
        checked.append(
            f"{tokens:,} tokens: the tiny model runs as many operators, {operators:,}; "
            f"it takes {tiny['seconds'] / operators * 1e6:.0f} us for each, "
            f"{tiny['seconds'] / eager['seconds']:.0%} of a step"
        )

    if losses is not None:
        largest = 0.0
        for eager_loss, replayed_loss in zip(*losses, strict=True):
            difference = abs(replayed_loss - eager_loss)
            assert difference <= TOLERANCE[dtype] * abs(eager_loss), f"losses differ: {losses}"
            largest = max(largest, difference)
        checked.append(
            f"the losses of {len(losses[0])} replayed steps are eager's within {largest:.0e}"
        )
    return checked
