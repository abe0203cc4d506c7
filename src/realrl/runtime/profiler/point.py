"""Measurements that are to be made."""

from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Any, Generic, TypeVar

from realrl.planner.profile import CollectiveTime, Measurement
from realrl.runtime.profiler.bench import Average, Bench

Entry = TypeVar("Entry", Measurement, CollectiveTime)

UNKNOWN = 1.0
"""Seconds of an entry that has not been measured."""


@dataclass(frozen=True)
class Point(Generic[Entry]):
    """What to measure at one size."""

    blanks: tuple[Entry, ...]
    """Entries of a profile, their times unknown, each of another kind."""
    work: Callable[[], Mapping[Any, float]]
    """Gives seconds by kind."""
    size: int
    """What the times grow with."""
    times: int = 1
    """How often the parts that are measured come in one execution of `work`, about."""
    average: Average = median
    """Of several executions."""

    def known(self, entries: Container[Hashable]) -> bool:
        """Whether it has been measured."""
        return all(blank.key in entries for blank in self.blanks)


def measure(
    row: Sequence[Point[Entry]],
    entries: dict[Hashable, Entry],
    bench: Bench,
    *,
    limit: float,
    done: Callable[[], None],
) -> int:
    """Add what is missing of a row of points, the smaller ones first, to `entries`; all ranks call this together.

    A point that does not fit into memory, or is expected to take more than `limit` seconds each time, is left out
    with all that follow. Returns how many are. `done` is told of each point.
    """
    expected, left_out = 0.0, 0
    for point, following in zip(row, [*row[1:], None], strict=True):
        if expected <= limit:
            growth = following.size / point.size if following is not None else 1.0
            expected = growth * point.times * _seconds(point, entries, bench)
        left_out += not point.known(entries)
        done()
    return left_out


def _seconds(point: Point[Entry], entries: dict[Hashable, Entry], bench: Bench) -> float:
    """Of all its parts; without end where it does not fit into memory."""
    if not point.known(entries):
        found = bench.measure(point.work, point.average)
        if found is None:
            return inf
        for blank in point.blanks:
            entries[blank.key] = blank.model_copy(update={"seconds": found[blank.kind]})
    return sum(entries[blank.key].seconds for blank in point.blanks)
