"""Parameters held by blocks of consecutive ranks, as boxes."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from realrl.planner.arrays.arrays import Bools, Floats, Ints

Pair = tuple[Floats, Floats]
"""Bytes of layers, and fraction of the embedding; or the like."""


@dataclass(frozen=True)
class Boxes:
    """Parameters held by blocks of consecutive ranks, [blocks, pairs].

    A box is a range of layers (`low` to `high`, in bytes) by a fraction of the TP dimension (`left` to `right`);
    `embeds` is 1 where the same fraction of the embedding is held.
    """

    low: Floats
    high: Floats
    left: Floats
    right: Floats
    embeds: Floats

    @cached_property
    def ascending(self) -> Pair:
        """Bytes of layers from the block with the least on, and their sums up to each block."""
        layers = np.sort(self.whole[0], axis=0)
        return layers, np.cumsum(layers, axis=0)

    @cached_property
    def whole(self) -> Pair:
        """Bytes of layers, and the fraction of the embedding."""
        width = self.right - self.left
        return (self.high - self.low) * width, self.embeds * width

    def shapes(self) -> Iterator[tuple[Ints, Floats]]:
        """Iterate over the different heights, widths and embeddings of the blocks of each pair, [3, pairs]: the
        first of all pairs, then the second of those that have two, and so on, with the indices of these pairs."""
        every = np.stack([self.high - self.low, self.right - self.left, self.embeds])
        different, number = np.unique(every.reshape(3, -1), axis=1, return_inverse=True)
        number = np.sort(number.reshape(self.low.shape), axis=0)
        new = np.diff(number, axis=0, prepend=-1) > 0
        place = np.cumsum(new, axis=0)
        for i in range(1, int(place[-1].max()) + 1):
            block, pair = np.nonzero(new & (place == i))
            yield pair, different[:, number[block, pair]]

    def common(self, other: "Boxes", alike: Bools) -> Pair:
        """Intersect with other boxes: common bytes of layers, and common fraction of the embedding.

        `alike`: whether both cut parameters in the same way; else they share what chance makes them share.
        """
        width = _overlap(self.left, self.right, other.left, other.right)
        by_chance = (self.right - self.left) * (other.right - other.left)
        width = np.where(alike, width, by_chance)
        layers = _overlap(self.low, self.high, other.low, other.high)
        return layers * width, self.embeds * other.embeds * width


def _overlap(a: Floats, b: Floats, c: Floats, d: Floats) -> Floats:
    return np.maximum(np.minimum(b, d) - np.maximum(a, c), 0)
