"""Timing log: measured times of steps, calls and reallocations, merged from all ranks."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from realrl.runtime.measure.step_timer import StepTimes, TimedSpan


@dataclass(frozen=True)
class AlignedSpan:
    """One execution of a call or a reallocation on the ranks that took part.

    Functions, and waiting for them, are such spans, too. Times are in seconds.
    """

    name: str
    parts: dict[int, TimedSpan]
    """By rank, each with the times of its own clock."""
    offsets: Sequence[float]
    """Seconds by which the clock of each rank is ahead."""

    @property
    def alone(self) -> bool:
        """Whether ranks did not wait for each other, as with functions."""
        return all(span.alone for span in self.parts.values())

    @property
    def seconds(self) -> float:
        """Seconds from the start on the last rank to the end on the last one; of functions, on the slowest rank."""
        if self.alone:
            return max(span.end - span.start for span in self.parts.values())
        ended = max(span.end - self.offsets[rank] for rank, span in self.parts.items())
        return max(0.0, ended - self._begun(self.parts))

    def measure_busy(self, group_of: Callable[[int], int]) -> dict[int, float]:
        """Measure the busy seconds of each rank.

        They are those from the start on the last rank of its group, for which it waits, to its own end.
        """
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for rank in self.parts:
            groups[group_of(rank)].append(rank)
        return {
            rank: max(0.0, self.parts[rank].end - self.offsets[rank] - begun)
            for ranks in groups.values()
            for begun in [self._begun(ranks)]
            for rank in ranks
        }

    def _begun(self, ranks: Iterable[int]) -> float:
        """Start on the last of these ranks."""
        return max(self.parts[rank].start - self.offsets[rank] for rank in ranks)


def align_spans(step: Sequence[StepTimes], offsets: Sequence[float]) -> list[AlignedSpan]:
    """Align the spans of a step by the ranks' times, and by how far the clock of each is ahead."""
    found: defaultdict[tuple[str, int], dict[int, TimedSpan]] = defaultdict(dict)
    for rank, times in enumerate(step):
        # A reallocation may be done several times in a step, and so may a call that samples in rounds.
        seen: defaultdict[str, int] = defaultdict(int)
        for span in times.spans:
            found[span.name, seen[span.name]][rank] = span
            seen[span.name] += 1
    return [AlignedSpan(name, parts, offsets) for (name, _), parts in found.items()]


KEPT_STEPS = 10_000
"""Maximum number of steps kept; of a longer run, the first and the latest, so that memory stays bounded."""


@dataclass
class Times:
    """Seconds of a step, a call or a reallocation in each step, and its peak memory on a device."""

    seconds: list[float] = field(default_factory=list)
    bytes: int | None = None

    @property
    def counted(self) -> list[float]:
        """Seconds without the first step, which warms up, if there are others."""
        return self.seconds[1:] or self.seconds

    def add(self, seconds: float) -> None:
        """Append the seconds of a step."""
        self.seconds.append(seconds)
        del self.seconds[1 : 1 - KEPT_STEPS]


@dataclass(frozen=True)
class StepSpans:
    """A step on all ranks: its seconds, as `TimingLog` counts them, and what ranks did in it."""

    seconds: float
    spans: Sequence[AlignedSpan]


class TimingLog:
    """Measured times of a run so far."""

    def __init__(self) -> None:
        self.step = Times()
        """Times of steps, each from the end of the step before to its own end, on the last rank.
        
        A step begins with the start on the first rank where that is later than the end of the step before."""
        self.spans: defaultdict[str, Times] = defaultdict(Times)
        """Times by call, and by the text of a reallocation.

        From the start on the last rank that takes part to the end on the last one; of functions, and of waiting for
        them, on the rank where it took longest."""
        self._ended = float("-inf")

    def add(self, step: Sequence[StepTimes], offsets: Sequence[float]) -> StepSpans:
        """Add the times of a step by rank. offsets: seconds by which the clock of each rank is ahead."""
        end = max(times.end - ahead for times, ahead in zip(step, offsets, strict=True))
        start = min(times.start - ahead for times, ahead in zip(step, offsets, strict=True))
        found = StepSpans(end - max(start, self._ended), align_spans(step, offsets))
        self._ended = end
        self.step.add(found.seconds)
        taken: defaultdict[str, float] = defaultdict(float)
        for span in found.spans:
            taken[span.name] += span.seconds
            sizes = [part.bytes for part in span.parts.values() if part.bytes is not None]
            known = self.spans[span.name]
            known.bytes = max([*sizes, known.bytes or 0]) or None
        for name, seconds in taken.items():
            self.spans[name].add(seconds)
        return found
