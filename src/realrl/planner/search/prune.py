"""Removal of candidates that no best plan needs."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from realrl.planner.arrays.arrays import Floats, Ints
from realrl.planner.evaluate.shortage import DoesNotFit, explain_call_shortage
from realrl.planner.space.problem import Candidate, Problem


def prune_candidates(problem: Problem) -> tuple[Problem, dict[str, Ints]]:
    """Remove dominated candidates; also returns the original indices of the remaining ones, by call.

    A candidate is removed if it alone does not fit into its devices, or if another one of equal layout is at
    least as good in every cost. For a role that is never reallocated, equal mesh and DP degree suffice. The
    best plan keeps its step time: in a schedule whose order depends on meshes alone, nothing ends later if
    something takes less. DoesNotFit if no candidate of a call remains.
    """
    kept: dict[str, Ints] = {}
    for call in problem.graph.calls:
        candidates = problem.candidates[call.name]
        is_home = problem.is_home(call)
        needs = np.array([candidate.bytes_alone(is_home=is_home) for candidate in candidates])
        limits = np.array([problem.limit(candidate.placement) for candidate in candidates])
        fits = np.flatnonzero(needs <= limits)
        if not len(fits):
            raise DoesNotFit(explain_call_shortage(problem, call, int((needs / limits).argmin())))
        follows = any(call.role in (a.role, a.source) for a in problem.graph.averages)
        stays = call.role is None or (len(problem.graph.role_calls(call.role)) == 1 and not follows)
        kept[call.name] = fits[_undominated([candidates[i] for i in fits], by_mesh=stays)]
    kept_candidates = {name: tuple(problem.candidates[name][i] for i in kept[name]) for name in kept}
    return replace(problem, candidates=kept_candidates), kept


def _undominated(candidates: Sequence[Candidate], *, by_mesh: bool) -> Ints:
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, candidate in enumerate(candidates):
        groups[_rows(candidate) if by_mesh else _layout(candidate)].append(i)
    stay = []
    for members in groups.values():
        costs = np.array([_costs(candidates[i]) for i in members])
        better = (costs[:, None] <= costs[None] + _shared(candidates, members)).all(axis=2)
        equal = better & better.T
        # Of equal candidates the first stays.
        beaten = (better & ~equal) | (equal & np.tri(len(members), k=-1, dtype=bool).T)
        stay += [i for i, lost in zip(members, np.any(beaten, axis=0).tolist(), strict=True) if not lost]
    return np.array(sorted(stay))


def _shared(candidates: Sequence[Candidate], members: Sequence[int]) -> Floats:
    """Resident bytes that a candidate must take less than another, [better, other, costs].

    Communicators of the other one's layout may be those of another call, too, and cost nothing; its own may not.
    Likewise frozen weights, which may be those of another role.
    """
    codes = np.array([hash(candidates[i].layout) for i in members])
    own = np.array([candidates[i].communicator_bytes + candidates[i].base_bytes for i in members])
    extra = np.zeros((len(members), len(members), len(_costs(candidates[members[0]]))))
    extra[:, :, _RESIDENT] = -np.where(codes[:, None] == codes, 0.0, own[:, None])
    return extra


def _rows(candidate: Candidate) -> tuple[object, ...]:
    """Key of candidates that exchange rows with the same ranks: equal mesh and DP degree."""
    return *candidate.layout[:2], candidate.placement.strategy.dp


def _layout(candidate: Candidate) -> tuple[object, ...]:
    """Key of candidates that can share parameters, and keep copies or do not."""
    return *candidate.layout, candidate.placement.strategy.sequence_parallel, candidate.keep


_RESIDENT = 1
"""Place of resident bytes among costs."""


def _costs(candidate: Candidate) -> tuple[float, ...]:
    loaded = candidate.weights_bytes * candidate.offload
    moves = candidate.load_seconds * candidate.offload, candidate.unload_seconds * candidate.offload
    return (
        candidate.seconds,
        candidate.resident_bytes,
        candidate.working_bytes,
        candidate.weights_bytes,
        candidate.host_bytes,
        loaded,
        *moves,
    )
