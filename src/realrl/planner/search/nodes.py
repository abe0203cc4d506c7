"""Search for the fastest plan on several numbers of nodes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from realrl.planner.search.search import DEFAULT_EFFORT, SearchBudget, SearchResult, search_plans
from realrl.planner.search.shortage import DoesNotFit, Shortage
from realrl.planner.space.candidate import Candidate
from realrl.planner.space.problem import Assignment, Problem


@dataclass(frozen=True)
class ClusterSize:
    """Search result on the first nodes of a cluster."""

    nodes: int
    problem: Problem | None
    """Problem on these nodes, whose candidates `result.assignment` indexes; None if some call has no candidate."""
    result: SearchResult | None
    """Result of the search; None if nothing fits."""
    shortage: Shortage | None


def search_node_counts(
    problem: Problem,
    counts: Iterable[int],
    *,
    effort: float = DEFAULT_EFFORT,
    seed: int = 0,
    budget: SearchBudget | None = None,
) -> list[ClusterSize]:
    """Find the fastest plan on the first nodes of a cluster, for each number of nodes in `counts`.

    Each search starts, among others, from the previous plan, which leaves additional nodes idle. `effort`:
    that of each search.
    """
    sizes: list[ClusterSize] = []
    previous: Mapping[str, Candidate] | None = None
    for nodes in counts:
        restricted = problem.restricted(nodes)
        result = None
        shortage = None
        if restricted is not None:
            starts = _find_assignments(restricted, previous) if previous else []
            try:
                result = search_plans(restricted, effort=effort, seed=seed, starts=starts, budget=budget)
                previous = restricted.chosen_candidates(result.assignment)
            except DoesNotFit as error:
                shortage = error.shortage
        sizes.append(ClusterSize(nodes, restricted, result, shortage))
    return sizes


def _find_assignments(problem: Problem, candidates: Mapping[str, Candidate]) -> list[Assignment]:
    """The assignment of these candidates; empty if the problem lacks one of them."""
    if any(candidate not in problem.candidates[name] for name, candidate in candidates.items()):
        return []
    return [{name: problem.candidates[name].index(candidate) for name, candidate in candidates.items()}]
