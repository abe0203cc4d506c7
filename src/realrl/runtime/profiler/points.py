"""Measure points, each one measurement at one size: the clock, repetitions on all ranks, and the loop."""

import math
import time
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from realrl.planner.profile.profile import CollectiveTime, Measurement
from realrl.runtime.processes.process import Process

Moment = float | torch.cuda.Event
"""A point in time. On a GPU, it is the time at which the device reaches it, not when the host launches the work."""


class Clock:
    """Records moments on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> Moment:
        """Record the current moment."""
        if self.device.type != "cuda":
            return time.perf_counter()
        # An external event in a CUDA graph is recorded at every replay.
        event = torch.cuda.Event(enable_timing=True, external=torch.cuda.is_current_stream_capturing())
        event.record()
        return event

    def between(self, *moments: Moment) -> list[float]:
        """Compute the seconds from each moment to the next."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return [_seconds(a, b) for a, b in pairwise(moments)]


def _seconds(begin: Moment, end: Moment) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        assert isinstance(begin, float) and isinstance(end, float), "moments are of one clock"
        return end - begin
    return begin.elapsed_time(end) / 1000


Kind = TypeVar("Kind")


AverageFunction = Callable[[Sequence[float]], float]


def trimmed_mean(times: Sequence[float]) -> float:
    """Average the times without the slowest 5 %.

    A step takes the total time of consecutive operations, so a median would be too low.
    """
    kept = sorted(times)[: max(1, len(times) * 19 // 20)]
    return sum(kept) / len(kept)


class Bench:
    """Repeats measurements until enough time has passed."""

    def __init__(self, process: Process, *, patience: float, repetitions: tuple[int, int]) -> None:
        """`patience`: seconds that one measurement may take.

        `repetitions`: minimum and maximum number of repetitions.
        """
        self.process = process
        self.clock = Clock(process.device)
        self._patience = patience
        self._repetitions = repetitions

    def measure(
        self, work: Callable[[], Mapping[Kind, float]], average: AverageFunction = median
    ) -> dict[Kind, float] | None:
        """Average the times of the parts of `work` over its repetitions; None if memory is too small.

        Each time is that of the slowest rank, because all other ranks wait for it. All ranks call this together,
        with the same parts.
        """
        if not self._warm_up(work):
            return None
        start = time.perf_counter()
        found = [work()]
        once = max(self.process.gather(time.perf_counter() - start))
        low, high = self._repetitions
        self.wait()
        found += [work() for _ in range(max(low, min(high, int(self._patience / once))) - 1)]
        everyone = self.process.gather(found)
        return {
            kind: average([max(times[kind] for times in ranks) for ranks in zip(*everyone, strict=True)])
            for kind in found[0]
        }

    def _warm_up(self, work: Callable[[], object]) -> bool:
        """Run the work once. Returns whether all ranks have enough memory."""
        fits = True
        try:
            work()
        except torch.OutOfMemoryError:
            fits = False
        if not fits:
            torch.cuda.empty_cache()
        return all(self.process.gather(fits))

    def wait(self) -> None:
        """Wait until all ranks have called this."""
        if self.process.control is not None:
            dist.barrier(group=self.process.control)


Entry = TypeVar("Entry", Measurement, CollectiveTime)

LEAST = 1e-9
"""Minimum seconds of an entry. The difference of two measured times could be smaller or negative."""
UNKNOWN = 1.0
"""Placeholder for the seconds of an entry that has not been measured."""


@dataclass(frozen=True)
class Point(Generic[Entry]):
    """A measurement at one size."""

    blanks: tuple[Entry, ...]
    """Entries of a profile without times, one for each measured kind."""
    work: Callable[[], Mapping[Any, float]]
    """Executes the work once, and returns the seconds of its parts."""
    size: int
    """Size to which the times are about proportional."""
    times: int = 1
    """Approximate number of times that the measured parts occur in one execution of `work`."""
    average: AverageFunction = median
    """Function that averages over several executions."""
    derive: Callable[[Mapping[Any, float]], Mapping[Any, float]] = dict
    """Function that converts the averages of the parts to seconds by kind."""

    def known(self, entries: Container[Hashable]) -> bool:
        """Return whether this point has been measured."""
        return all(blank.key in entries for blank in self.blanks)


@dataclass(frozen=True)
class Pace:
    """How much time measurements may take."""

    sweeps: int
    """Number of sweeps over all points. Their median leaves out moments when the machine was busy."""
    patience: float
    """Seconds to repeat one measurement in a sweep. The minimum number of repetitions may take longer."""
    repetitions: tuple[int, int]
    """Minimum and maximum number of repetitions."""
    limit: float
    """Maximum seconds of one execution; slower points are skipped."""
    total: float
    """Seconds of a sweep. After that time, only the smallest size of each remaining series is measured."""


class Measurer(Generic[Entry]):
    """Measures missing points. All ranks run it together."""

    def __init__(
        self, entries: dict[Hashable, Entry], bench: Bench, pace: Pace, done: Callable[[], None]
    ) -> None:
        """`done` is called after each point, whether it was measured or skipped."""
        self.entries: dict[Hashable, Entry] = entries
        self._bench = bench
        self._pace = pace
        self._done = done
        self._rates: dict[tuple[object, ...], float] = {}
        """Latest seconds per unit of size, for each tuple of series that are measured together."""
        self._started = time.monotonic()

    def measure(self, row: Sequence[Point[Entry]]) -> None:
        """Measure a series in order of size. If one point is skipped, all larger ones are skipped too."""
        continuing = True
        for point in row:
            series = tuple(blank.series for blank in point.blanks)
            expected = point.size * self._rates.get(series, 0.0)
            if continuing and not point.known(self.entries):
                late = point is not row[0] and self._late()
                continuing = expected <= self._pace.limit and not late and self._one(point)
            if point.known(self.entries):
                seconds = sum(self.entries[blank.key].seconds for blank in point.blanks)
                self._rates[series] = point.times * seconds / point.size
            self._done()

    def _one(self, point: Point[Entry]) -> bool:
        """Measure a point. Returns whether it could be measured."""
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


def take_medians(sweeps: Sequence[Mapping[Hashable, Entry]]) -> dict[Hashable, Entry]:
    """Compute the median of each entry over the sweeps that have measured it."""
    found: dict[Hashable, list[Entry]] = {}
    for entries in sweeps:
        for key, entry in entries.items():
            found.setdefault(key, []).append(entry)
    return {
        key: alike[0].model_copy(update={"seconds": median(entry.seconds for entry in alike)})
        for key, alike in found.items()
    }


def find_sweep_spread(sweeps: Sequence[Mapping[Hashable, Entry]], known: Container[Hashable]) -> float | None:
    """Compute the spread of whole sweeps: the root mean square of their shifts.

    The shift of a sweep is the median of ln(seconds / median of all sweeps) over its entries. Entries in `known` do
    not count. Returns None for a single sweep, or if there are no new entries.
    """
    medians = {key: entry.seconds for key, entry in take_medians(sweeps).items() if key not in known}
    shifts = [
        median(math.log(entries[key].seconds / seconds) for key, seconds in medians.items() if key in entries)
        for entries in sweeps
        if any(key in entries for key in medians)
    ]
    return math.sqrt(sum(shift**2 for shift in shifts) / len(shifts)) if len(shifts) > 1 else None
