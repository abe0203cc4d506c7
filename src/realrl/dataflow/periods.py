"""Kinds of training steps, by the moving averages that are due in them."""

from collections.abc import Collection
from itertools import combinations
from math import lcm


def share_steps(periods: Collection[int]) -> dict[frozenset[int], float]:
    """Find which of several periods fall together, and the share of steps in which just these do.

    The shares add up to 1. Steps in which at least the periods of a set W fall together are 1 / lcm(W) of all;
    those in which no other one does follow by inclusion and exclusion.
    """
    sets = [frozenset(chosen) for n in range(len(periods) + 1) for chosen in combinations(periods, n)]
    shares = {}
    for due in sets:
        if all(lcm(*due) % other for other in periods if other not in due):
            wider = [other for other in sets if other >= due]
            shares[due] = sum((-1) ** (len(other) - len(due)) / lcm(*other) for other in wider)
    return shares
