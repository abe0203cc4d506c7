"""Decide after a failure whether to restart a run, and with which devices. Does not import torch."""

from collections import Counter
from collections.abc import Sequence

from realrl.recipe.run_settings import LaunchConfig
from realrl.runtime.supervision.failures import DEATH, Failure


class RestartPolicy:
    """Counts consecutive failures without progress, of the run and of each of its devices."""

    def __init__(self, devices: int, settings: LaunchConfig) -> None:
        self._settings = settings
        self.devices = list(range(devices))
        """Numbers of the devices that the run uses. The first start of the run has numbered them."""
        self.total = 0
        """Number of restarts so far."""
        self.in_vain = 0
        """Number of consecutive restarts without progress, including the last one."""
        self._furthest = 0
        self._deaths: Counter[int] = Counter()

    def count(self, cause: Failure, *, step: int, finished: bool) -> bool:
        """Count a failure. Returns whether to restart the run.

        `step`: number of training steps before the failure. `finished`: whether this start has finished any of
        these steps.
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
            # An exception before the first step would only be raised again.
            return False
        self.total += 1
        self.in_vain += 1
        return True

    @property
    def broken_devices(self) -> list[int]:
        """Devices that have failed too often in a row to be used any more."""
        return [device for device in self.devices if self._deaths[device] >= self._settings.tries]

    def shrink(self, devices: Sequence[int]) -> None:
        """Continue with these devices only, and forget all earlier failures."""
        self.devices = list(devices)
        self.in_vain = 0
        self._deaths.clear()

    def describe(self) -> str:
        """Describe the restarts so far, for a note."""
        return f"restart {self.total}, {self.in_vain} of {self._settings.max_restarts} without progress"
