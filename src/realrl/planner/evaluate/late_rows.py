"""Rows whose senders wait for lengths of later rows, in many plans at once."""

from collections.abc import Mapping

import numpy as np

from realrl.planner.evaluate.activities import Facts
from realrl.planner.evaluate.tables import Bools
from realrl.planner.moves.transfers import Floats, Ints


class LateRows:
    """Send times of rows that wait for the lengths by which the items of their reader are divided.

    Where there are such rows, every device of the cluster is a point. Times are [plans].
    """

    def __init__(self, facts: Facts, sharing: Mapping[int, int]) -> None:
        """`sharing`: activity that shares the lengths of a call's rows -> the call."""
        tables = facts.tables
        shares = {call: activity for activity, call in sharing.items()}
        plans = facts.columns.first.shape[1]
        self._after = {pair: [shares[call] for call in calls] for pair, calls in tables.late_lengths.items()}
        """(reader, producer) -> activities that share lengths."""
        self._sent = {pair: np.zeros(plans) for pair in self._after}
        self._senders = {p: _output_ranks(facts, p) for _, p in self._after}

    def advance(self, activity: Ints, clock: Floats) -> None:
        """Note which lengths have become known. `activity`: [plans], their numbers. `clock`: [points, plans]"""
        for (reader, producer), sharing in self._after.items():
            senders = self._senders[producer]
            clocks = np.where(senders, clock[-len(senders) :], 0.0)
            known = np.isin(activity, sharing)
            pair = reader, producer
            self._sent[pair] = np.where(known, clocks.max(axis=0), self._sent[pair])

    def delay(self, activity: Ints, arrival: Floats, waits: Floats) -> Floats:
        """Compute when all inputs of an activity's call have come, of which all others have by `arrival`.

        `waits`: [calls, plans], the seconds from a producer's rows being sent on.
        """
        for (reader, producer), sent in self._sent.items():
            late = np.maximum(arrival, sent + waits[producer])
            arrival = np.where(activity == reader, late, arrival)
        return arrival


def _output_ranks(facts: Facts, call: int) -> Bools:
    """Find the ranks that send the rows of a call, [ranks, plans]."""
    placed = facts.tables.layouts(call)[facts.columns.layout[call]]
    offset = np.arange(facts.tables.problem.cluster.size)[:, None] - placed.first
    last_stage = placed.size - placed.size // placed.pp
    return (offset >= last_stage) & (offset < placed.size) & (offset % placed.tp == 0)
