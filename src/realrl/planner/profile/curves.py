"""Interpolation of measured times."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from realrl.planner.arrays.arrays import Floats, Real


@dataclass(frozen=True)
class Curve:
    """Time as a piecewise linear function of size; both are above 0.

    Below the first point the time is that of the first, since it consists of overhead there. Above the last one the
    last segment is extrapolated, with a slope between half of the mean time per unit so far and all of it.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, points: Sequence[tuple[float, float]]) -> "Curve":
        """Build a curve from (size, seconds) in any order; the median counts of a size measured several times.

        ValueError for no points.
        """
        if not points:
            raise ValueError("a curve needs at least one point")
        groups: dict[float, list[float]] = {}
        for size, seconds in points:
            groups.setdefault(size, []).append(seconds)
        ordered = sorted((size, sorted(times)[len(times) // 2]) for size, times in groups.items())
        return cls(tuple(size for size, _ in ordered), tuple(seconds for _, seconds in ordered))

    def __call__(self, size: Real) -> Floats:
        sizes = self.sizes
        seconds = self.seconds
        mean = seconds[-1] / sizes[-1]
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else mean
        beyond = np.maximum(size - sizes[-1], 0.0) * min(mean, max(mean / 2, slope))
        return np.asarray(np.interp(size, sizes, seconds) + beyond)


@dataclass(frozen=True)
class Surface:
    """Time as a function of context length and size: a curve per context, interpolated linearly between contexts.

    Outside the measured contexts the nearest segment is extrapolated, but never below half of the nearest curves.
    """

    contexts: tuple[float, ...]
    curves: tuple[Curve, ...]

    @classmethod
    def of(cls, points: Sequence[tuple[float, float, float]]) -> "Surface":
        """Build a surface from (context, size, seconds) in any order."""
        groups: dict[float, list[tuple[float, float]]] = {}
        for context, size, seconds in points:
            groups.setdefault(context, []).append((size, seconds))
        contexts = sorted(groups)
        return cls(tuple(contexts), tuple(Curve.of(groups[context]) for context in contexts))

    def __call__(self, context: Real, size: Real) -> Floats:
        if len(self.contexts) == 1:
            return self.curves[0](size)
        context, size = np.broadcast_arrays(context, size)
        contexts = np.array(self.contexts)
        i = np.clip(np.searchsorted(contexts, context, side="right") - 1, 0, len(contexts) - 2)
        table = np.array([curve(size) for curve in self.curves])
        low, high = (np.take_along_axis(table, j[None], 0)[0] for j in (i, i + 1))
        fraction = (context - contexts[i]) / (contexts[i + 1] - contexts[i])
        value = np.where(fraction == 1, high, low + (high - low) * fraction)
        return np.maximum(value, np.minimum(low, high) / 2)
