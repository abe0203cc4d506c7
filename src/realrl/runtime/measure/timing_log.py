"""Log of the measured times of steps, calls and reallocations, merged from all ranks."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from realrl.runtime.measure.step_timer import StepTimes, TimedSpan


@dataclass(frozen=True)
class AlignedSpan:
    """One execution of a call, reallocation, function or wait, on all ranks that take part.

    Times are in seconds.
    """

    name: str
    parts: dict[int, TimedSpan]
    """The span on each rank, in the time of the rank's own clock."""
    offsets: Sequence[float]
    """Number of seconds that each rank's clock is ahead of rank 0's."""

    @property
    def alone(self) -> bool:
        """Whether each rank runs this independently of other ranks. This holds for functions, and for waits."""
        return all(span.alone for span in self.parts.values())

    @property
    def seconds(self) -> float:
        """Seconds from the start of the last rank to the end of the last rank.

        For a function or a wait, this is the time of the slowest rank.
        """
        if self.alone:
            return max(span.end - span.start for span in self.parts.values())
        ended = max(span.end - self.offsets[rank] for rank, span in self.parts.items())
        return max(0.0, ended - self._begun(self.parts))

    def measure_busy(self, group_of: Callable[[int], int]) -> dict[int, float]:
        """Compute the busy seconds of each rank: from the start of the last rank in its group to its own end.

        `group_of` returns the number of a rank's group.
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
        """Return the time at which the last of these ranks started."""
        return max(self.parts[rank].start - self.offsets[rank] for rank in ranks)


def align_spans(step: Sequence[StepTimes], offsets: Sequence[float]) -> list[AlignedSpan]:
    """Align the spans of a step on one clock. For `offsets`, see `AlignedSpan`."""
    found: defaultdict[tuple[str, int], dict[int, TimedSpan]] = defaultdict(dict)
    for rank, times in enumerate(step):
        # A reallocation may occur several times in a step. So may a call, in sampling rounds.
        seen: defaultdict[str, int] = defaultdict(int)
        for span in times.spans:
            found[span.name, seen[span.name]][rank] = span
            seen[span.name] += 1
    return [AlignedSpan(name, parts, offsets) for (name, _), parts in found.items()]


KEPT_STEPS = 10_000
"""Maximum number of steps to keep: the first step and the latest ones. It limits memory."""


@dataclass
class Times:
    """Seconds of a step, call or reallocation, with one number for each step, and its peak bytes on a device."""

    seconds: list[float] = field(default_factory=list)
    bytes: int | None = None

    @property
    def counted(self) -> list[float]:
        """Seconds of all steps but the first, which is a warm-up. If there is only one step, it counts."""
        return self.seconds[1:] or self.seconds

    def add(self, seconds: float) -> None:
        """Append the seconds of a step."""
        self.seconds.append(seconds)
        del self.seconds[1 : 1 - KEPT_STEPS]


@dataclass(frozen=True)
class StepSpans:
    """A step on all ranks: its duration in seconds as in `TimingLog`, and its spans."""

    seconds: float
    spans: Sequence[AlignedSpan]


class TimingLog:
    """Measured times of a run so far."""

    def __init__(self) -> None:
        self.step = Times()
        """Times of steps, which end when the last rank ends. A step starts at the end of the previous step, or when
        the first rank starts if that is later."""
        self.spans: defaultdict[str, Times] = defaultdict(Times)
        """Times by the name of a call, or by the text of a reallocation; see `AlignedSpan.seconds`."""
        self._ended = float("-inf")

    def add(self, step: Sequence[StepTimes], offsets: Sequence[float]) -> StepSpans:
        """Add the times of a step, which `step` lists by rank.

        `offsets`: seconds that each rank's clock is ahead of rank 0's.
        """
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
