"""Removal of candidates that no best plan needs."""

import numpy as np

from realrl.planner.moves.transfers import Layouts
from realrl.planner.search.shortage import DoesNotFit, explain_call_shortage
from realrl.planner.space.costs import CandidateCosts
from realrl.planner.space.problem import Problem
from realrl.program.arrays import Bools, Ints


def prune_candidates(problem: Problem) -> tuple[Problem, dict[str, Ints]]:
    """Remove dominated candidates; also returns the original indices of the remaining ones, by call.

    A candidate is removed if it alone does not fit into its devices, or if another one of equal layout is at
    least as good in every cost. For a role that is never reallocated, equal mesh and DP degree suffice. The
    best plan keeps its step time: in a schedule whose order depends on meshes alone, nothing ends later if
    something takes less. DoesNotFit if no candidate of a call remains.
    """
    kept: dict[str, Ints] = {}
    for call in problem.graph.calls:
        table = problem.table(call)
        needs = table.costs.bytes_alone(is_home=problem.is_home(call))
        limits = problem.limits(call)
        fits = np.flatnonzero(needs <= limits)
        if not len(fits):
            raise DoesNotFit(explain_call_shortage(problem, call, int((needs / limits).argmin())))
        follows = any(call.role in (a.role, a.source) for a in problem.graph.averages)
        stays = call.role is None or (len(problem.graph.role_calls(call.role)) == 1 and not follows)
        kept[call.name] = fits[_find_undominated(table.layouts[fits], table.costs[fits], by_mesh=stays)]
    return problem.select(kept), kept


def _find_undominated(layouts: Layouts, costs: CandidateCosts, *, by_mesh: bool) -> Ints:
    """Find the candidates that no other one dominates; of equal ones the first."""
    if by_mesh:
        # They exchange rows with the same ranks.
        key = [layouts.first, layouts.size, layouts.shares]
    else:
        # They can share parameters, and keep copies or do not.
        key = [layouts.codes, costs.sequence_parallel.astype(np.int64), costs.keeps.astype(np.int64)]
    _, group = np.unique(np.stack(key), axis=1, return_inverse=True)
    group = group.reshape(-1)
    sizes = np.bincount(group)
    members = np.argsort(group, kind="stable")
    beaten = np.zeros(len(group), dtype=bool)
    for size in np.unique(sizes):
        # Groups of equal size at once, [groups, members].
        among = members[sizes[group[members]] == size].reshape(-1, size)
        beaten[among] = _find_beaten(layouts, costs, among)
    return np.flatnonzero(~beaten)


def _find_beaten(layouts: Layouts, costs: CandidateCosts, among: Ints) -> Bools:
    """Find the candidates that another one of their group dominates. `among`: [groups, members], their indices."""
    better = np.ones((*among.shape, among.shape[1]), dtype=bool)  # [groups, better, other]
    for column in (
        costs.seconds,
        costs.captures,
        costs.working,
        costs.weights,
        costs.host,
        costs.weights * costs.offloaded,
        costs.load,
        costs.unload,
    ):
        of = column[among]
        better &= of[:, :, None] <= of[:, None]
    # Communicators of the other one's layout may be those of another call, too, and cost nothing; its own may not.
    # Likewise frozen weights, which may be those of another role.
    code, resident = layouts.codes[among], costs.resident[among]
    own = np.where(
        code[:, :, None] == code[:, None], 0.0, (costs.communicators + costs.base)[among][:, :, None]
    )
    better &= resident[:, :, None] <= resident[:, None] - own
    equal = better & better.transpose(0, 2, 1)
    # Of equal candidates the first stays.
    earlier = np.tri(among.shape[1], k=-1, dtype=bool).T
    return ((better & ~equal) | (equal & earlier)).any(axis=1)
