"""Timing log: measured times of steps, calls and reallocations, merged from all ranks."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from realrl.runtime.measure.step_timer import StepTimes, TimedSpan


@dataclass(frozen=True)
class AlignedSpan:
    """One execution of a call, reallocation, function or wait on its ranks. Times are in seconds."""

    name: str
    parts: dict[int, TimedSpan]
    """By rank, in the time of its own clock."""
    offsets: Sequence[float]
    """Seconds by which each rank's clock is ahead."""

    @property
    def alone(self) -> bool:
        """Whether ranks run it independently, like functions."""
        return all(span.alone for span in self.parts.values())

    @property
    def seconds(self) -> float:
        """Seconds from the last rank's start to the last rank's end; for functions, of the slowest rank."""
        if self.alone:
            return max(span.end - span.start for span in self.parts.values())
        ended = max(span.end - self.offsets[rank] for rank, span in self.parts.items())
        return max(0.0, ended - self._begun(self.parts))

    def measure_busy(self, group_of: Callable[[int], int]) -> dict[int, float]:
        """Measure the busy seconds of each rank: from the start of the last rank in its group to its own end."""
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
        """Find the start of the last of these ranks."""
        return max(self.parts[rank].start - self.offsets[rank] for rank in ranks)


def align_spans(step: Sequence[StepTimes], offsets: Sequence[float]) -> list[AlignedSpan]:
    """Align the spans of a step on one clock; `offsets` as in `AlignedSpan`."""
    found: defaultdict[tuple[str, int], dict[int, TimedSpan]] = defaultdict(dict)
    for rank, times in enumerate(step):
        # A reallocation may occur several times in a step, and so may a call in sampling rounds.
        seen: defaultdict[str, int] = defaultdict(int)
        for span in times.spans:
            found[span.name, seen[span.name]][rank] = span
            seen[span.name] += 1
    return [AlignedSpan(name, parts, offsets) for (name, _), parts in found.items()]


KEPT_STEPS = 10_000
"""Maximum number of kept steps: the first and the latest, so that memory stays bounded."""


@dataclass
class Times:
    """Seconds of a step, call or reallocation in each step, and its peak memory on a device."""

    seconds: list[float] = field(default_factory=list)
    bytes: int | None = None

    @property
    def counted(self) -> list[float]:
        """Seconds without the first step, a warm-up, if there are others."""
        return self.seconds[1:] or self.seconds

    def add(self, seconds: float) -> None:
        """Append the seconds of a step."""
        self.seconds.append(seconds)
        del self.seconds[1 : 1 - KEPT_STEPS]


@dataclass(frozen=True)
class StepSpans:
    """A step on all ranks: its seconds, as `TimingLog` counts them, and its spans."""

    seconds: float
    spans: Sequence[AlignedSpan]


class TimingLog:
    """Measured times of a run so far."""

    def __init__(self) -> None:
        self.step = Times()
        """Times of steps on the last rank: from the end of the previous step, or the first rank's start if that is
        later, to the end."""
        self.spans: defaultdict[str, Times] = defaultdict(Times)
        """Times by call, or by the text of a reallocation; see `AlignedSpan.seconds`."""
        self._ended = float("-inf")

    def add(self, step: Sequence[StepTimes], offsets: Sequence[float]) -> StepSpans:
        """Add the times of a step by rank. offsets: seconds by which each rank's clock is ahead."""
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
