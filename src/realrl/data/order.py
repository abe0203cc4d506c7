"""Order in which a run reads the items of a data set."""

import math
from collections.abc import Sequence

import numpy as np

from realrl.config.errors import UserError


class Order:
    """Order of items in training: epochs laid end to end, cut into batches. A function of the seed and the step.

    An epoch is a permutation of the data set or, where sources have weights, of what is drawn from each: of n
    items with weight w the nearest number to w * n, at least 1. Draws go through permutations of a source, from
    where those of the epoch before ended, so that all its items are drawn equally often, give or take one.
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
        """Prepare the order; `sources`: items and weight of each, in order, none where all items weigh 1.

        UserError where a batch is larger than an epoch.
        """
        assert not sources or sum(items for items, _ in sources) == size, "sources have all items"
        self._sources = sources if any(weight != 1 for _, weight in sources) else ()
        self.size = sum(map(count_drawn, self._sources)) or size
        """Number of items that an epoch takes."""
        if batch > self.size:
            raise UserError(f"data.batch={batch} is more than the {self.size} records of the training data")
        self.batch = batch
        self.seed = seed
        self.shuffle = shuffle
        self._cached: tuple[int, np.ndarray] | None = None

    def steps(self, epochs: float) -> int:
        """Count the steps in which every item is taken at least `epochs` times, or as often as its weight says."""
        return math.ceil(epochs * self.size / self.batch - 1e-9)

    def indices(self, step: int) -> list[int]:
        """List the items of a step, counted from 0.

        These are `batch` indices; one whose source has no weight above 1 may recur only where two epochs meet.
        """
        return self.take(step * self.batch, self.batch)

    def take(self, first: int, count: int) -> list[int]:
        """List `count` items, at most an epoch, after the `first` items of all epochs laid end to end."""
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
        """Draw the items of a source for an epoch, numbered from its first one."""
        items, _ = self._sources[source]
        count = count_drawn(self._sources[source])
        first = epoch * count
        passes = range(first // items, (first + count - 1) // items + 1)
        # Streams of epochs are small numbers; those of sources are above all of them.
        walked = [
            permute(items, seed=self.seed, stream=(source + 1 << 40) + number)
            if self.shuffle
            else np.arange(items)
            for number in passes
        ]
        start = first - passes[0] * items
        return np.concatenate(walked)[start : start + count]


def count_drawn(source: tuple[int, float]) -> int:
    """Count the items that an epoch takes of a source with these items and this weight."""
    items, weight = source
    return max(1, round(items * weight))


def split_eval_batches(size: int, batch: int) -> list[list[int]]:
    """Divide items 0..size-1, in order, into the fewest batches of at most `batch`, of nearly equal size.

    Equal, because a last batch of one or two items could not be split over the ranks.
    """
    count = -(-size // batch)
    return [list(range(size * i // count, size * (i + 1) // count)) for i in range(count)]


def permute(size: int, *, seed: int, stream: int) -> np.ndarray:
    """Permute 0..size-1. int64 [size]. Streams of one seed are independent of each other.

    Only the raw output of a numpy bit generator is promised to stay the same between versions; what
    `Generator` makes of it is not.
    """
    key = np.array([seed % 2**64, stream], dtype=np.uint64)
    keys = np.random.Philox(key=key).random_raw(size)
    return np.argsort(keys, kind="stable")
