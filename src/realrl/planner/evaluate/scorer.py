"""The best plan so far, and what has been tried to find it."""

import time
from dataclasses import dataclass

import numpy as np

from realrl.planner.evaluate.timeline import Timeline
from realrl.planner.moves.transfers import Floats, Ints

_PENALTY = 8.0
"""A plan that needs a tenth more memory than there is scores as if it took so many tenths longer."""
_WORST = 1e3
"""No part of a device counts as fuller than that many times."""


@dataclass(frozen=True)
class Improvement:
    """When a search found a better plan."""

    after_seconds: float
    evaluations: int
    seconds: float
    """Of a step under the plan."""


class Scorer:
    """Costs plans, remembers the best that fits, and counts.

    Columns of choices are plans: [calls, plans], numbers of options in the order of the graph.
    """

    def __init__(self, timeline: Timeline, seconds: float) -> None:
        """`seconds`: how long the search may take."""
        self.timeline = timeline
        self.started = time.perf_counter()
        self._allowed = seconds
        self.evaluations = 0
        self.best: Ints | None = None
        self.best_seconds = np.inf
        self.least_fill = np.inf
        self.nearest_to_fit: Ints | None = None
        """The plan that comes nearest to fitting."""
        self.history: list[Improvement] = []

    @property
    def elapsed(self) -> float:
        """Seconds since the search started."""
        return time.perf_counter() - self.started

    def time_used(self, part: float = 1.0) -> float:
        """How much of this part of the time is over: 1 or more for all of it."""
        return self.elapsed / (part * self._allowed) if self._allowed > 0 else np.inf

    def deadline_exceeded(self, part: float = 1.0) -> bool:
        """Whether this part of the time is over."""
        return self.time_used(part) >= 1

    def __call__(self, assignment: Ints) -> Floats:
        """Scores of plans: their seconds, and more for those that do not fit."""
        seconds, fill = self.timeline(assignment)
        self.evaluations += len(seconds)
        fitting = np.where(fill <= 1, seconds, np.inf)
        i = int(fitting.argmin())
        if fitting[i] < self.best_seconds:
            self.best, self.best_seconds = assignment[:, i].copy(), float(fitting[i])
            self.history.append(Improvement(self.elapsed, self.evaluations, self.best_seconds))
        if self.best is None:
            j = int(fill.argmin())
            if fill[j] < self.least_fill:
                self.nearest_to_fit, self.least_fill = assignment[:, j].copy(), float(fill[j])
        return seconds * (1 + _PENALTY * np.clip(fill - 1, 0, _WORST))
