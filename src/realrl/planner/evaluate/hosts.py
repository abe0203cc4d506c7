"""Functions on the hosts of many plans at once: they run while devices go on, until their outputs are needed."""

from collections.abc import Iterator, Mapping

import numpy as np

from realrl.planner.arrays.arrays import Bools, Floats, Ints


class Hosts:
    """The host of each point: it runs the functions of its rank one after the other.

    functions: by number of the call, the number of the activity that collects its outputs; the one that starts it
    has the number of the call. Times are [points, plans].
    """

    def __init__(self, functions: Mapping[int, int], seconds: Floats, points: int) -> None:
        """seconds: [calls, plans], of functions among others."""
        self._functions, self._seconds = functions, seconds
        self._free = np.zeros((points, seconds.shape[1]))
        self._ends = {call: np.zeros_like(self._free) for call in functions}

    def advance(self, activity: Ints, where: Bools, clock: Floats) -> Floats:
        """Clocks of devices after an activity of each plan; it took place there by those clocks.

        activity: [plans], their numbers. where: [points, plans], who takes part.
        """
        for call, collecting in self._functions.items():
            started = where & (activity == call)
            if started.any():
                end = np.maximum(self._free, clock) + self._seconds[call]
                self._free = np.where(started, end, self._free)
                self._ends[call] = np.where(started, end, self._ends[call])
            collected = where & (activity == collecting)
            if collected.any():
                clock = np.where(collected, np.maximum(clock, self._ends[call]), clock)
        return clock

    def handed_on(self, activity: Ints, where: Bools, clock: Floats) -> Iterator[tuple[int, Bools, Floats]]:
        """Functions whose outputs an activity collects: the call, in which plans, and when the last point does,
        [plans]. Arguments as for `advance`, after it."""
        for call, collecting in self._functions.items():
            plans = activity == collecting
            if plans.any():
                yield call, plans, (clock * where).max(axis=0)

    def end(self, call: int) -> Floats:
        """Find the time at which the last rank has ended a function, [plans]."""
        return self._ends[call].max(axis=0)
