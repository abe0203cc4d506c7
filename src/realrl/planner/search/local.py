"""Improve a plan by the best change of one call, or of one role, as long as there is one."""

from collections import defaultdict

import numpy as np

from realrl.planner.evaluate.scorer import Scorer
from realrl.planner.moves.transfers import Ints


def improve_locally(scorer: Scorer, assignment: Ints, *, part: float = 1.0) -> Ints:
    """Return a plan that no such change improves, starting from `assignment`, [calls].

    When `part` of the time is over, returns the best plan so far.
    """
    moves = [*_call_moves(scorer), *_role_moves(scorer)]
    score, unchanged = np.inf, 0
    while unchanged < len(moves):
        for calls, candidates in moves:
            if scorer.deadline_exceeded(part):
                return assignment
            plans = np.repeat(assignment[:, None], candidates.shape[1] + 1, axis=1)
            plans[calls, 1:] = candidates
            scores = scorer(plans)
            best = int(scores.argmin())
            unchanged += 1
            if scores[best] < min(score, scores[0]):
                assignment, unchanged = plans[:, best], 0
            score = min(score, float(scores[best]))
            if unchanged >= len(moves):
                break
    return assignment


def _call_moves(scorer: Scorer) -> list[tuple[list[int], Ints]]:
    """Calls and the options to give them, [calls, moves]."""
    return [([c], np.arange(n)[None]) for c, n in enumerate(scorer.timeline.tables.sizes)]


def _role_moves(scorer: Scorer) -> list[tuple[list[int], Ints]]:
    """All calls of a role into one layout, each by its fastest option there."""
    tables = scorer.timeline.tables
    moves = []
    for home in dict.fromkeys(tables.home):
        calls = [c for c, h in enumerate(tables.home) if h == home]
        fastest: dict[int, dict[int, int]] = defaultdict(dict)
        for c in calls:
            columns = tables.candidates(c)
            for i in np.argsort(-columns.seconds, kind="stable").tolist():
                fastest[int(columns.code[i])][c] = i
        shared = [[found[c] for c in calls] for found in fastest.values() if len(found) == len(calls)]
        if len(calls) > 1 and shared:
            moves.append((calls, np.array(shared).T))
    return moves
