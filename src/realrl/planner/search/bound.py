"""Seconds that a step takes at the least when each call runs with one of a group of options."""

import numpy as np
from numpy.typing import NDArray

from realrl.planner.evaluate.tables import Bools, Tables
from realrl.planner.moves.transfers import Floats, Ints
from realrl.planner.search.groups import ALONE, KIND, CandidateGroups, group_candidates

Numbers = NDArray[np.int32]
"""Of groups; there may be millions of nodes."""


class Bound:
    """Lower bounds of many nodes at once. A node is a group of options for each call. Functions take time, but no
    device's.

    Three relaxations, together in one pass through the calls in their order:
    - critical path: a call starts when it has received what those it depends on put out, and after earlier ones
      that need some device of its mesh, which is certain of two that have more devices together than there are;
    - work: before a call starts, all its ancestors have done their device-seconds on the devices there are,
      and those of them that cannot start before some moment, after it (energetic reasoning, as in cumulative
      scheduling);
    - reallocation at its cheapest, wherever the meshes of a kind lie, where the order says that nothing hides it.

    Nodes of which some device must hold more than it can have an infinite bound.
    """

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.groups = [group_candidates(tables, c) for c in range(len(tables.calls))]
        self.devices = tables.problem.cluster.size
        uses = np.array([not call.is_function for call in tables.calls])
        self._compete = (uses[:, None] & uses)[:, :, None]
        """[calls, calls, 1]: whether both use devices."""
        self.capacity = sum(tables.problem.memory_bytes) * tables.problem.cluster.devices_per_node
        # Of calls that may find a copy another one has made, reallocation may cost nothing.
        self.moving = [c for c, h in enumerate(tables.home) if h != c and not tables.sharers[c]]
        self._least = {c: self._cheapest(c) for c in self.moving}
        self._ancestors: list[list[int]] = []
        for direct in tables.feeds:
            self._ancestors.append(sorted({*direct, *(a for d in direct for a in self._ancestors[d])}))

    def __call__(self, nodes: Numbers) -> Floats:
        """Bounds of nodes. nodes: [calls, nodes], numbers of groups."""
        seconds, area, size = (self._take(name, nodes) for name in ("seconds", "area", "size"))
        meets = self._meeting(nodes, size)
        head, tail = np.zeros(nodes.shape), np.zeros(nodes.shape)
        moves: dict[
            int, tuple[Floats, Floats]
        ] = {}  # call -> earliest start and device-seconds of its bringing
        for c in range(len(nodes)):
            ready = np.zeros(nodes.shape[1])
            for p in range(c):
                np.maximum(ready, np.where(meets[c, p], tail[p], 0.0), out=ready)
            if c in self._least:
                start, cost = self._reallocation(c, nodes, tail, meets)
                np.maximum(ready, start + cost, out=ready)
                home = self.tables.home[c]
                load = self.groups[home].load[nodes[home]]
                moves[c] = start, (cost - load) * np.maximum(size[c], size[home]) + load * size[home]
            ready = self._received(c, nodes, ready, tail)
            work = self._work(self._ancestors[c], head, area, moves)
            head[c] = np.maximum(ready, work)
            tail[c] = head[c] + seconds[c]
        bound = np.maximum(tail.max(axis=0), self._work(range(len(nodes)), head, area, moves))
        return np.where(self._too_full(nodes, size), np.inf, bound)

    def _received(self, c: int, nodes: Numbers, ready: Floats, tail: Floats) -> Floats:
        """When call `c` has its inputs, which it receives one after the other, if its devices are `ready`."""
        exchange, calls, target = self.tables.problem.exchange, self.tables.calls, self.groups[c]
        after, earliest = np.zeros(nodes.shape[1]), np.zeros(nodes.shape[1])
        for p in reversed(self.tables.feeds[c]):
            source = self.groups[p]
            after = after + exchange.at_least(
                calls[p].name,
                calls[c].name,
                senders=(source.rows[nodes[p]], source.most_rows[nodes[p]]),
                size=target.size[nodes[c]],
                copies=target.copies[nodes[c]],
                rows=target.most_rows[nodes[c]],
            )
            np.maximum(earliest, tail[p] + after, out=earliest)
        return np.maximum(earliest, ready + after)

    def _take(self, name: str, nodes: Numbers) -> Floats:
        return np.array([getattr(g, name)[row] for g, row in zip(self.groups, nodes, strict=True)])

    def _meeting(self, nodes: Numbers, size: Floats) -> Bools:
        """[calls, calls, nodes]: whether meshes share a device for certain."""
        first = self._take("first", nodes)
        known = first >= 0
        end = first + size
        apart = (first[:, None] >= end) | (first >= end[:, None])
        certain = known[:, None] & known & ~apart
        return (certain | (size[:, None] + size > self.devices)) & self._compete

    def _reallocation(self, c: int, nodes: Numbers, tail: Floats, meets: Bools) -> tuple[Floats, Floats]:
        """Earliest start and least seconds of bringing parameters to call `c`."""
        tables, home = self.tables, self.tables.home[c]
        start, there = np.zeros(nodes.shape[1]), np.zeros(nodes.shape[1])
        for p in range(c):
            if tables.knows_lengths[c, p]:
                np.maximum(start, tail[p], out=start)
            np.maximum(start, np.where(meets[p, c], tail[p], 0.0), out=start)
            if tables.ordered[c, p]:
                np.maximum(there, np.where(meets[p, home], tail[p], 0.0), out=there)
        source, target = self.groups[home], self.groups[c]
        seconds = self._least[c][self._row(source, nodes[home]), self._row(target, nodes[c])]
        both = (source.level[nodes[home]] == ALONE) & (target.level[nodes[c]] == ALONE)
        if both.any():
            mine = tables.candidates(c).layout[target.candidate[nodes[c, both]]]
            its = tables.candidates(home).layout[source.candidate[nodes[home, both]]]
            seconds[both] = tables.reallocation[c](its, mine)
        # Devices of the home that send nothing are not waited for.
        start = np.where(seconds > 0, np.maximum(start, there), start)
        return start, seconds + source.load[nodes[home]]

    @staticmethod
    def _row(found: CandidateGroups, numbers: Numbers) -> Ints:
        """Of groups, their row in `_least`: those of one option are in that of their kind."""
        before = int((found.level < KIND).sum())
        return np.where(found.level[numbers] == ALONE, before + found.kind[numbers], numbers)

    def _cheapest(self, c: int) -> Floats:
        """[groups of the home, groups of the call] down to kinds: least seconds of reallocation."""
        source, target = self.groups[self.tables.home[c]], self.groups[c]
        n, m = len(source.layouts.first), len(target.layouts.first)
        i, j = np.divmod(np.arange(n * m), m)
        transfers, role = self.tables.problem.transfers, self.tables.calls[c].model_role
        kinds = transfers.at_least(role, source.layouts[i], target.layouts[j]).reshape(n, m)
        rows = np.concatenate([np.minimum.reduceat(kinds, s, axis=0) for s in source.kind_starts])
        return np.concatenate([np.minimum.reduceat(rows, s, axis=1) for s in target.kind_starts], axis=1)

    def _work(
        self, calls: "range | list[int]", head: Floats, area: Floats, moves: dict[int, tuple[Floats, Floats]]
    ) -> Floats:
        """When `calls` can have ended: for any moment, those that start later have the devices only then."""
        if not calls:
            return np.zeros(head.shape[1])
        brought = [moves[c] for c in calls if c in moves]
        starts = np.array([head[c] for c in calls] + [start for start, _ in brought])
        work = np.array([area[c] for c in calls] + [cost for _, cost in brought])
        later = starts[None] >= starts[:, None]
        return (starts + np.where(later, work, 0.0).sum(axis=1) / self.devices).max(axis=0)

    def _too_full(self, nodes: Numbers, size: Floats) -> Bools:
        """Whether roles cannot all live, on average, on the devices, or on those of some call while it runs."""
        resident, working, limit = (self._take(name, nodes) for name in ("resident", "working", "limit"))
        homes = sorted(set(self.tables.home))
        full = sum(resident[h] * size[h] for h in homes) > self.capacity
        for c in range(len(nodes)):
            most = np.zeros(nodes.shape[1])
            for h in homes:
                most += resident[h] * np.maximum(size[h] + size[c] - self.devices, 0)
            full |= most > size[c] * (limit[c] - working[c] - self._copy(c, nodes))
        return full

    def _copy(self, c: int, nodes: Numbers) -> "Floats | float":
        """Bytes of the copy of its parameters that a call certainly needs."""
        if c not in self._least:
            return 0.0
        home = self.tables.home[c]
        source, target = self.groups[home], self.groups[c]
        moved = self._least[c][self._row(source, nodes[home]), self._row(target, nodes[c])] > 0
        return np.where(moved, target.weights[nodes[c]], 0.0)
