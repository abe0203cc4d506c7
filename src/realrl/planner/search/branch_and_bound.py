"""Branch and bound over sets of plans, which proves how far a plan may be from the best one."""

import heapq
from dataclasses import dataclass, field

import numpy as np

from realrl.planner.search.bound import Bound, Numbers
from realrl.planner.search.groups import ALONE, KIND, LAYOUT, SIZE, SIZES, TENSOR
from realrl.planner.search.local import improve_locally
from realrl.planner.search.scorer import Scorer
from realrl.program.arrays import Floats

_PARENTS, _CHILDREN = 8192, 1 << 15
"""Number of nodes branched at once, and number bounded at once. They amortise numpy calls, and still fit the
caches."""
_FIRST_HEURISTIC, _SAMPLES = 2000, 512
"""Number of bounded nodes after which the primal heuristic first runs, and number of plans that it samples."""
_SOON, _LATER = 1.5, 2.5
"""The heuristic runs again when the number of nodes has grown by this factor. The first factor applies after a
success, and the second one after a failure."""
_LONG = 0.3
"""A call is long if its least seconds exceed this fraction of the least seconds of the longest call."""
_EXACT = 1e-12
"""Relative rounding error of bounds. A proof subtracts it."""


@dataclass(order=True)
class _Pool:
    """Nodes of equal depth, sorted by their bounds. The pool with the lowest bound comes first in the heap."""

    bound: float
    """Bound of the first node."""
    number: int
    """Order of insertion, which decides between pools of equal bounds."""
    depth: int = field(compare=False)
    nodes: Numbers = field(compare=False)
    """Group of each call, [calls, nodes]."""
    bounds: Floats = field(compare=False)


@dataclass(frozen=True)
class Proof:
    """Result of branch and bound."""

    lower_bound: float
    """Lower bound on the step seconds of every plan that fits. Infinite if no plan fits."""
    nodes: int
    """Number of nodes that were bounded."""


class BranchAndBound:
    """Best-first search for a plan within a tolerance (relative) of the lower bound of all plans.

    A node is a set of plans: a group of candidates (`CandidateGroups`) for each call. Branching replaces the group
    of one call by its children. The longest calls come first, in this order:
    - every long call by size and by layout;
    - the short calls by size, because sizes tell which calls can run side by side;
    - the long calls by kind; then the short calls by layout and by kind;
    - all calls into single candidates. A node of single candidates is a plan.

    Short calls are sorted by their seconds with reallocation. Sizes are branched by powers of two first, and
    layouts by TP degree first, because usually few of these groups are worth branching further. From time to time,
    a primal heuristic improves a plan of a promising node. A better plan lets more nodes be pruned.
    """

    def __init__(self, scorer: Scorer, bound: Bound, *, tolerance: float, seed: int = 0) -> None:
        self.scorer = scorer
        self.tolerance = tolerance
        self.rng = np.random.default_rng(seed)
        self.bound = bound
        self.next_heuristic = float(_FIRST_HEURISTIC)
        groups = self.bound.groups
        longest = sorted(range(len(groups)), key=lambda c: -groups[c].seconds[0])
        most = groups[longest[0]].seconds[0]
        long = [c for c in longest if groups[c].seconds[0] > _LONG * most]
        short = sorted(
            longest[len(long) :], key=lambda c: -(groups[c].seconds[0] + bound.moves.median_seconds(c))
        )
        self.steps = [(c, level) for c in long for level in (SIZES, SIZE, TENSOR, LAYOUT)]
        self.steps += [(c, level) for c in short for level in (SIZES, SIZE)]
        self.steps += [(c, KIND) for c in long]
        self.steps += [(c, level) for c in short for level in (TENSOR, LAYOUT)] + [(c, KIND) for c in short]
        self.steps += [(c, ALONE) for c in longest]
        root = np.zeros((len(groups), 1), dtype=np.int32)
        self.pools: list[_Pool] = []
        self.closed = np.inf
        """Lowest bound of pruned nodes."""
        self.looked_at = 0
        self._pushed = 0
        self._add(0, root)

    @property
    def goal(self) -> float:
        """Nodes whose bound reaches this number of seconds are pruned."""
        return self.scorer.best_seconds * (1 - self.tolerance)

    def run(self, max_nodes: int, share: float = 1.0) -> Proof:
        """Search until the tolerance is reached, `max_nodes` nodes are bounded, or a `share` of the effort is
        spent.

        The next call of `run` continues where this one stopped. The nodes of all calls count towards `max_nodes`.
        """
        while self.pools and self.looked_at < max_nodes and not self.scorer.exhausted(share):
            if self.looked_at >= self.next_heuristic:
                before = self.scorer.best_seconds
                self._run_primal_heuristic(share)
                better = self.scorer.best_seconds < before
                self.next_heuristic = self.looked_at * (_SOON if better else _LATER)
            pool = heapq.heappop(self.pools)
            if pool.bound >= self.goal:
                heapq.heappush(self.pools, pool)
                break
            self._branch(pool)
        lowest = min((pool.bound for pool in self.pools), default=np.inf)
        bound = min(lowest, self.closed, self.scorer.best_seconds)
        return Proof(bound * (1 - _EXACT), self.looked_at)

    def _branch(self, pool: _Pool) -> None:
        """Branch the best nodes of a pool, and push the others again."""
        call, _ = self.steps[pool.depth]
        groups = self.bound.groups[call]
        taken = pool.nodes[:, :_PARENTS]
        self._push(pool.depth, pool.nodes[:, _PARENTS:], pool.bounds[_PARENTS:])
        first = groups.child[taken[call]]
        end = groups.child_end[taken[call]]
        parent = np.repeat(np.arange(taken.shape[1]), end - first)
        before = np.cumsum(end - first) - (end - first)
        child = np.arange(len(parent)) + (first - before)[parent]
        for start in range(0, len(parent), _CHILDREN):
            batch = slice(start, start + _CHILDREN)
            nodes = taken[:, parent[batch]]
            nodes[call] = child[batch]
            self._add(pool.depth + 1, nodes)

    def _run_primal_heuristic(self, share: float) -> None:
        """Sample plans from the node with the lowest bound among the deepest nodes, and improve the best of
        them."""
        deepest = max(pool.depth for pool in self.pools)
        node = min(pool for pool in self.pools if pool.depth == deepest).nodes[:, 0]
        candidates = []
        for groups, number in zip(self.bound.groups, node.tolist(), strict=True):
            low = number
            high = number + 1
            while groups.level[low] < ALONE:
                low = int(groups.child[low])
                high = int(groups.child_end[high - 1])
            candidates.append(groups.candidate[self.rng.integers(low, high, _SAMPLES)])
        plans = np.array(candidates)
        improve_locally(self.scorer, self.bound, plans[:, int(self.scorer(plans).argmin())], share=share)

    def _add(self, depth: int, nodes: Numbers) -> None:
        """Bound and prune nodes, [calls, nodes]. Score them if they are plans."""
        self.looked_at += nodes.shape[1]
        self.scorer.bounded += nodes.shape[1]
        bounds = self.bound(nodes, goal=self.goal)
        if depth == len(self.steps):
            fitting = nodes[:, bounds < self.scorer.best_seconds]
            if fitting.shape[1]:
                candidates = [g.candidate[row] for g, row in zip(self.bound.groups, fitting, strict=True)]
                self.scorer(np.array(candidates))
            return
        worth = bounds < self.goal
        pruned = bounds[~worth & np.isfinite(bounds)]
        self.closed = min(self.closed, pruned.min(initial=np.inf))
        order = np.argsort(bounds[worth], kind="stable")
        self._push(depth, nodes[:, worth][:, order], bounds[worth][order])

    def _push(self, depth: int, nodes: Numbers, bounds: Floats) -> None:
        if len(bounds):
            self._pushed += 1
            heapq.heappush(self.pools, _Pool(float(bounds[0]), self._pushed, depth, nodes, bounds))
