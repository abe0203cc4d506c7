"""Local search: improve a plan by changes of one call or one role."""

from functools import reduce

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
                candidates = _find_promising(scorer, bound, assignment, calls, candidates, limit, memory=fits)
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
    memory: bool,
) -> Ints:
    """Find the changes of a plan, [calls, moves], that may take less than `limit` seconds, and fit with `memory`.

    Changes to all candidates of a layout are bounded before those to its kinds, and these before single ones.
    """
    own = np.array([groups.alone[i] for groups, i in zip(bound.groups, assignment, strict=True)])
    of = [bound.groups[call] for call in calls]
    alone = np.array([groups.alone[row] for groups, row in zip(of, candidates, strict=True)])
    levels = [np.array([groups.row[row] for groups, row in zip(of, alone, strict=True)]), alone]
    if len(calls) == 1:
        levels.insert(1, np.flatnonzero(of[0].level == KIND)[of[0].kind[alone]])
    hopeful = np.arange(candidates.shape[1])
    for groups in levels:
        which, inverse = _unique_columns(groups[:, hopeful])
        nodes = np.repeat(own[:, None], which.shape[1], axis=1)
        nodes[calls] = which
        scorer.bounded += nodes.shape[1]
        hopeful = hopeful[(bound(nodes, memory=memory) < limit)[inverse]]
        if not len(hopeful):
            break
    return candidates[:, hopeful]


def _unique_columns(table: Ints) -> tuple[Ints, Ints]:
    """Different columns of a table, and which of them each column is."""
    key = table[0]
    for row in table[1:]:
        key = key * (int(row.max(initial=0)) + 1) + row
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return table[:, first], inverse


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
        if len(calls) == 1:
            continue
        fastest = [_find_fastest(tables, c) for c in calls]
        shared = reduce(np.intersect1d, (codes for codes, _ in fastest))
        if len(shared):
            moves.append(
                (calls, np.array([found[np.searchsorted(codes, shared)] for codes, found in fastest]))
            )
    return moves


def _find_fastest(tables: Tables, call: int) -> tuple[Ints, Ints]:
    """Codes of a call's layouts, in order, and the fastest candidate of each."""
    columns = tables.candidates(call)
    order = np.lexsort((-columns.seconds, columns.code))
    last = np.flatnonzero(np.diff(columns.code[order], append=-1))
    return columns.code[order[last]], order[last]
