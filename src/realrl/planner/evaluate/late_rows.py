"""Rows whose senders wait for lengths of later rows, in many plans at once."""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from realrl.planner.arrays.arrays import Bools, Floats, Ints
from realrl.planner.evaluate.activities import Facts

Shared = tuple[int, ...]
"""Activities that share lengths."""


class LateRows:
    """Send times of rows that wait for the lengths by which the items of their reader are divided.

    A device has the clock of the last point that is not behind it (`Activities`). Times are [plans].
    """

    def __init__(self, facts: Facts, sharing: Mapping[int, int]) -> None:
        """`sharing`: activity that shares the lengths of a call's rows -> the call."""
        late = facts.tables.late_lengths
        activities = {call: activity for activity, call in sharing.items()}
        plans = facts.columns.first.shape[1]
        self._sent: dict[tuple[int, Shared], Floats] = {}
        """By producer, and by activities after which it sends."""
        self._readers: defaultdict[int, list[tuple[int, Shared]]] = defaultdict(list)
        for (reader, producer), calls in late.items():
            rows = producer, tuple(activities[call] for call in calls)
            self._sent[rows] = np.zeros(plans)
            self._readers[reader].append(rows)
        self._senders = {producer: _find_senders(facts, producer) for producer, _ in self._sent}
        self._sharing = {activity for _, shared in self._sent for activity in shared}

    def advance(self, activity: Ints, clock: Floats) -> None:
        """Note which lengths have become known. `activity`: [plans], their numbers. `clock`: [points, plans]"""
        for number in self._sharing:
            known = activity == number
            if not known.any():
                continue
            for (producer, shared), sent in self._sent.items():
                if number in shared:
                    senders = self._senders[producer]
                    clocks = np.where(senders, clock, 0.0)
                    np.copyto(sent, clocks.max(axis=0), where=known)

    def delay(self, activity: Ints, arrival: Floats, waits: Floats) -> Floats:
        """Compute when all inputs of an activity's call have come, of which all others have by `arrival`.

        `waits`: [calls, plans], the seconds from a producer's rows being sent on.
        """
        for reader, inputs in self._readers.items():
            reads = activity == reader
            if reads.any():
                for producer, shared in inputs:
                    late = np.maximum(arrival, self._sent[producer, shared] + waits[producer])
                    arrival = np.where(reads, late, arrival)
        return arrival


def _find_senders(facts: Facts, call: int) -> Bools:
    """Find the points that have the clock of a rank which sends the rows of a call, [points, plans]."""
    placed, point = facts.tables.layouts(call)[facts.columns.layout[call]], facts.point
    end = placed.first + placed.size
    last_stage = end - placed.size // placed.stages
    behind = np.where(point[None] > point[:, None], point[None], end).min(axis=1)
    first = last_stage + -(-np.maximum(point - last_stage, 0) // placed.cuts) * placed.cuts
    return first < np.minimum(behind, last_stage + placed.shares * placed.cuts)
