"""The batches of pipeline_parallel.py, cut into micro-batches, with sequences of unequal length."""

import argparse
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from old import data, shapes


class Batch(NamedTuple):
    inputs: list[Tensor]  # of each micro-batch, [sequences, seq_len]
    targets: list[Tensor]
    tokens: int  # that count, in the whole batch
    hidden_shape: tuple[int, int, int]  # of what travels between two stages

    @property
    def hidden_bytes(self) -> int:
        return 4 * math.prod(self.hidden_shape)


def read_batches(args: argparse.Namespace, config: shapes.Config, device: torch.device) -> Iterator[Batch]:
    """The same for every rank and every number of ranks."""
    stream = data.train_batches(
        data.load_corpus().train,
        seq_len=args.seq_len,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.global_batch_size,  # cut below
        seed=args.seed,
        device=device,
    )
    generator = torch.Generator().manual_seed(args.seed)
    for inputs, targets in stream:
        lengths = torch.randint(1, args.seq_len + 1, (len(inputs), 1), generator=generator)
        targets[torch.arange(args.seq_len) >= lengths] = data.PADDING
        yield Batch(
            inputs=list(inputs.to(device).split(args.micro_batch_size)),
            targets=list(targets.to(device).split(args.micro_batch_size)),
            tokens=int(lengths.sum()),
            hidden_shape=(args.micro_batch_size, args.seq_len, config.hidden_size),
        )
