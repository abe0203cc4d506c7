"""Find the fastest plan on each of several numbers of nodes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from realrl.planner.evaluate.shortage import DoesNotFit, Shortage
from realrl.planner.search.search import SearchBudget, SearchResult, search_plans
from realrl.planner.space.problem import Assignment, Candidate, Problem


@dataclass(frozen=True)
class ClusterSize:
    """What a part of a cluster is good for."""

    nodes: int
    problem: Problem | None
    """That of planning on them, whose options `result.assignment` numbers; None if some call has no option."""
    result: SearchResult | None
    """None if nothing fits."""
    shortage: Shortage | None


def search_node_counts(
    problem: Problem,
    counts: Iterable[int],
    *,
    seconds: float = 10.0,
    seed: int = 0,
    budget: SearchBudget | None = None,
) -> list[ClusterSize]:
    """The fastest plan on the first so many nodes of a cluster, for each of `counts`, in their order.

    Searches begin, among others, with the plan before, which leaves some nodes idle if there are more now.
    `seconds`: for each of `counts`.
    """
    found: list[ClusterSize] = []
    before: Mapping[str, Candidate] | None = None
    for nodes in counts:
        part = problem.restricted(nodes)
        result, shortage = None, None
        if part is not None:
            starts = _numbers(part, before) if before else []
            try:
                result = search_plans(part, seconds=seconds, seed=seed, starts=starts, budget=budget)
                before = part.chosen_candidates(result.assignment)
            except DoesNotFit as error:
                shortage = error.shortage
        found.append(ClusterSize(nodes, part, result, shortage))
    return found


def _numbers(problem: Problem, candidates: Mapping[str, Candidate]) -> list[Assignment]:
    """The choice of these options; nothing where the problem lacks one."""
    if any(candidate not in problem.candidates[name] for name, candidate in candidates.items()):
        return []
    return [{name: problem.candidates[name].index(candidate) for name, candidate in candidates.items()}]
