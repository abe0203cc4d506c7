"""Interpolation of measured times."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """Times by size, both above 0: exact at the points, between them linear, as the sum of an overhead and of work
    in proportion is.

    Below the first point the time is that of the first, since what is left there is overhead. Above the last one
    it goes on as in the last stretch, but there each unit takes between half and all of the mean so far.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, points: Sequence[tuple[float, float]]) -> "Curve":
        """From (size, seconds) in any order; of a size measured several times the median counts.

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
        sizes, seconds = self.sizes, self.seconds
        if size <= sizes[0]:
            return seconds[0]
        i = bisect_right(sizes, size) - 1
        if i + 1 < len(sizes):
            part = (size - sizes[i]) / (sizes[i + 1] - sizes[i])
            return seconds[i] + (seconds[i + 1] - seconds[i]) * part if part else seconds[i]
        mean = seconds[i] / sizes[i]
        slope = (seconds[i] - seconds[i - 1]) / (sizes[i] - sizes[i - 1]) if i else mean
        return seconds[i] + (size - sizes[i]) * min(mean, max(mean / 2, slope))


@dataclass(frozen=True)
class Surface:
    """Times by context and size: a curve per context, between which times are linear in the context.

    Outside the measured contexts the nearest stretch goes on, but never below half of the nearest curve.
    """

    contexts: tuple[float, ...]
    curves: tuple[Curve, ...]

    @classmethod
    def of(cls, points: Sequence[tuple[float, float, float]]) -> "Surface":
        """From (context, size, seconds) in any order."""
        groups: dict[float, list[tuple[float, float]]] = {}
        for context, size, seconds in points:
            groups.setdefault(context, []).append((size, seconds))
        contexts = sorted(groups)
        return cls(tuple(contexts), tuple(Curve.of(groups[context]) for context in contexts))

    def __call__(self, context: float, size: float) -> float:
        if len(self.contexts) == 1:
            return self.curves[0](size)
        i = min(max(bisect_right(self.contexts, context) - 1, 0), len(self.contexts) - 2)
        low, high = self.curves[i](size), self.curves[i + 1](size)
        part = (context - self.contexts[i]) / (self.contexts[i + 1] - self.contexts[i])
        value = high if part == 1 else low + (high - low) * part
        return max(value, min(low, high) / 2)
