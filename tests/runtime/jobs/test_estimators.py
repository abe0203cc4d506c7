"""Estimates from several answers against the sets that they are means over."""

from itertools import combinations, pairwise
from random import Random

import pytest

from realrl.runtime.evaluation.answers import (
    compute_win_rate,
    estimate_majority,
    estimate_pass,
    judge_majority,
)


@pytest.mark.parametrize("answers", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_sets_of_answers_with_a_right_one(answers: int) -> None:
    for right in range(answers + 1):
        marks = [True] * right + [False] * (answers - right)
        for k in range(1, answers + 1):
            sets = [any(chosen) for chosen in combinations(marks, k)]
            assert estimate_pass(answers, right, k) == pytest.approx(sum(sets) / len(sets), abs=1e-12)
        rates = [estimate_pass(answers, right, k) for k in range(1, answers + 1)]
        assert all(a <= b for a, b in pairwise(rates))


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ("7 7 3", 1.0),
        ("3 3 7", 0.0),
        ("3 7 3 7", 0.5),
        ("- - 7", 1.0),
        ("- - -", 0.0),
        ("1 3 7", 1 / 3),
    ],
)
def test_the_most_frequent_answer_is_judged_and_ties_are_drawn(votes: str, expected: float) -> None:
    """Of answers, 7 is right, and - is none."""
    given = [(None if answer == "-" else answer, answer == "7") for answer in votes.split()]
    assert judge_majority(given) == pytest.approx(expected)
    assert judge_majority(given[::-1]) == pytest.approx(expected)
    assert estimate_majority(given, len(given)) == pytest.approx(expected)


def test_a_majority_of_fewer_answers_estimates_the_mean_over_their_sets() -> None:
    votes = [(answer, answer == "7") for answer in ["7", "7", "7", "3", "3", "1", "1", "7", "3"]]
    sets = [judge_majority(chosen) for chosen in combinations(votes, 3)]
    random, estimates = Random(1), []
    for _ in range(4000):
        random.shuffle(votes)
        estimates.append(estimate_majority(votes, 3))
    assert sum(estimates) / len(estimates) == pytest.approx(sum(sets) / len(sets), abs=0.01)


def test_win_rates_of_two_models_add_up_to_one() -> None:
    ours, theirs = [0.0, 1.0, 2.0], [1.0, 1.0, -3.0]
    assert compute_win_rate(ours, theirs) == pytest.approx((1 + 2 * 0.5 + 1 + 3) / 9)
    assert compute_win_rate(ours, theirs) + compute_win_rate(theirs, ours) == pytest.approx(1)
    assert compute_win_rate(ours, ours) == 0.5
