"""Removal of candidates that no best plan needs."""

import numpy as np

from realrl.planner.moves.transfers import Layouts
from realrl.planner.search.shortage import DoesNotFit, explain_call_shortage
from realrl.planner.space.candidate import Costs, count_bytes_alone, find_undominated
from realrl.planner.space.problem import Problem
from realrl.program.arrays import Bools, Ints


def prune_candidates(problem: Problem) -> tuple[Problem, dict[str, Ints]]:
    """Remove dominated candidates; also returns the original indices of the remaining candidates, by call.

    A candidate is removed if it does not even fit alone into its devices, or if another candidate of equal layout
    is at least as good in every cost. For a role that is never reallocated, equal mesh and DP degree suffice. The
    best plan keeps its step time: the order of the schedule depends only on meshes, so nothing ends later if an
    activity takes less. Raises DoesNotFit if no candidate of a call remains.
    """
    kept: dict[str, Ints] = {}
    for call in problem.graph.calls:
        table = problem.table(call)
        needs = count_bytes_alone(table.costs, is_home=problem.is_home(call))
        limits = problem.limits(call)
        fits = np.flatnonzero(needs <= limits)
        if not len(fits):
            raise DoesNotFit(explain_call_shortage(problem, call, int((needs / limits).argmin())))
        follows = any(call.role in (a.role, a.source) for a in problem.graph.averages)
        stays = call.role is None or (len(problem.graph.role_calls(call.role)) == 1 and not follows)
        kept[call.name] = fits[_find_undominated(table.layouts[fits], table.costs[fits], by_mesh=stays)]
    return problem.select(kept), kept


def _find_undominated(layouts: Layouts, costs: Costs, *, by_mesh: bool) -> Ints:
    """Find the candidates that no other candidate dominates; of equal candidates, the first stays."""
    if by_mesh:
        # Candidates of a group exchange rows with the same ranks.
        key = [layouts.first, layouts.size, layouts.shares]
    else:
        # Candidates of a group can share the same replicas, and agree on keeping copies.
        key = [layouts.codes, costs.sequence_parallel.astype(np.int64), costs.keep.astype(np.int64)]
    _, group = np.unique(np.stack(key), axis=1, return_inverse=True)

    def hold_less(among: Ints) -> Bools:
        # In a plan, another call may already hold the communicators of the dominated candidate's layout, or another
        # role its frozen weights. They then cost it nothing, but the better candidate's own may cost extra in full.
        code, resident = layouts.codes[among], costs.resident_bytes[among]
        own = (costs.communicator_bytes + costs.base_bytes)[among][:, :, None]
        own = np.where(code[:, :, None] == code[:, None], 0.0, own)
        return np.asarray(resident[:, :, None] <= resident[:, None] - own)

    columns = [
        costs.seconds,
        costs.capture_seconds,
        costs.working_bytes,
        costs.weights_bytes,
        costs.host_bytes,
        costs.weights_bytes * costs.offload,
        costs.load_seconds,
        costs.unload_seconds,
    ]
    return find_undominated(group.reshape(-1), columns, hold_less)
