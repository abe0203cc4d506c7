"""Decisions after a failure: whether to restart a run, and with which devices. Does not import torch."""

from collections import Counter
from collections.abc import Sequence

from realrl.recipe.run_settings import LaunchConfig
from realrl.runtime.supervision.failures import DEATH, Failure


class RestartPolicy:
    """Counts failures without progress, of the run and of each of its devices."""

    def __init__(self, devices: int, settings: LaunchConfig) -> None:
        self._settings = settings
        self.devices = list(range(devices))
        """Devices that the run uses, by their numbers at its first start."""
        self.total = 0
        """Number of restarts so far."""
        self.in_vain = 0
        """Number of the last restarts, in a row, that were needed without progress."""
        self._furthest = 0
        self._deaths: Counter[int] = Counter()

    def count(self, cause: Failure, *, step: int, finished: bool) -> bool:
        """Count a failure; return whether to restart the run.

        `step`: training steps of the run before it. `finished`: whether this start had finished any of them.
        """
        progressed = finished and step > self._furthest
        self._furthest = max(self._furthest, step)
        if progressed:
            self.in_vain = 0
            self._deaths.clear()
        elif (cause.device or cause.distance == DEATH) and cause.rank < len(self.devices):
            self._deaths[self.devices[cause.rank]] += 1
        if cause.final or self.in_vain >= self._settings.max_restarts:
            return False
        if cause.trace and self._furthest == 0:
            # An exception before the first step would be raised again.
            return False
        self.total += 1
        self.in_vain += 1
        return True

    @property
    def broken_devices(self) -> list[int]:
        """Devices that have failed too often in a row to be used again."""
        return [device for device in self.devices if self._deaths[device] >= self._settings.tries]

    def shrink(self, devices: Sequence[int]) -> None:
        """Continue with these devices only, which have failed in nothing yet."""
        self.devices = list(devices)
        self.in_vain = 0
        self._deaths.clear()

    def describe(self) -> str:
        """Describe the restarts so far, for a note."""
        return f"restart {self.total}, {self.in_vain} of {self._settings.max_restarts} without progress"
