"""Find the plan that costs least where only the nodes that are used have to be paid."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from realrl.planner.problem import Problem
from realrl.planner.search.search import Effort, SearchResult, search
from realrl.planner.search.shortage import DoesNotFit, Shortage


@dataclass(frozen=True)
class ClusterSize:
    """What a part of a cluster is good for."""

    nodes: int
    problem: Problem | None
    """That of planning on them, whose options `result.choice` numbers; None if some call has no option."""
    result: SearchResult | None
    """None if nothing fits."""
    shortage: Shortage | None
    price: float
    """Of a step; infinite if nothing fits."""
    price_at_least: float
    """Of any plan on these nodes."""


def by_nodes(
    problem: Problem,
    counts: Iterable[int],
    *,
    node_price_per_hour: float = 0.0,
    seconds: float = 10.0,
    seed: int = 0,
    effort: Effort | None = None,
) -> list[ClusterSize]:
    """The fastest plan on the first so many nodes of a cluster of equal nodes, for each of `counts`.

    `seconds`: for each of them. The least `price` is that of the objective `cost`, and the least
    `price_at_least` bounds it.
    """
    found = []
    for nodes in counts:
        rate = nodes * node_price_per_hour / 3600
        part = problem.restricted(nodes)
        result, shortage = None, None
        if part is not None:
            try:
                result = search(part, seconds=seconds, seed=seed, effort=effort)
            except DoesNotFit as error:
                shortage = error.shortage
        price = rate * result.evaluation.seconds if result else math.inf
        least = rate * result.lower_bound if result else math.inf
        found.append(ClusterSize(nodes, part, result, shortage, price, least))
    return found
