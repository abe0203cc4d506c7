"""Host memory that offloaded state takes on nodes, vectorised over plans."""

from collections.abc import Iterable

import numpy as np

from realrl.planner.moves.transfers import Floats, Ints, find_nodes
from realrl.planner.simulate.tables import Columns
from realrl.planner.space.problem import Problem


class OffloadedState:
    """Host memory of nodes under the roles that plans offload.

    A node with most of its memory in use is found among points, which are ranks of homes: along the nodes of a
    cluster, more is in use only where a home begins, where it first has a whole node, and where nodes differ.
    """

    def __init__(self, problem: Problem, homes: Iterable[int]) -> None:
        """`homes` are the calls where roles live."""
        cluster = problem.cluster
        self._homes = sorted(set(homes))
        self._nodes = find_nodes(cluster)
        self._bounds = np.array(cluster.bounds)
        self._limits = np.maximum(1.0, problem.host_memory_bytes or np.full(cluster.nodes, np.inf))
        sizes = np.diff(self._bounds)
        differ = (self._limits[1:] != self._limits[:-1]) | (sizes[1:] != sizes[:-1])
        self._changes = (np.flatnonzero(differ) + 1).tolist()

    def points(self, columns: Columns) -> Ints:
        """Find the points of plans, ranks [points, plans]."""
        found = []
        for home in self._homes:
            begin, end = self._nodes[columns.first[home]], self._nodes[columns.end[home] - 1]
            nodes = [begin, np.minimum(begin + 1, end), *(np.clip(n, begin, end) for n in self._changes)]
            found += [np.maximum(self._bounds[node], columns.first[home]) for node in nodes]
        return np.array(found)

    def fill(self, columns: Columns, points: Ints) -> Floats:
        """Compute the fraction of host memory in use on the node of each point, [points, plans]."""
        node = self._nodes[points]
        begin, end = self._bounds[node], self._bounds[node + 1]
        used = np.zeros(points.shape)
        for home in self._homes:
            ranks = np.minimum(end, columns.end[home]) - np.maximum(begin, columns.first[home])
            used += np.maximum(ranks, 0) * columns.host[home]
        return used / self._limits[node]

    def limit(self, rank: int) -> float:
        """Return the bytes that offloaded state may take on the node of a rank."""
        return float(self._limits[self._nodes[rank]])
