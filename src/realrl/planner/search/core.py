"""Core of a search problem: the candidates with which a good plan is found fast."""

import numpy as np

from realrl.planner.arrays.arrays import Ints
from realrl.planner.search.groups import KIND, SIZE, CandidateGroups
from realrl.planner.space.problem import Problem

_MOST = 8
"""Kinds of candidates per call and mesh size in the core: so many of the fastest, and as many of those that take
less memory than all faster ones."""


def select_core(problem: Problem, groups: list[CandidateGroups]) -> tuple[Problem, list[Ints]]:
    """Select the core of a problem; also returns the original indices of its candidates, by call."""
    kept = [_select_candidates(of) for of in groups]
    names = [call.name for call in problem.graph.order]
    return problem.select(dict(zip(names, kept, strict=True))), kept


def _select_candidates(groups: CandidateGroups) -> Ints:
    of_size = np.searchsorted(groups.size[groups.level == SIZE], groups.size, side="left")
    kinds = np.flatnonzero(groups.level == KIND)
    # Copies that are kept change little: later, plans of the core are improved by them.
    transient = kinds[~groups.may_keep[kinds]]
    kinds = transient if len(transient) else kinds
    chosen = np.concatenate(
        [_select_kinds(groups, kinds[of_size[kinds] == size]) for size in np.unique(of_size[kinds])]
    )
    ranges = zip(groups.child[chosen].tolist(), groups.child_end[chosen].tolist(), strict=True)
    return np.sort(np.concatenate([groups.candidate[begin:end] for begin, end in ranges]))


def _select_kinds(groups: CandidateGroups, kinds: Ints) -> Ints:
    """Select the fastest kinds, and others at equal distances from the leanest one on."""
    ordered = kinds[np.argsort(groups.seconds[kinds] + groups.load[kinds], kind="stable")]
    kept = groups.resident[ordered]
    less = [
        sizes < np.minimum.accumulate(np.append(np.inf, sizes))[:-1]
        for sizes in (kept, kept + groups.working[ordered])
    ]
    lean = np.flatnonzero(less[0] | less[1])
    lean = lean[lean >= _MOST]
    steps = min(_MOST, len(lean))
    spread = [lean[len(lean) - 1 - i * len(lean) // steps] for i in range(steps)]
    return ordered[np.array([*range(min(_MOST, len(ordered))), *spread], dtype=np.int64)]
