"""Prove how good a plan is: divide the plans into ever smaller sets that have a bound."""

import heapq
from dataclasses import dataclass, field

import numpy as np

from realrl.planner.evaluate.scorer import Scorer
from realrl.planner.moves.transfers import Floats
from realrl.planner.search.bound import Bound, Numbers
from realrl.planner.search.groups import ALONE, KIND, SIZE
from realrl.planner.search.local import improve_locally

_PARENTS, _CHILDREN = 512, 1 << 15
"""Nodes that are divided, and bounded, at once: enough for numpy, few enough for the caches."""
_DIVES, _SAMPLES = 20_000, 512
"""After so many nodes, and again whenever there are half as many more, plans are drawn from the most promising set:
so many, and the best is polished."""
_EXACT = 1e-12
"""Rounding, relative."""


@dataclass(order=True)
class _Pool:
    """Nodes that have been divided equally far, the one with the lowest bound first."""

    bound: float
    number: int
    depth: int = field(compare=False)
    nodes: Numbers = field(compare=False)
    """[calls, nodes]"""
    bounds: Floats = field(compare=False)


@dataclass(frozen=True)
class Proof:
    """What is known about all plans."""

    lower_bound: float
    """No plan that fits takes fewer seconds; infinite if none fits."""
    nodes: int
    """Sets of plans that had to be looked at."""


def prove(scorer: Scorer, *, tolerance: float, max_nodes: int, seed: int = 0, part: float = 1.0) -> Proof:
    """Search best first until the best plan is within `tolerance` (relative) of the bound.

    Calls are divided one after the other, the longest first: by size, then by kind, and all of them then into
    single options; a node of single options is a plan. Now and then it polishes a plan of the most promising
    set, so that more sets can be given up. Stops early after `max_nodes`, or when `part` of the time is over.
    """
    return _Search(scorer, tolerance, seed).run(max_nodes, part)


class _Search:
    def __init__(self, scorer: Scorer, tolerance: float, seed: int) -> None:
        self.scorer, self.tolerance = scorer, tolerance
        self.rng = np.random.default_rng(seed)
        self.bound = Bound(scorer.timeline.tables)
        groups = self.bound.groups
        longest = sorted(range(len(groups)), key=lambda c: -groups[c].seconds[0])
        self.steps = [(c, level) for c in longest for level in (SIZE, KIND)]
        self.steps += [(c, ALONE) for c in longest]
        root = np.zeros((len(groups), 1), dtype=np.int32)
        self.pools: list[_Pool] = []
        self.closed = np.inf
        """The lowest bound of nodes that have been given up."""
        self.looked_at = 0
        self._pushed = 0
        self._add(0, root)

    @property
    def goal(self) -> float:
        """Nodes with a bound from here on need not be divided."""
        return self.scorer.best_seconds * (1 - self.tolerance)

    def run(self, max_nodes: int, part: float) -> Proof:
        next_heuristic = _DIVES
        while self.pools and self.looked_at < max_nodes and not self.scorer.deadline_exceeded(part):
            if self.looked_at >= next_heuristic:
                self._run_primal_heuristic(part)
                next_heuristic = self.looked_at + self.looked_at // 2
            pool = heapq.heappop(self.pools)
            if pool.bound >= self.goal:
                self.pools.append(pool)
                break
            self._divide(pool)
        lowest = min((pool.bound for pool in self.pools), default=np.inf)
        bound = min(lowest, self.closed, self.scorer.best_seconds)
        return Proof(bound * (1 - _EXACT), self.looked_at)

    def _divide(self, pool: _Pool) -> None:
        """Replace the best nodes of a pool by their children."""
        call, _ = self.steps[pool.depth]
        groups = self.bound.groups[call]
        taken = pool.nodes[:, :_PARENTS]
        self._push(pool.depth, pool.nodes[:, _PARENTS:], pool.bounds[_PARENTS:])
        first, end = groups.child[taken[call]], groups.child_end[taken[call]]
        parent = np.repeat(np.arange(taken.shape[1]), end - first)
        before = np.cumsum(end - first) - (end - first)
        child = np.arange(len(parent)) + (first - before)[parent]
        for start in range(0, len(parent), _CHILDREN):
            part = slice(start, start + _CHILDREN)
            nodes = taken[:, parent[part]]
            nodes[call] = child[part]
            self._add(pool.depth + 1, nodes)

    def _run_primal_heuristic(self, part: float) -> None:
        """Look for a better plan among those of the node with the lowest bound of the most divided ones."""
        deepest = max(pool.depth for pool in self.pools)
        node = min(pool for pool in self.pools if pool.depth == deepest).nodes[:, 0]
        candidates = []
        for groups, number in zip(self.bound.groups, node.tolist(), strict=True):
            low, high = number, number + 1
            while groups.level[low] < ALONE:
                low, high = int(groups.child[low]), int(groups.child_end[high - 1])
            candidates.append(groups.candidate[self.rng.integers(low, high, _SAMPLES)])
        plans = np.array(candidates)
        improve_locally(self.scorer, plans[:, int(self.scorer(plans).argmin())], part=part)

    def _add(self, depth: int, nodes: Numbers) -> None:
        """Bound nodes and keep those that are worth it; plans are costed."""
        self.looked_at += nodes.shape[1]
        bounds = self.bound(nodes)
        if depth == len(self.steps):
            fitting = nodes[:, bounds < self.scorer.best_seconds]
            if fitting.shape[1]:
                candidates = [g.candidate[row] for g, row in zip(self.bound.groups, fitting, strict=True)]
                self.scorer(np.array(candidates))
            return
        worth = bounds < self.goal
        given_up = bounds[~worth & np.isfinite(bounds)]
        self.closed = min(self.closed, given_up.min(initial=np.inf))
        order = np.argsort(bounds[worth], kind="stable")
        self._push(depth, nodes[:, worth][:, order], bounds[worth][order])

    def _push(self, depth: int, nodes: Numbers, bounds: Floats) -> None:
        if len(bounds):
            self._pushed += 1
            heapq.heappush(self.pools, _Pool(float(bounds[0]), self._pushed, depth, nodes, bounds))
