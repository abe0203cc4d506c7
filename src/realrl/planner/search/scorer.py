"""Scoring of plans, and the best plan found so far."""

import time
from dataclasses import dataclass

import numpy as np

from realrl.planner.search.many_plans import Timeline
from realrl.program.arrays import Floats, Ints

_PENALTY = 8.0
"""Penalty weight: a plan that exceeds memory by a fraction x is scored as if it took 1 + 8 x times as long."""
_BOUNDED_AT_ONCE = 4
"""Sets of plans that are bounded in the time that it takes to score a plan."""
_WORST = 1e3
"""Upper limit of the memory excess that is penalised."""


@dataclass(frozen=True)
class Improvement:
    """Event of a search finding a better plan."""

    after_seconds: float
    evaluations: int
    seconds: float
    """Seconds of a step under the plan."""


class Scorer:
    """Score plans, and keep the best one that fits.

    Assignments are [calls, plans]: indices of candidates, calls in the order of the graph.
    """

    def __init__(self, timeline: Timeline, effort: float) -> None:
        """`effort`: limit of the search, in plans that are scored; of sets that are bounded four count as one.

        It is no time, so that what a search finds does not depend on how busy the machine is.
        """
        self.timeline = timeline
        self.started = time.perf_counter()
        self.effort = effort
        self.evaluations = 0
        self.bounded = 0
        self.best: Ints | None = None
        self.best_seconds = np.inf
        self.least_fill = np.inf
        self.nearest_to_fit: Ints | None = None
        """Assignment with the smallest memory excess."""
        self.history: list[Improvement] = []
        self.fits = np.zeros(0, dtype=bool)
        """Whether each of the plans that were scored last fits."""

    @property
    def elapsed(self) -> float:
        """Seconds since the search started."""
        return time.perf_counter() - self.started

    def used(self, share: float = 1.0) -> float:
        """Return how much of a share of the effort has been spent: 1 or more once all of it is."""
        spent = self.evaluations + self.bounded / _BOUNDED_AT_ONCE
        return spent / (share * self.effort) if self.effort > 0 else np.inf

    def exhausted(self, share: float = 1.0) -> bool:
        """Return whether a share of the effort has been spent."""
        return self.used(share) >= 1

    def __call__(self, assignment: Ints) -> Floats:
        """Score plans by their seconds, with a penalty for those that do not fit."""
        seconds, fill = self.timeline(assignment)
        self.evaluations += len(seconds)
        self.fits = fill <= 1
        fitting = np.where(self.fits, seconds, np.inf)
        i = int(fitting.argmin())
        if fitting[i] < self.best_seconds:
            self.best = assignment[:, i].copy()
            self.best_seconds = float(fitting[i])
            self.history.append(Improvement(self.elapsed, self.evaluations, self.best_seconds))
        if self.best is None:
            j = int(fill.argmin())
            if fill[j] < self.least_fill:
                self.nearest_to_fit = assignment[:, j].copy()
                self.least_fill = float(fill[j])
        return seconds * (1 + _PENALTY * np.clip(fill - 1, 0, _WORST))
