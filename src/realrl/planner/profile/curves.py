"""Interpolation of measured times."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


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

    def __call__(self, size: float) -> float:
        sizes = self.sizes
        seconds = self.seconds
        if size <= sizes[0]:
            return seconds[0]
        i = bisect_right(sizes, size) - 1
        if i + 1 < len(sizes):
            fraction = (size - sizes[i]) / (sizes[i + 1] - sizes[i])
            return seconds[i] + (seconds[i + 1] - seconds[i]) * fraction if fraction else seconds[i]
        mean = seconds[i] / sizes[i]
        slope = (seconds[i] - seconds[i - 1]) / (sizes[i] - sizes[i - 1]) if i else mean
        return seconds[i] + (size - sizes[i]) * min(mean, max(mean / 2, slope))


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

    def __call__(self, context: float, size: float) -> float:
        if len(self.contexts) == 1:
            return self.curves[0](size)
        i = min(max(bisect_right(self.contexts, context) - 1, 0), len(self.contexts) - 2)
        low = self.curves[i](size)
        high = self.curves[i + 1](size)
        fraction = (context - self.contexts[i]) / (self.contexts[i + 1] - self.contexts[i])
        value = high if fraction == 1 else low + (high - low) * fraction
        return max(value, min(low, high) / 2)
