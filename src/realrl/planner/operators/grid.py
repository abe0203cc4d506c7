"""Functions of several sizes that are known on a grid, and interpolated between its points."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Self

import numpy as np

from realrl.planner.arrays.arrays import Floats, Ints, Real

PERCENT = 100
"""Steps of one in which values are written to files."""


@dataclass(frozen=True)
class Grid:
    """A function of sizes, linear in the logarithm of each between neighbouring points, constant beyond the last.

    `axes`: the sizes of the points, ascending, axis by axis; `values`: those of all points, the last axis varying
    fastest.
    """

    axes: tuple[tuple[float, ...], ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.values) != prod(map(len, self.axes)):
            raise ValueError(f"{len(self.values)} values for a grid of {[len(axis) for axis in self.axes]}")

    def at(self, *sizes: Real) -> Floats:
        """Interpolate the values at as many sizes, or arrays of them, as there are axes."""
        return np.asarray(sum(weight * self._table[point] for point, weight in self.weights(sizes)))

    def weights(self, sizes: Sequence[Real]) -> list[tuple[Ints, Floats]]:
        """List the points whose values are averaged at some sizes, as indices in `values`, with their weights."""
        found = [(np.zeros((), dtype=np.int64), np.ones(()))]
        for axis, size in zip(self._axes, sizes, strict=True):
            last = len(axis) - 1
            after = np.searchsorted(axis, size, side="right")
            begin, end = np.maximum(after - 1, 0), np.minimum(after, last)
            inside = np.minimum(np.maximum(size, axis[0]), axis[-1])
            whole = np.log2(axis[end] / axis[begin])
            share = np.log2(inside / axis[begin]) / np.where(begin < end, whole, 1.0)
            near = [(begin, 1 - share), (end, share)]
            found = [(point * len(axis) + i, weight * part) for point, weight in found for i, part in near]
        return found

    @cached_property
    def _axes(self) -> tuple[Floats, ...]:
        return tuple(np.array(axis, dtype=np.float64) for axis in self.axes)

    @cached_property
    def _table(self) -> Floats:
        return np.array(self.values, dtype=np.float64)

    @classmethod
    def read(cls, stored: dict[str, Any]) -> Self:
        """Build a grid from what `write` has returned."""
        axes = tuple(tuple(map(float, axis)) for axis in stored["axes"])
        return cls(axes, tuple(value / PERCENT for value in stored["percent"]))

    def write(self) -> dict[str, Any]:
        """Return what JSON can store, values rounded to hundredths."""
        return {
            "axes": [[int(size) for size in axis] for axis in self.axes],
            "percent": [round(PERCENT * value) for value in self.values],
        }
