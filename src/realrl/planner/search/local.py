"""Local search: improve a plan by changes of one call or one role."""

from collections import defaultdict

import numpy as np

from realrl.planner.arrays.arrays import Ints
from realrl.planner.evaluate.scorer import Scorer
from realrl.planner.evaluate.tables import Tables


def improve_locally(scorer: Scorer, assignment: Ints, *, share: float = 1.0) -> Ints:
    """Improve `assignment`, [calls], until no change of one call or one role improves it.

    Returns the best plan so far once a `share` of the effort is spent.
    """
    moves = list_moves(scorer.timeline.tables)
    score = np.inf
    unchanged = 0
    while unchanged < len(moves):
        for calls, candidates in moves:
            if scorer.exhausted(share):
                return assignment
            plans = np.repeat(assignment[:, None], candidates.shape[1] + 1, axis=1)
            plans[calls, 1:] = candidates
            scores = scorer(plans)
            best = int(scores.argmin())
            unchanged += 1
            if scores[best] < min(score, scores[0]):
                assignment = plans[:, best]
                unchanged = 0
            score = min(score, float(scores[best]))
            if unchanged >= len(moves):
                break
    return assignment


def list_moves(tables: Tables) -> list[tuple[list[int], Ints]]:
    """List the changes of one call or one role: the calls, and their new candidates, [calls, moves]."""
    return [*_call_moves(tables), *_role_moves(tables)]


def _call_moves(tables: Tables) -> list[tuple[list[int], Ints]]:
    """Changes of single calls."""
    return [([c], np.arange(n)[None]) for c, n in enumerate(tables.sizes)]


def _role_moves(tables: Tables) -> list[tuple[list[int], Ints]]:
    """Changes of all calls of a role to one layout, each to its fastest candidate there."""
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
