"""Decisions after a failure: whether to start a run again, and with which devices. No torch."""

from collections import Counter
from collections.abc import Sequence

from realrl.recipe.run_settings import LaunchConfig
from realrl.runtime.processes.error_reports import DEATH, Failure


class RestartCounter:
    """Counter of failures without progress between them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.total = 0
        """Number of restarts so far."""
        self.in_vain = 0
        """Number of them in a row that were needed without progress."""
        self.progressed = False
        """Whether the run had got further than ever before when it failed last."""
        self._furthest = 0

    def allow(self, cause: Failure, step: int) -> bool:
        """Decide whether to start again after a failure, and count that; `step` training steps were done then."""
        self.progressed = step > self._furthest
        if self.progressed:
            self._furthest, self.in_vain = step, 0
        if cause.final or self.in_vain >= self._limit:
            return False
        if cause.trace and self._furthest == 0:
            # What a run raises before its first step it would raise again.
            return False
        self.total += 1
        self.in_vain += 1
        return True

    def forgive(self) -> None:
        """Begin to count anew, since the run goes on under other circumstances."""
        self.in_vain = 0


class Slots:
    """Devices of this machine that a run uses, by the numbers they had at its first start."""

    def __init__(self, size: int, settings: LaunchConfig) -> None:
        self.kept = list(range(size))
        self._settings = settings
        self._deaths: Counter[int] = Counter()

    @property
    def may_shrink(self) -> bool:
        """True if the run may go on with fewer devices."""
        return self._settings.shrink

    def count(self, cause: Failure, *, progressed: bool) -> list[int]:
        """Count a failure; list the devices that are to be given up for having failed too often.

        `progressed` says whether a step was finished since the last start that had not been finished before.
        """
        if progressed:
            self._deaths.clear()
        elif (cause.device or cause.distance == DEATH) and cause.rank < len(self.kept):
            self._deaths[self.kept[cause.rank]] += 1
        if not self._settings.shrink:
            return []
        return [slot for slot in self.kept if self._deaths[slot] >= self._settings.tries]

    def keep(self, slots: Sequence[int]) -> None:
        """Go on with these devices alone."""
        self.kept = list(slots)
        self._deaths.clear()
