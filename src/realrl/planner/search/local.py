"""Improve a plan by the best change of one call, or of one role, as long as there is one."""

from collections import defaultdict

import numpy as np

from realrl.planner.evaluate.scorer import Scorer
from realrl.planner.moves.transfers import Ints


def descend(scorer: Scorer, choice: Ints, *, part: float = 1.0) -> Ints:
    """A plan that no such change improves, from `choice` [calls]; a worse one when `part` of the time is over."""
    moves = [*_call_moves(scorer), *_role_moves(scorer)]
    score, unchanged = np.inf, 0
    while unchanged < len(moves):
        for calls, options in moves:
            if scorer.late(part):
                return choice
            plans = np.repeat(choice[:, None], options.shape[1] + 1, axis=1)
            plans[calls, 1:] = options
            scores = scorer(plans)
            best = int(scores.argmin())
            unchanged += 1
            if scores[best] < min(score, scores[0]):
                choice, unchanged = plans[:, best], 0
            score = min(score, float(scores[best]))
            if unchanged >= len(moves):
                break
    return choice


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
            columns = tables.options(c)
            for i in np.argsort(-columns.seconds, kind="stable").tolist():
                fastest[int(columns.code[i])][c] = i
        shared = [[found[c] for c in calls] for found in fastest.values() if len(found) == len(calls)]
        if len(calls) > 1 and shared:
            moves.append((calls, np.array(shared).T))
    return moves
