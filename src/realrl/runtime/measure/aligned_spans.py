"""Calls and reallocations of a step on all of its ranks, by one clock."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

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
