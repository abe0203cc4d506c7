"""Times of all ranks, put together: what a step, each call and each reallocation took."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from realrl.runtime.measure.meter import Span, StepTimes

KEPT_STEPS = 10_000
"""Of a longer run the first and the last ones, so that memory stays bounded."""


@dataclass
class Times:
    """Seconds of one thing in each step, and the most memory that it took on a device."""

    seconds: list[float] = field(default_factory=list)
    bytes: int | None = None

    @property
    def counted(self) -> list[float]:
        """Without the first step, which warms up, where there are others."""
        return self.seconds[1:] or self.seconds

    def add(self, seconds: float) -> None:
        """One more step."""
        self.seconds.append(seconds)
        del self.seconds[1 : 1 - KEPT_STEPS]


class Ledger:
    """What has been measured so far."""

    def __init__(self) -> None:
        self.step = Times()
        """From when the last rank has ended the step before, or from when the first has begun where nobody had
        by then, until the last rank has ended it."""
        self.spans: defaultdict[str, Times] = defaultdict(Times)
        """The same by call, and by the text of a reallocation: from when the last rank that takes part has begun
        until the last one has ended. Of functions, and of waiting for them, what it was on the rank where it was
        longest."""
        self._ended = float("-inf")

    def add(self, ranks: Sequence[Sequence[StepTimes]], offsets: Sequence[float]) -> None:
        """Steps that every rank has measured, by rank. offsets: by rank, how far its clock is ahead."""
        for step in zip(*ranks, strict=True):
            end = max(times.end - ahead for times, ahead in zip(step, offsets, strict=True))
            start = min(times.start - ahead for times, ahead in zip(step, offsets, strict=True))
            self.step.add(end - max(start, self._ended))
            self._ended = end
            self._add_spans(step, offsets)

    def _add_spans(self, step: Sequence[StepTimes], offsets: Sequence[float]) -> None:
        found: defaultdict[tuple[str, int], list[tuple[Span, float]]] = defaultdict(list)
        for times, ahead in zip(step, offsets, strict=True):
            # A reallocation may be done several times in a step.
            seen: defaultdict[str, int] = defaultdict(int)
            for span in times.spans:
                found[span.name, seen[span.name]].append((span, ahead))
                seen[span.name] += 1
        taken: defaultdict[str, float] = defaultdict(float)
        for (name, _), spans in found.items():
            if all(span.alone for span, _ in spans):
                taken[name] += max(span.end - span.start for span, _ in spans)
            else:
                begun, ended = max(s.start - a for s, a in spans), max(s.end - a for s, a in spans)
                taken[name] += max(0.0, ended - begun)
            sizes = [span.bytes for span, _ in spans if span.bytes is not None]
            known = self.spans[name]
            known.bytes = max([*sizes, known.bytes or 0]) or None
        for name, seconds in taken.items():
            self.spans[name].add(seconds)
