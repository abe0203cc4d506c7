"""Local search: improve a plan by changes of one call or one role."""

from collections import defaultdict

import numpy as np

from realrl.planner.arrays.arrays import Ints
from realrl.planner.evaluate.scorer import Scorer
from realrl.planner.evaluate.tables import Tables
from realrl.planner.search.bound import Bound
from realrl.planner.search.groups import KIND


def improve_locally(scorer: Scorer, bound: Bound, assignment: Ints, *, share: float = 1.0) -> Ints:
    """Improve `assignment`, [calls], until no change of one call or one role improves it.

    Changes whose lower bound says that they are no better are not scored; nor are those of a plan that does not fit
    which cannot be as fast as the best plan that does. Returns the best plan so far once a `share` of the effort
    is spent.
    """
    moves = list_moves(scorer.timeline.tables)
    fits = False
    score = np.inf
    unchanged = 0
    while unchanged < len(moves):
        for calls, candidates in moves:
            if scorer.exhausted(share):
                return assignment
            if fits or scorer.best is not None:
                limit = score if fits else scorer.best_seconds
                promising = _find_promising(scorer, bound, assignment, calls, candidates, limit, fits=fits)
                candidates = candidates[:, promising]
            plans = np.repeat(assignment[:, None], candidates.shape[1] + 1, axis=1)
            plans[calls, 1:] = candidates
            scores = scorer(plans)
            best = int(scores.argmin())
            unchanged += 1
            if scores[best] < min(score, scores[0]):
                assignment = plans[:, best]
                unchanged = 0
            score = min(score, float(scores[best]))
            fits = bool(scorer.fits[best])
            if unchanged >= len(moves):
                break
    return assignment


def _find_promising(
    scorer: Scorer,
    bound: Bound,
    assignment: Ints,
    calls: list[int],
    candidates: Ints,
    limit: float,
    *,
    fits: bool,
) -> Ints:
    """Find the changes of a plan, indices of `candidates`, that may take less than `limit` seconds, and fit if the
    plan `fits`."""
    own = np.array([groups.alone[i] for groups, i in zip(bound.groups, assignment, strict=True)])
    among = np.arange(candidates.shape[1])
    if len(calls) == 1:
        # First all positions of a mesh at once.
        groups = bound.groups[calls[0]]
        kinds = np.flatnonzero(groups.level == KIND)
        nodes = np.repeat(own[:, None], len(kinds), axis=1)
        nodes[calls[0]] = kinds
        scorer.bounded += len(kinds)
        hopeful = bound(nodes, memory=fits) < limit
        among = among[hopeful[groups.kind[groups.alone[candidates[0]]]]]
    nodes = np.repeat(own[:, None], len(among), axis=1)
    for call, row in zip(calls, candidates, strict=True):
        nodes[call] = bound.groups[call].alone[row[among]]
    scorer.bounded += len(among)
    return among[bound(nodes, memory=fits) < limit]


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
