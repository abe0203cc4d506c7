"""Functions of several sizes that are known on a grid, and interpolated between its points."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log2, prod
from typing import Any, Self

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

    def at(self, *sizes: float) -> float:
        """Interpolate the value at as many sizes as there are axes."""
        return sum(weight * self.values[point] for point, weight in self.weights(sizes))

    def weights(self, sizes: Sequence[float]) -> list[tuple[int, float]]:
        """List the points whose values are averaged at some sizes, as indices in `values`, with their weights."""
        found = [(0, 1.0)]
        for axis, logarithms, size in zip(self.axes, self._logarithms, sizes, strict=True):
            after = bisect_right(axis, size)
            if after == 0:
                near = [(0, 1.0)]
            elif after == len(axis):
                near = [(after - 1, 1.0)]
            else:
                begin, end = logarithms[after - 1], logarithms[after]
                share = (log2(size) - begin) / (end - begin)
                near = [(after - 1, 1 - share), (after, share)]
            found = [(point * len(axis) + i, weight * part) for point, weight in found for i, part in near]
        return found

    @cached_property
    def _logarithms(self) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(log2(size) for size in axis) for axis in self.axes)

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
