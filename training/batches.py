"""Which samples each rank reads at each step.

The global batch depends on the seed and the step, and not on the number of ranks. The samples are
those of two torch Datasets, of any kind.
"""

import itertools
import math
import signal
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from common.exits import UserError
from common.runtime import print0
from training.mixture import Mixture

EVAL_SEQUENCES = 96  # an evaluation reads at most so many held-out samples, evenly spaced
PADDING = -100  # a target that the loss ignores: ignore_index of F.cross_entropy


class Batches:
    """The batches that one rank reads.

    At each step, all ranks together read the same samples, no matter how many ranks there are.

    Global batch: the samples of one optimizer step, over all ranks. Each rank reads an equal share
    of it, in micro-batches. A rank runs forward and backward once per micro-batch, and accumulates
    the gradients:

        global_batch_size = world_size x accumulation_steps x micro_batch_size

    Epoch: every training sample once, in a random order that depends on the seed and the number of
    the epoch. The epochs follow each other in one endless stream. If there are n training samples,
    position p of the stream holds sample

        order[p % n]    where order is the random order of epoch p // n

    Step s, counted from 0, reads global_batch_size positions, from s x global_batch_size on. Rank 0
    reads the first share of them, rank 1 the second, and so on. The samples of a step depend on the
    seed and the step only. So a run can resume at any step and on another number of ranks.

    Example: with 10 training samples, a global batch of 8 and micro-batches of 2, two ranks read
    these positions:

                  rank 0                rank 1
        step 0    [0, 1]   [2, 3]       [4, 5]   [6, 7]
        step 1    [8, 9]   [10, 11]     [12, 13] [14, 15]

    Positions 0 to 9 are the first epoch. The second epoch starts in the middle of step 1. Of four
    ranks, each reads one micro-batch per step: in step 0, rank 0 reads [0, 1], rank 1 reads [2, 3],
    rank 2 reads [4, 5], and rank 3 reads [6, 7].

    A mixture of data sets has another order of its positions: see training/mixture.py.
    """

    def __init__(
        self, train: Dataset, held_out: Dataset, args, *, rank: int, world_size: int
    ) -> None:
        """Compute the sizes of the batches.

        Args:
            train: The training samples, a Dataset with a length. A sample is a pair of tensors
                (inputs, targets). The samples have equal shapes, except where the Dataset has a
                method __getitems__ that pads the samples of a micro-batch to equal shapes. If it
                has an attribute `mixture`, the samples of several data sets follow each other, and
                the attribute is their numbers and weights, for training.mixture.Mixture.
            held_out: The samples of the evaluation, all of equal shapes. The loss must ignore
                targets that are PADDING.
            args: The flags global_batch_size, micro_batch_size, seed and seq_len. If
                micro_batch_size is None, a rank reads its share as one micro-batch. If there is
                epochs, and it is not None, this sets steps to that many epochs.
            rank: The data-parallel index of this rank. Ranks that hold parts of the same model, as
                in tensor parallelism, read the same samples and pass the same index.
            world_size: The number of data-parallel indices.

        Raises:
            UserError: The global batch is not a multiple of world_size x micro_batch_size, or there
                are too few samples.
        """
        self.rank = rank
        self.world_size = world_size
        self.seed = args.seed
        self.global_batch_size = args.global_batch_size

        micro_batch_size = 1 if args.micro_batch_size is None else args.micro_batch_size
        unit = world_size * micro_batch_size
        if self.global_batch_size % unit != 0:
            below = self.global_batch_size // unit * unit
            above = below + unit
            nearest = f"{below} or {above}" if below > 0 else f"{above}"
            raise UserError(
                f"--global-batch-size {self.global_batch_size} is no multiple of {unit} "
                f"(micro-batch x ranks): use {nearest}"
            )
        self.samples_per_rank = self.global_batch_size // world_size
        # A script may set another size before it calls stream() and evaluation().
        self.micro_batch_size = args.micro_batch_size or self.samples_per_rank

        self.train = train
        self.held_out = held_out
        self._check_length("--data", "training", train, self.global_batch_size, args.seq_len)
        eval_data = getattr(args, "eval_data", None)
        held_out_flag = f"--eval-data {eval_data}" if eval_data else "--data"
        self._check_length(held_out_flag, "held-out", held_out, 1, args.seq_len)
        # A sample of text has a target for each token. A sample of images has one target.
        _, targets = held_out[0]
        self.tokens_per_step = self.global_batch_size * targets.numel()

        if getattr(args, "epochs", None):
            self._set_steps(args)
        self.mixture = None
        parts = getattr(train, "mixture", None)
        if parts is not None:
            self.mixture = Mixture(parts, args.seed)
        # Keep the orders of two epochs: a step can read the end of one and the start of the next.
        self._order_of_epoch = lru_cache(maxsize=2)(self._shuffle)

    @property
    def accumulation_steps(self) -> int:
        """Return how many micro-batches this rank reads per optimizer step."""
        return self.samples_per_rank // self.micro_batch_size

    def _set_steps(self, args) -> None:
        """Set args.steps to the number of steps in args.epochs epochs, rounded up."""
        if getattr(self.train, "mixture", None) is not None:  # --data has none: training/flags.py
            raise UserError(
                f"--epochs {args.epochs:g}: each part of a mixture has epochs of its own: use "
                "--steps, or --data without weights"
            )
        samples = round(args.epochs * len(self.train), 6)
        args.steps = math.ceil(samples / self.global_batch_size)
        print0(
            f"--epochs {args.epochs:g} of {len(self.train):,} training samples: {args.steps:,} "
            f"steps of {self.global_batch_size}"
        )

    def _check_length(
        self, flag: str, part: str, samples: Dataset, needed: int, seq_len: int
    ) -> None:
        """Raise UserError if there are fewer samples than needed."""
        if len(samples) < needed:
            raise UserError(
                f"{flag} has {len(samples)} {part} sequences of --seq-len {seq_len}, "
                f"and needs {needed}: add text, or lower --seq-len or --global-batch-size"
            )

    def _shuffle(self, epoch: int) -> np.ndarray:
        """Return the random order of an epoch: the indices of all training samples, [samples]."""
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.train))

    def global_batch(self, step: int) -> list[int]:
        """Return the indices of the samples that all ranks together read at a step.

        Steps are counted from 0.
        """
        start = step * self.global_batch_size
        indices = []
        for position in range(start, start + self.global_batch_size):
            if self.mixture is not None:
                indices.append(self.mixture.index(position))
                continue
            epoch, place = divmod(position, len(self.train))
            indices.append(int(self._order_of_epoch(epoch)[place]))
        return indices

    def micro_batch_indices(self, start_step: int = 0) -> Iterator[list[int]]:
        """Yield the sample indices of each micro-batch of this rank. The iterator never ends."""
        # Where this rank's share of the global batch starts and ends.
        start = self.rank * self.samples_per_rank
        end = start + self.samples_per_rank
        for step in itertools.count(start_step):
            indices = self.global_batch(step)
            for first in range(start, end, self.micro_batch_size):
                yield indices[first : first + self.micro_batch_size]

    def stream(
        self, start_step: int, *, pin: bool = False, num_workers: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Return an endless iterator over the micro-batches of this rank.

        A micro-batch is (inputs, targets), each [micro_batch_size, *shape of a sample], on the CPU.

        Args:
            start_step: The step to start with, counted from 0. A run that resumes passes the number
                of steps that are done.
            pin: Return tensors in pinned memory. A GPU can copy them while it computes.
            num_workers: Processes that load samples in advance. With 0, this process loads them.
        """
        loader = DataLoader(
            self.train,
            batch_sampler=self.micro_batch_indices(start_step),
            num_workers=num_workers,
            worker_init_fn=_ignore_signals,
            pin_memory=pin,
            # The workers of each rank draw other numbers. DataLoader draws their seed from this
            # generator, and takes nothing from the default one.
            generator=torch.Generator().manual_seed(self._worker_seed(start_step)),
        )
        return iter(loader)

    def _worker_seed(self, start_step: int) -> int:
        key = [self.seed, self.rank, start_step]
        return int(np.random.default_rng(key).integers(2**63 - 1))

    def evaluation(self) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's share of the held-out samples, in micro-batches as in stream().

        All ranks together read at most EVAL_SEQUENCES samples. Every rank gets the same number of
        micro-batches: forward of a sharded model communicates, and would hang if one rank called it
        less often. A rank with fewer samples gets additional rows whose targets are all PADDING.
        """
        count = min(EVAL_SEQUENCES, len(self.held_out))
        chosen = np.linspace(0, len(self.held_out) - 1, count, dtype=np.int64)  # evenly spaced

        most_per_rank = math.ceil(len(chosen) / self.world_size)
        micro_batches = math.ceil(most_per_rank / self.micro_batch_size)
        rows = micro_batches * self.micro_batch_size
        first_inputs, first_targets = self.held_out[0]
        inputs = first_inputs.new_zeros(rows, *first_inputs.shape)
        targets = first_targets.new_full((rows, *first_targets.shape), PADDING)
        chosen_by_this_rank = chosen[self.rank :: self.world_size]
        for row, i in enumerate(chosen_by_this_rank.tolist()):
            inputs[row], targets[row] = self.held_out[i]

        input_batches = inputs.split(self.micro_batch_size)
        target_batches = targets.split(self.micro_batch_size)
        return list(zip(input_batches, target_batches, strict=True))


def _ignore_signals(_worker: int) -> None:
    """Let a DataLoader worker ignore the signals that stop a run.

    A scheduler sends them to all processes of a job. The ranks then finish their step and save a
    checkpoint, and need their workers until then.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
