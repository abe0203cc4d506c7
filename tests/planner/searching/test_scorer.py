"""Scores of plans by hand: seconds, a penalty for memory, and what has been spent of an effort."""

from typing import Any

import numpy as np
import pytest

from realrl.planner.search.scorer import Scorer


class Timeline:
    """Seconds and used fractions of memory of plans whose only call has a candidate by their number."""

    seconds = np.array([5.0, 4.0, 3.0, 2.0, 1.0])
    fill = np.array([0.5, 1.0, 1.25, 1.125, 5000.0])

    def __call__(self, assignment: Any) -> tuple[Any, Any]:
        return self.seconds[assignment[0]], self.fill[assignment[0]]


def make(effort: float = 16) -> Scorer:
    return Scorer(Timeline(), effort)  # type: ignore[arg-type]


def test_plans_that_do_not_fit_are_scored_as_if_they_took_longer() -> None:
    """Eight times as much longer as they exceed memory, up to a thousand times of it."""
    scores = make()(np.array([[0, 1, 2, 3, 4]]))
    assert scores.tolist() == [5, 4, 3 * (1 + 8 / 4), 2 * (1 + 8 / 8), 1 + 8 * 1000]


def test_the_fastest_plan_that_fits_is_kept() -> None:
    scorer = make()
    scorer(np.array([[2, 4]]))
    assert scorer.best is None and scorer.nearest_to_fit is not None and scorer.nearest_to_fit.tolist() == [2]
    scorer(np.array([[4, 3]]))
    assert scorer.nearest_to_fit.tolist() == [3] and scorer.least_fill == 1.125
    for plans, best in (([0], 0), ([1, 0], 1), ([0, 2], 1)):
        scorer(np.array([plans]))
        assert scorer.best is not None and scorer.best.tolist() == [best]
    assert scorer.best_seconds == 4
    assert [(found.evaluations, found.seconds) for found in scorer.history] == [(5, 5), (7, 4)]


def test_four_sets_that_are_bounded_take_the_effort_of_a_plan() -> None:
    scorer = make(effort=16)
    scorer(np.array([[0, 1, 2]]))
    scorer.bounded = 20
    assert scorer.used() == pytest.approx((3 + 5) / 16) and scorer.used(0.25) == pytest.approx(2)
    assert scorer.exhausted(0.5) and not scorer.exhausted(0.51)
    assert make(effort=0).exhausted()
