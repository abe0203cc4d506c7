"""Order of the items of a data set in a run."""

import math
from collections.abc import Sequence

import numpy as np

from realrl.config.errors import UserError


class Order:
    """Order of items in training: consecutive epochs, cut into batches. It depends only on the seed and the step.

    An epoch is a permutation of the data set. If sources have weights, an epoch is a permutation of draws. From a
    source with n items and weight w, there are round(w * n) draws, but at least one. Draws walk through
    permutations of the source across epochs, so the numbers of draws of its items differ by at most one.
    """

    def __init__(
        self,
        size: int,
        batch: int,
        seed: int,
        shuffle: bool = True,
        *,
        sources: Sequence[tuple[int, float]] = (),
    ) -> None:
        """`sources`: (items, weight) of each source in order; empty if all weights are 1.

        Raises UserError if a batch is larger than an epoch.
        """
        assert not sources or sum(items for items, _ in sources) == size, "sources have all items"
        self._sources = sources if any(weight != 1 for _, weight in sources) else ()
        self.size = sum(map(count_drawn, self._sources)) or size
        """Number of items in an epoch."""
        if batch > self.size:
            raise UserError(f"data.batch={batch} is more than the {self.size} records of the training data")
        self.batch = batch
        self.seed = seed
        self.shuffle = shuffle
        self._cached: tuple[int, np.ndarray] | None = None

    def steps(self, epochs: float) -> int:
        """Count the steps of `epochs` epochs, rounded up."""
        return math.ceil(epochs * self.size / self.batch - 1e-9)

    def indices(self, step: int) -> list[int]:
        """List the `batch` items of a step, counted from 0.

        Unless its source has a weight above 1, an item repeats only if two epochs meet in the step.
        """
        return self.take(step * self.batch, self.batch)

    def take(self, first: int, count: int) -> list[int]:
        """List the `count` items that follow the first `first` items of all epochs; `count` is at most an epoch."""
        epoch, offset = divmod(first, self.size)
        head = self._epoch(epoch)[offset : offset + count]
        rest = count - len(head)
        return [*head.tolist(), *(self._epoch(epoch + 1)[:rest].tolist() if rest else ())]

    def _epoch(self, epoch: int) -> np.ndarray:
        if not self.shuffle and not self._sources:
            return np.arange(self.size)
        if self._cached is None or self._cached[0] != epoch:
            self._cached = epoch, self._make_epoch(epoch)
        return self._cached[1]

    def _make_epoch(self, epoch: int) -> np.ndarray:
        order = permute(self.size, seed=self.seed, stream=epoch) if self.shuffle else np.arange(self.size)
        if not self._sources:
            return order
        starts = np.cumsum([0, *(items for items, _ in self._sources)])
        drawn = [starts[i] + self._draw(i, epoch) for i in range(len(self._sources))]
        return np.concatenate(drawn)[order]

    def _draw(self, source: int, epoch: int) -> np.ndarray:
        """Draw the items of a source for an epoch. The result has item numbers within the source."""
        items, _ = self._sources[source]
        count = count_drawn(self._sources[source])
        first = epoch * count
        passes = range(first // items, (first + count - 1) // items + 1)
        # Numbers of sources' streams start at 2**40, so that no epoch has the same stream.
        walked = [
            permute(items, seed=self.seed, stream=(source + 1 << 40) + number)
            if self.shuffle
            else np.arange(items)
            for number in passes
        ]
        start = first - passes[0] * items
        return np.concatenate(walked)[start : start + count]


def count_drawn(source: tuple[int, float]) -> int:
    """Count the draws of an epoch from a source with (items, weight)."""
    items, weight = source
    return max(1, round(items * weight))


def split_eval_batches(size: int, batch: int) -> list[list[int]]:
    """Divide the items 0 to size - 1, in order, into as few batches as possible, of at most `batch` items each.

    The batches have nearly equal sizes, because a last batch of one or two items could not be split over the ranks.
    """
    count = -(-size // batch)
    return [list(range(size * i // count, size * (i + 1) // count)) for i in range(count)]


def permute(size: int, *, seed: int, stream: int) -> np.ndarray:
    """Permute the numbers 0 to size - 1. -> int64 [size]. Streams of one seed are independent of each other.

    The result is equal on every rank and for every version of numpy, because numpy guarantees the raw output of a
    bit generator. It does not guarantee the results of `Generator`.
    """
    key = np.array([seed % 2**64, stream], dtype=np.uint64)
    keys = np.random.Philox(key=key).random_raw(size)
    return np.argsort(keys, kind="stable")
