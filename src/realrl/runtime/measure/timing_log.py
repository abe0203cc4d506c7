"""Timing log: measured times of steps, calls and reallocations, merged from all ranks."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from realrl.runtime.measure.aligned_spans import AlignedSpan, align_spans
from realrl.runtime.measure.step_timer import StepTimes

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
