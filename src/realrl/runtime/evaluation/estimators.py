"""Estimates from several answers to one prompt: pass@k, majority vote, win rate."""

from collections import Counter
from collections.abc import Sequence
from math import comb


def estimate_pass(answers: int, right: int, k: int) -> float:
    """Estimate the probability that one of k answers is right, of which `right` out of `answers` are.

    1 - C(n - c, k) / C(n, k), the unbiased estimate of Chen et al. 2021 (arXiv 2107.03374, equation 1): the share
    of the sets of k answers that have a right one. k must be at most `answers`.
    """
    return 1 - comb(answers - right, k) / comb(answers, k)


def estimate_majority(votes: Sequence[tuple[str | None, bool]], k: int) -> float:
    """Estimate the probability that the majority of k answers is right; the mean over runs of k consecutive ones.

    votes: (answer, whether it is right), at least k of them. Answers that are None have no vote.
    """
    runs = [votes[first : first + k] for first in range(0, len(votes) - k + 1, k)]
    return sum(map(judge_majority, runs)) / len(runs)


def judge_majority(votes: Sequence[tuple[str | None, bool]]) -> float:
    """Judge the most frequent answer: 1 if it is right, 0 if it is wrong or there is none.

    Where several are equally frequent, the share of those that are right: one is drawn.
    """
    counts = Counter(answer for answer, _ in votes if answer is not None)
    if not counts:
        return 0.0
    right = dict(reversed(votes))
    most = max(counts.values())
    first = [answer for answer, count in counts.items() if count == most]
    return sum(right[answer] for answer in first) / len(first)


def compute_win_rate(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Compute the share of pairs in which our score is the higher one; ties count half."""
    wins = sum((a > b) + 0.5 * (a == b) for a in ours for b in theirs)
    return wins / (len(ours) * len(theirs))
