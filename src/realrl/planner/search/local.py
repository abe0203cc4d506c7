"""Local search: improve a plan by changes of one call or one role."""

from collections.abc import Sequence
from functools import reduce

import numpy as np

from realrl.planner.search.bound import Bound
from realrl.planner.search.groups import ALONE, KIND, LAYOUT
from realrl.planner.search.scorer import Scorer
from realrl.planner.search.tables import Tables
from realrl.program.arrays import Floats, Ints

Move = tuple[list[int], Ints]
"""Some calls, and the candidates that they may get instead of their current candidates, [calls, changes]."""


def improve_locally(scorer: Scorer, bound: Bound, assignment: Ints, *, share: float = 1.0) -> Ints:
    """Improve `assignment`, [calls], until no change of one call or one role improves it.

    Each round scores all single changes, and then combinations of the best changes of several calls and roles.
    Changes are not scored if their lower bound rules out an improvement. If the plan does not fit, their bound is
    compared with the best plan that fits. Once a `share` of the effort is spent, the search stops with its current
    plan.
    """
    moves = list_moves(scorer.timeline.tables)
    score = float(scorer(assignment[:, None])[0])
    fits = bool(scorer.fits[0])
    while not scorer.exhausted(share):
        hopeful = [candidates for _, candidates in moves]
        if fits or scorer.best is not None:
            limit = score if fits else scorer.best_seconds
            hopeful = _find_promising(scorer, bound, assignment, moves, limit, memory=fits)
        plans = np.concatenate(
            [change_calls(assignment, calls, of) for (calls, _), of in zip(moves, hopeful, strict=True)],
            axis=1,
        )
        if not plans.shape[1]:
            break
        scores = scorer(plans)
        fitting = scorer.fits
        together = _combine(assignment, [calls for calls, _ in moves], hopeful, scores, score)
        if together.shape[1]:
            plans = np.concatenate([plans, together], axis=1)
            scores = np.concatenate([scores, scorer(together)])
            fitting = np.concatenate([fitting, scorer.fits])
        best = int(scores.argmin())
        if scores[best] >= score:
            break
        assignment, score, fits = plans[:, best], float(scores[best]), bool(fitting[best])
    return assignment


def change_calls(assignment: Ints, calls: list[int], candidates: Ints) -> Ints:
    """Copy a plan and change `calls` in each copy, [all calls, plans].

    `assignment`: candidate of each call, [all calls]. `candidates`: new candidates of `calls`, [calls, plans].
    """
    plans = np.repeat(assignment[:, None], candidates.shape[1], axis=1)
    plans[calls] = candidates
    return plans


def _combine(
    assignment: Ints, moves: list[list[int]], candidates: list[Ints], scores: Floats, score: float
) -> Ints:
    """Combine the best changes of several moves: the best two, the best three, and so on, [calls, plans].

    `moves`: the calls of each move. `candidates`: their new candidates, [calls, changes] by move. `scores`: the
    scores of the changes of all moves, in order. Only changes that score below `score` are combined.
    """
    ends = np.cumsum([of.shape[1] for of in candidates])
    best = []
    for m, (of, end) in enumerate(zip(candidates, ends.tolist(), strict=True)):
        own = scores[end - of.shape[1] : end]
        if len(own) and own.min() < score:
            best.append((float(own.min()), m, int(own.argmin())))
    plan = assignment.copy()
    plans = []
    for _, m, i in sorted(best):
        plan[moves[m]] = candidates[m][:, i]
        plans.append(plan.copy())
    return np.array(plans[1:], dtype=assignment.dtype).reshape(-1, len(assignment)).T


def _find_promising(
    scorer: Scorer,
    bound: Bound,
    assignment: Ints,
    moves: Sequence[Move],
    limit: float,
    *,
    memory: bool,
) -> list[Ints]:
    """Find the changes of each move that may lead to a step below `limit` seconds. With `memory`, changes that
    cannot fit are left out.

    Whole layouts are bounded first, then the remaining kinds, then the remaining single candidates.
    """
    own = np.array([groups.alone[i] for groups, i in zip(bound.groups, assignment, strict=True)])
    hopeful = [np.arange(candidates.shape[1]) for _, candidates in moves]
    for level in (LAYOUT, KIND, ALONE):
        nodes, inverses = [], []
        for (calls, candidates), left in zip(moves, hopeful, strict=True):
            of = [bound.groups[call] for call in calls]
            alone = [groups.alone[row] for groups, row in zip(of, candidates[:, left], strict=True)]
            which, inverse = _unique_columns(
                np.array([groups.containing(rows, level) for groups, rows in zip(of, alone, strict=True)])
            )
            nodes.append(change_calls(own, calls, which).astype(np.int32))
            inverses.append(inverse)
        everything = np.concatenate(nodes, axis=1)
        scorer.bounded += everything.shape[1]
        less = bound(everything, memory=memory, goal=limit) < limit
        ends = np.cumsum([of.shape[1] for of in nodes])[:-1]
        hopeful = [
            left[of[inverse]]
            for left, of, inverse in zip(hopeful, np.split(less, ends), inverses, strict=True)
        ]
        if not any(map(len, hopeful)):
            break
    return [candidates[:, left] for (_, candidates), left in zip(moves, hopeful, strict=True)]


def _unique_columns(table: Ints) -> tuple[Ints, Ints]:
    """Return the distinct columns of a table, and the index of each column among them."""
    key = table[0]
    for row in table[1:]:
        key = key * (int(row.max(initial=0)) + 1) + row
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return table[:, first], inverse


def list_moves(tables: Tables) -> list[Move]:
    """List the changes of one call or one role."""
    return [*_call_moves(tables), *_role_moves(tables)]


def _call_moves(tables: Tables) -> list[Move]:
    return [([c], np.arange(n)[None]) for c, n in enumerate(tables.sizes)]


def _role_moves(tables: Tables) -> list[Move]:
    """List changes that give all calls of a role the same layout, each call with its fastest candidate in it."""
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
    """Return the codes of a call's layouts, in ascending order, and the index of the fastest candidate of each."""
    columns = tables.candidates(call)
    order = np.lexsort((-columns.seconds, columns.code))
    last = np.flatnonzero(np.diff(columns.code[order], append=-1))
    return columns.code[order[last]], order[last]
