"""Measurements that are to be made."""

import time
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Generic, TypeVar

from realrl.planner.profile.profile import CollectiveTime, Measurement
from realrl.runtime.profiler.points.bench import Average, Bench

Entry = TypeVar("Entry", Measurement, CollectiveTime)

LEAST = 1e-9
"""Seconds; a difference of two measured times may be less, or below 0."""
UNKNOWN = 1.0
"""Seconds of an entry that has not been measured."""


@dataclass(frozen=True)
class Point(Generic[Entry]):
    """What to measure at one size."""

    blanks: tuple[Entry, ...]
    """Entries of a profile, their times unknown, each of another kind."""
    work: Callable[[], Mapping[Any, float]]
    """Gives seconds of its parts."""
    size: int
    """What the times grow with."""
    times: int = 1
    """How often the parts that are measured come in one execution of `work`, about."""
    average: Average = median
    """Of several executions."""
    derive: Callable[[Mapping[Any, float]], Mapping[Any, float]] = dict
    """From averages of the parts to seconds by kind."""

    def known(self, entries: Container[Hashable]) -> bool:
        """Whether it has been measured."""
        return all(blank.key in entries for blank in self.blanks)


@dataclass(frozen=True)
class Pace:
    """How long to measure."""

    sweeps: int
    """How often everything is measured, one after the other, so that a moment in which a machine is busy with
    something else does not spoil all that is known of some sizes."""
    patience: float
    """Seconds that one measurement of a sweep may take, if that gives repetitions enough."""
    repetitions: tuple[int, int]
    """At least, and at most."""
    limit: float
    """Seconds; what takes longer each time is not measured."""
    total: float
    """Seconds of a sweep after which only the smallest sizes of what is left are measured."""


class Measurer(Generic[Entry]):
    """Adds what is missing of points to entries of a profile. All ranks do the same together."""

    def __init__(
        self, entries: dict[Hashable, Entry], bench: Bench, pace: Pace, done: Callable[[], None]
    ) -> None:
        """`done` is told of each point, measured or not."""
        self.entries: dict[Hashable, Entry] = entries
        self._bench, self._pace, self._done = bench, pace, done
        self._rates: dict[tuple[object, ...], float] = {}
        """Series that are measured together -> seconds per unit of size, at last."""
        self._started = time.monotonic()

    def measure(self, row: Sequence[Point[Entry]]) -> None:
        """Points that differ in size alone, smaller ones first; when one is left out, so are the larger ones."""
        going_on = True
        for point in row:
            series = tuple(blank.series for blank in point.blanks)
            expected = point.size * self._rates.get(series, 0.0)
            if going_on and not point.known(self.entries):
                late = point is not row[0] and self._late()
                going_on = expected <= self._pace.limit and not late and self._one(point)
            if point.known(self.entries):
                seconds = sum(self.entries[blank.key].seconds for blank in point.blanks)
                self._rates[series] = point.times * seconds / point.size
            self._done()

    def _one(self, point: Point[Entry]) -> bool:
        """Whether it could be measured."""
        found = self._bench.measure(point.work, point.average)
        if found is None:
            return False
        seconds = point.derive(found)
        for blank in point.blanks:
            self.entries[blank.key] = blank.model_copy(update={"seconds": max(LEAST, seconds[blank.kind])})
        return True

    def _late(self) -> bool:
        passed = time.monotonic() - self._started
        return max(self._bench.process.gather(passed)) > self._pace.total


def medians(sweeps: Sequence[Mapping[Hashable, Entry]]) -> dict[Hashable, Entry]:
    """Of each entry its time in the middle, over the sweeps that measured it."""
    found: dict[Hashable, list[Entry]] = {}
    for entries in sweeps:
        for key, entry in entries.items():
            found.setdefault(key, []).append(entry)
    return {
        key: alike[0].model_copy(update={"seconds": median(entry.seconds for entry in alike)})
        for key, alike in found.items()
    }
