"""Find the fastest plan on each of several numbers of nodes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from realrl.planner.evaluate.shortage import DoesNotFit, Shortage
from realrl.planner.search.search import Effort, SearchResult, search
from realrl.planner.space.problem import Choice, Option, Problem


@dataclass(frozen=True)
class ClusterSize:
    """What a part of a cluster is good for."""

    nodes: int
    problem: Problem | None
    """That of planning on them, whose options `result.choice` numbers; None if some call has no option."""
    result: SearchResult | None
    """None if nothing fits."""
    shortage: Shortage | None


def by_nodes(
    problem: Problem,
    counts: Iterable[int],
    *,
    seconds: float = 10.0,
    seed: int = 0,
    effort: Effort | None = None,
) -> list[ClusterSize]:
    """The fastest plan on the first so many nodes of a cluster, for each of `counts`, in their order.

    Searches begin, among others, with the plan before, which leaves some nodes idle if there are more now.
    `seconds`: for each of `counts`.
    """
    found: list[ClusterSize] = []
    before: Mapping[str, Option] | None = None
    for nodes in counts:
        part = problem.restricted(nodes)
        result, shortage = None, None
        if part is not None:
            starts = _numbers(part, before) if before else []
            try:
                result = search(part, seconds=seconds, seed=seed, starts=starts, effort=effort)
                before = part.chosen(result.choice)
            except DoesNotFit as error:
                shortage = error.shortage
        found.append(ClusterSize(nodes, part, result, shortage))
    return found


def _numbers(problem: Problem, options: Mapping[str, Option]) -> list[Choice]:
    """The choice of these options; nothing where the problem lacks one."""
    if any(option not in problem.options[name] for name, option in options.items()):
        return []
    return [{name: problem.options[name].index(option) for name, option in options.items()}]
