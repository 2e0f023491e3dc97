"""The rows that 06_fsdp_zero/finetune.py trains on: token ids, some of which are targets.

Rows have unequal lengths. A micro-batch pads them, or packed rows have several of them.
"""

import bisect
import hashlib
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lm import packing
from training.batches import PADDING


class Row(NamedTuple):
    """The token ids of a row, and which of them are targets."""

    tokens: np.ndarray  # int32
    counts: np.ndarray  # bool


class Rows(torch.utils.data.Dataset):
    """Rows as (inputs, targets), each int64 [seq_len]; the targets are one token ahead.

    Tokens that are no targets are PADDING among the targets. A micro-batch is as long as its
    longest row. Behind the other rows, inputs are PADDING, too: `unpack` puts a token there.
    """

    def __init__(
        self, rows: list[Row], seq_len: int, mixture: list[tuple[int, float]] | None = None
    ) -> None:
        self.rows = rows
        self.mixture = mixture  # for Batches
        self.seq_len = seq_len

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int, length: int | None = None) -> tuple[Tensor, Tensor]:
        tokens = torch.from_numpy(self.rows[i].tokens).long()
        counts = torch.from_numpy(self.rows[i].counts)
        targets = torch.where(counts, tokens, PADDING)
        missing = (length or self.seq_len) - len(tokens) + 1
        inputs = F.pad(tokens[:-1], (0, missing), value=PADDING)
        return inputs, F.pad(targets[1:], (0, missing), value=PADDING)

    def __getitems__(self, chosen: list[int]) -> list[tuple[Tensor, Tensor]]:
        """Return a micro-batch: DataLoader calls this one."""
        length = max(map(self.length, chosen))
        return [self.__getitem__(i, length) for i in chosen]

    def length(self, i: int) -> int:
        """Return the number of inputs in a row."""
        return len(self.rows[i].tokens) - 1

    def mean_length(self) -> float:
        """Return the mean number of inputs in a row, by the weights of a mixture."""
        means = []
        weights = []
        first = 0
        for count, weight in self.mixture or [(len(self), 1.0)]:
            means.append(sum(map(self.length, range(first, first + count))) / count)
            weights.append(weight)
            first += count
        return float(np.average(means, weights=weights))

    def sha256(self) -> str:
        """Return a hash of the rows."""
        return hash_of_rows(self.rows)

    def longest(self) -> int:
        """Return the number of inputs in the longest row."""
        return max(map(self.length, range(len(self))))

    def target_count(self, chosen: list[int]) -> int:
        """Return the number of targets in these rows."""
        return sum(int(self.rows[i].counts[1:].sum()) for i in chosen)

    def padding_share(self, micro_batch_size: int) -> float:
        """Return how much of an epoch's inputs is padding, as a share."""
        lengths = np.array([self.length(i) for i in range(len(self))])
        np.random.default_rng(0).shuffle(lengths)
        computed = 0
        for first in range(0, len(lengths), micro_batch_size):
            micro_batch = lengths[first : first + micro_batch_size]
            computed += len(micro_batch) * int(micro_batch.max())
        return 1 - int(lengths.sum()) / computed


class PackedRows(torch.utils.data.Dataset):
    """Packed rows as (inputs, targets): inputs are tokens and positions, int64 [2, longest].

    A packed row has the inputs of several rows, one behind the other. Positions begin at 0 for
    each of them, and for the padding behind the last. All packed rows have the longest one's
    length, so that torch.compile compiles for one length.
    """

    def __init__(self, rows: list[Row], seq_len: int) -> None:
        self.unpacked = Rows(rows, seq_len)
        lengths = [self.unpacked.length(i) for i in range(len(rows))]
        self.packed = best_fit(lengths, seq_len)
        self.lengths = []
        for members in self.packed:
            self.lengths.append(sum(lengths[i] for i in members))
        self.size = max(self.lengths, default=0)

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        inputs = []
        targets = []
        positions = []
        for row in self.packed[i]:
            length = self.unpacked.length(row)
            row_inputs, row_targets = self.unpacked.__getitem__(row, length)
            inputs.append(row_inputs)
            targets.append(row_targets)
            positions.append(torch.arange(length))
        missing = self.size - self.lengths[i]
        # 0, 1, 1, ...: padding may have more tokens than a model has positions
        positions.append(torch.arange(missing).clamp(max=1))
        padded_inputs = F.pad(torch.cat(inputs), (0, missing), value=PADDING)
        padded_targets = F.pad(torch.cat(targets), (0, missing), value=PADDING)
        return torch.stack((padded_inputs, torch.cat(positions))), padded_targets

    def mean_length(self) -> float:
        """Return the mean number of inputs in a packed row, without padding."""
        return sum(self.lengths) / len(self.lengths)

    def longest(self) -> int:
        """Return the number of inputs in the longest packed row."""
        return self.size

    def most_documents(self) -> int:
        """Return the largest number of rows in a packed row. Padding counts as one."""
        return max(len(members) for members in self.packed) + 1

    def target_count(self, chosen: list[int]) -> int:
        """Return the number of targets in these packed rows."""
        return sum(self.unpacked.target_count(self.packed[i]) for i in chosen)

    def padding_share(self) -> float:
        """Return how much of the inputs is padding, as a share."""
        return 1 - self.mean_length() / self.size


def best_fit(lengths: list[int], size: int) -> list[list[int]]:
    """Return packed rows as indices: the longest first, each in the fullest row that has room.

    07_memory_tricks/packing.py has the same by a search of all rows. This one keeps them sorted.
    """
    packed: list[list[int]] = []
    by_room: list[tuple[int, int]] = []  # (room, packed row), sorted
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fullest = bisect.bisect_left(by_room, (lengths[i], -1))
        if fullest < len(by_room):
            room, row = by_room.pop(fullest)
        else:
            room = size
            row = len(packed)
            packed.append([])
        packed[row].append(i)
        bisect.insort(by_room, (room - lengths[i], row))
    return packed


def unpack(
    inputs: Tensor, *, most_documents: int | None = None, experts: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the token ids of a micro-batch, and more arguments of the model.

    They are the positions and the mask of packed rows, and the padding mask if the model has
    experts.

    Args:
        inputs: The inputs of Rows, [batch, tokens], or of PackedRows, [batch, 2, tokens].
        most_documents: See packing.unpack.
        experts: Whether the model has experts, which leave out padding.
    """
    arguments = {}
    if inputs.ndim == 3:
        inputs, arguments = packing.unpack(inputs, most_documents)
    padding = inputs == PADDING
    if experts:
        arguments["padding_mask"] = padding
    return inputs.masked_fill(padding, 0), arguments


def hash_of_rows(rows: list[Row]) -> str:
    """Return the SHA-256 of rows."""
    sha256 = hashlib.sha256()
    for row in rows:
        sha256.update(row.tokens.tobytes())
        sha256.update(row.counts.tobytes())
    return sha256.hexdigest()
