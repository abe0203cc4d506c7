"""Scores of plans, and the best plan found so far."""

import time
from dataclasses import dataclass

import numpy as np

from realrl.planner.search.many_plans import Timeline
from realrl.program.arrays import Floats, Ints

_PENALTY = 8.0
"""Penalty weight: a plan that exceeds memory by a fraction x is scored as if it took 1 + 8 x times as long."""
_BOUNDED_AT_ONCE = 4
"""Number of sets of plans whose bounds count as much effort as the score of one plan."""
_WORST = 1e3
"""Largest memory excess that counts. The excess of infeasible plans is infinite."""


@dataclass(frozen=True)
class Improvement:
    """Moment at which a search found a better plan."""

    after_seconds: float
    """Seconds since the start of the search."""
    evaluations: int
    """Number of plans scored until then."""
    seconds: float
    """Seconds of a step under the plan."""


class Scorer:
    """Scores plans, counts the effort, and remembers the best plan that fits.

    Assignments are indices of candidates, [calls, plans], with calls in the order of the graph.
    """

    def __init__(self, timeline: Timeline, effort: float) -> None:
        """Start with no plans scored. `effort`: limit of the search in scored plans. Four bounded sets of plans
        count as one plan.

        Effort is not time, so the result of a search does not depend on how busy the machine is.
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
        """Assignment with the smallest memory excess, until a plan fits."""
        self.history: list[Improvement] = []
        self.fits = np.zeros(0, dtype=bool)
        """Whether each plan of the last call fits, [plans]."""

    @property
    def elapsed(self) -> float:
        """Seconds since the search started."""
        return time.perf_counter() - self.started

    def used(self, share: float = 1.0) -> float:
        """Return the spent fraction of a share of the effort. It is 1 or more once the share is spent."""
        spent = self.evaluations + self.bounded / _BOUNDED_AT_ONCE
        return spent / (share * self.effort) if self.effort > 0 else np.inf

    def exhausted(self, share: float = 1.0) -> bool:
        """Return whether a share of the effort has been spent."""
        return self.used(share) >= 1

    def __call__(self, assignment: Ints) -> Floats:
        """Return the scores of plans, [plans]: their seconds, with a penalty if they do not fit."""
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
