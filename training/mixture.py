"""Mix data sets by weight, exactly, on any number of ranks and after a resume."""

from functools import lru_cache

import numpy as np

from common.exits import UserError

BLOCK = 1000  # positions: each block has the weights exactly, rounded to thousandths


class Mixture:
    """The order of the samples of several data sets, which are numbered one after the other.

    Position p of the endless stream is in block p // BLOCK. A block has a fixed number of samples
    of each data set, in a random order. A data set has epochs of its own: each of its samples
    occurs once, in a random order, before the next epoch begins. All orders depend on the seed and
    the position alone.
    """

    def __init__(self, parts: list[tuple[int, float]], seed: int) -> None:
        """Compute how many samples of each data set are in a block.

        parts: the number of samples and the weight of each data set. The weights need not add up
        to 1. Raise UserError if a data set has no sample in a block.
        """
        self.seed = seed
        self.lengths = [length for length, _ in parts]
        self.starts = np.cumsum([0, *self.lengths])
        weights = np.array([weight for _, weight in parts])
        exact = weights / weights.sum() * BLOCK
        self.counts = np.floor(exact).astype(int)  # of each data set, in a block
        most_cut = np.argsort(self.counts - exact, kind="stable")
        self.counts[most_cut[: BLOCK - self.counts.sum()]] += 1
        if self.counts.min() == 0:
            raise UserError(
                f"--data: the weight {weights[self.counts.argmin()]} is less than a thousandth of "
                f"all weights, {weights.sum()}: raise it"
            )
        # Two epochs of each data set, and two blocks: a step may begin in one and end in the next.
        self._order = lru_cache(maxsize=2 * len(parts))(self._shuffle)
        self._block = lru_cache(maxsize=2)(self._shuffle_block)

    def index(self, position: int) -> int:
        """Return the number of the sample at a position of the stream."""
        block, place = divmod(position, BLOCK)
        sources, earlier = self._block(block)
        source = int(sources[place])
        # how many samples of this data set come before this position
        number = block * self.counts[source] + earlier[place]
        epoch, place = divmod(int(number), self.lengths[source])
        return int(self.starts[source] + self._order(source, epoch)[place])

    def _shuffle(self, source: int, epoch: int) -> np.ndarray:
        """Return the random order of an epoch of a data set, [its samples]."""
        generator = np.random.default_rng([self.seed, epoch, source])
        return generator.permutation(self.lengths[source])

    def _shuffle_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the data set of each position in a block, and how many of it come before."""
        sources = np.repeat(np.arange(len(self.counts)), self.counts)
        sources = np.random.default_rng([self.seed, block]).permutation(sources)
        earlier = np.zeros(BLOCK, int)
        for source, count in enumerate(self.counts):
            earlier[sources == source] = np.arange(count)
        return sources, earlier
