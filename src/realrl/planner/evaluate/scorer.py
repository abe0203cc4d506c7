"""Scoring of plans, and the best plan found so far."""

import time
from dataclasses import dataclass

import numpy as np

from realrl.planner.evaluate.timeline import Timeline
from realrl.planner.moves.transfers import Floats, Ints

_PENALTY = 8.0
"""Penalty weight: a plan that exceeds memory by a fraction x is scored as if it took 1 + 8 x times as long."""
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

    def __init__(self, timeline: Timeline, seconds: float) -> None:
        """`seconds`: time limit of the search."""
        self.timeline = timeline
        self.started = time.perf_counter()
        self._allowed = seconds
        self.evaluations = 0
        self.best: Ints | None = None
        self.best_seconds = np.inf
        self.least_fill = np.inf
        self.nearest_to_fit: Ints | None = None
        """Assignment with the smallest memory excess."""
        self.history: list[Improvement] = []

    @property
    def elapsed(self) -> float:
        """Seconds since the search started."""
        return time.perf_counter() - self.started

    def time_used(self, time_fraction: float = 1.0) -> float:
        """Return the elapsed share of `time_fraction` of the time limit: 1 or more once it is exceeded."""
        return self.elapsed / (time_fraction * self._allowed) if self._allowed > 0 else np.inf

    def deadline_exceeded(self, time_fraction: float = 1.0) -> bool:
        """Return whether `time_fraction` of the time limit has elapsed."""
        return self.time_used(time_fraction) >= 1

    def __call__(self, assignment: Ints) -> Floats:
        """Score plans by their seconds, with a penalty for those that do not fit."""
        seconds, fill = self.timeline(assignment)
        self.evaluations += len(seconds)
        fitting = np.where(fill <= 1, seconds, np.inf)
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
