"""Lower bound on step time for sets of plans."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from realrl.planner.search.groups import Numbers, group_candidates
from realrl.planner.search.least_moves import LeastMoves
from realrl.planner.search.room import MemoryBound
from realrl.planner.search.tables import Tables
from realrl.program.arrays import Bools, Floats
from realrl.program.step import Activity

_AT_ONCE = 512
"""Number of nodes whose work is added up together, so that it stays in the caches."""
_Work = tuple[Floats, Floats]
"""Earliest start of some work, and its device-seconds."""


@dataclass(kw_only=True)
class _Sets:
    """Nodes with the least costs of their calls, [calls, nodes]."""

    nodes: Numbers
    size: Floats
    common: list[list[Floats]]
    """Devices that the meshes of two calls certainly have in common, [calls][calls][nodes]."""
    seconds: Floats
    load: Floats
    """Seconds of loading parameters before the call."""
    loading: Floats
    """Seconds of the call and of loading parameters before."""
    unload: Floats
    """Seconds of offloading parameters after the call."""
    area: Floats
    """Device-seconds of the call."""
    copies: list[Floats] = field(default_factory=list)
    """Bytes of the replica that each call certainly needs; empty where memory does not count."""


class Bound:
    """Lower bounds on step time, vectorised over nodes; a node is a group of candidates for each call.

    Functions take time, but no device's.

    Three relaxations are combined in one pass through the calls in graph order:
    - critical path: a call starts once it has received the outputs of its producers, and after earlier calls whose
      meshes overlap its own; two meshes overlap for certain if they have more devices together than the cluster;
    - work: before a call starts, all its ancestors have spent their device-seconds on the devices of the cluster,
      and those that cannot start before some moment, after it (energetic reasoning, as in cumulative scheduling);
    - cheapest reallocation over all positions of the meshes of a kind, where the order exposes it; of copies that
      are kept, cheapest refresh after training, and where they may or may not be kept, the cheaper one of both;
    - packing: of three meshes that have more devices together than the cluster, two overlap, so that one of their
      calls waits for another one; not those that do not fit into the memory of one device.

    Calls take at least the seconds of candidates for which there is room beside the rest (`MemoryBound`). The bound
    is infinite for nodes under which some device must run out of memory.
    """

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.groups = [group_candidates(tables, c) for c in range(len(tables.calls))]
        self.devices = tables.problem.cluster.size
        self._models = [c for c, call in enumerate(tables.calls) if not call.is_function]
        self._memory = MemoryBound(tables, self.groups)
        self.moves = LeastMoves(tables, self.groups)
        # A wave loads parameters once for all calls of a role.
        self._loads = [
            c
            for c, h in enumerate(tables.home)
            if h == c and all(tables.ordered[c, o] or tables.ordered[o, c] for o in tables.same_role[c])
        ]
        """Calls at home that load parameters for themselves."""
        self._tellers = [c for c, told in enumerate(tables.length_receivers) if told]
        self._ancestors: list[list[int]] = []
        for direct in tables.feeds:
            self._ancestors.append(sorted({*direct, *(a for d in direct for a in self._ancestors[d])}))
        self._triples = list(combinations(self._models, 3))

    def __call__(self, nodes: Numbers, *, memory: bool = True, goal: float = np.inf) -> Floats:
        """Bound nodes. `nodes`: [calls, nodes], group indices. Without `memory`, as if all plans fitted.

        Of interest are plans that take less than `goal`: calls that would reach it one after the other are bounded
        as if they had no devices in common, but for that time.
        """
        sets = self._describe(nodes)
        if not memory:
            return self._end(sets)
        sets.copies = [self.moves.copy_bytes(c, nodes) for c in range(len(nodes))]
        apart, otherwise = self._side_by_side(sets, goal)
        room = self._memory(
            nodes,
            size=sets.size,
            common=sets.common,
            copies=sets.copies,
            seconds=sets.seconds,
            loading=sets.loading,
            apart=apart,
        )
        sets.seconds = room.seconds
        sets.loading[self._loads] = room.loading[self._loads]
        return np.minimum(np.where(room.full, np.inf, self._end(sets)), otherwise)

    def _side_by_side(self, sets: "_Sets", goal: float) -> tuple[dict[tuple[int, int], Bools], Floats]:
        """Whether two calls at home reach the `goal` one after the other, and the earliest end of such ones."""
        least = np.full(sets.nodes.shape[1], np.inf)
        if np.isinf(goal):
            return {}, least
        ready = np.zeros(sets.nodes.shape)
        for c, before in enumerate(self.tables.feeds):
            for p in before:
                np.maximum(ready[c], ready[p] + sets.seconds[p], out=ready[c])
        found = {}
        for a, b in combinations([c for c in self._models if self.tables.home[c] == c], 2):
            end = ready[a] + sets.seconds[a] + sets.seconds[b]
            found[a, b] = end >= goal
            np.minimum(least, np.where(found[a, b], end, np.inf), out=least)
        return found, least

    def _describe(self, nodes: Numbers) -> "_Sets":
        """Describe nodes as if all plans fitted."""
        seconds, area, size = (self._take(name, nodes) for name in ("seconds", "area", "size"))
        load, unload = np.zeros(nodes.shape), np.zeros(nodes.shape)
        for c in self._loads:
            load[c] = self.groups[c].load[nodes[c]]
            unload[c] = self.groups[c].unload[nodes[c]]
        return _Sets(
            nodes=nodes,
            size=size,
            common=self._common(nodes, size),
            seconds=seconds,
            load=load,
            loading=seconds + load,
            unload=unload,
            area=area,
        )

    def _end(self, sets: "_Sets") -> Floats:
        """Earliest end of the step."""
        nodes, size, common, unload = sets.nodes, sets.size, sets.common, sets.unload
        busy = np.zeros((len(nodes), 1))
        busy[self._models] = 1.0
        area = np.maximum(sets.area, sets.seconds * size * busy)
        whole = np.maximum(area + sets.load * size, sets.loading * size * busy)
        head = np.zeros(nodes.shape)
        tail = np.zeros(nodes.shape)
        told = np.zeros(nodes.shape)  # when all devices of a call have learnt the lengths that it needs
        moves: dict[int, list[_Work]] = {}  # by call: reallocation of its parameters, and loading them before
        works: dict[tuple[int, ...], Floats] = {}
        apart = self._apart(sets)
        packed: dict[tuple[int, int, int], Floats] = {}
        for c in range(len(nodes)):
            told[c] = self._told(c, c, tail)
            ready = told[c].copy()
            for p in range(c):
                np.maximum(ready, np.where(common[c][p] > 0, tail[p] + unload[p], 0.0), out=ready)
            earliest, after = self._receiving(c, nodes, tail)
            if c in self.moves.moving:
                start, cost, load_start, source = self._reallocation(c, nodes, tail, common)
                np.maximum(ready, start + cost, out=ready)
                home = self.tables.home[c]
                seconds, work = self.moves.seconds_with_call(c, nodes)
                tail[c] = start + seconds + after
                moves[c] = [
                    (start, np.maximum(cost * np.maximum(size[c], size[home]), work - area[c])),
                    (load_start, source * size[home]),
                ]
            for triple, end in packed.items():
                for p in set(triple).difference(self._ancestors[c]):
                    end = np.where(common[c][p] > 0, end, 0.0)
                np.maximum(earliest, end, out=earliest)
            ancestors = tuple(self._ancestors[c])
            if ancestors not in works:
                works[ancestors] = self._work(ancestors, told, head, tail, area, whole, moves)
            head[c] = np.maximum(np.maximum(earliest, ready + sets.load[c] + after), works[ancestors])
            for end in (head[c] + sets.seconds[c], ready + after + sets.loading[c]):
                np.maximum(tail[c], end, out=tail[c])
            for triple in (triple for triple in self._triples if triple[2] == c):
                crowded = size[list(triple)].sum(axis=0) > self.devices
                if crowded.any():
                    end = self._one_after_another(triple, tail, sets.seconds, apart)
                    packed[triple] = np.where(crowded, end, 0.0)
        bound = (tail + unload).max(axis=0)
        further = [(tail[c], unload[c] * size[c]) for c in self._loads]
        for refresh in self.moves.refreshes:
            start, cost = self._refresh(refresh, nodes, tail)
            np.maximum(bound, start + cost, out=bound)
            further.append((start, cost * np.maximum(size[refresh.target], size[refresh.home])))
        every = tuple(range(len(nodes)))
        np.maximum(bound, self._work(every, told, head, tail, area, whole, moves, further), out=bound)
        for end in packed.values():
            np.maximum(bound, end, out=bound)
        return bound

    def _receiving(self, c: int, nodes: Numbers, tail: Floats) -> tuple[Floats, Floats]:
        """Earliest time at which call `c` has received all inputs, one after the other, and the seconds in which it
        does once its devices are free."""
        exchange = self.tables.problem.exchange
        calls = self.tables.calls
        target = self.groups[c]
        after = np.zeros(nodes.shape[1])
        earliest = np.zeros(nodes.shape[1])
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
        return earliest, after

    def _take(self, name: str, nodes: Numbers) -> Floats:
        return np.array([getattr(g, name)[row] for g, row in zip(self.groups, nodes, strict=True)])

    def _common(self, nodes: Numbers, size: Floats) -> list[list[Floats]]:
        """Devices that the meshes of two calls certainly have in common, [calls][calls][nodes]."""
        first = self._take("first", nodes)
        nothing = np.zeros(nodes.shape[1])
        common = [[nothing] * len(nodes) for _ in nodes]
        for a in self._models:
            common[a][a] = size[a]
            for b in range(a + 1, len(nodes)):
                if b in self._models:
                    least = np.maximum(size[a] + size[b] - self.devices, 0)
                    known = (first[a] >= 0) & (first[b] >= 0)
                    if known.any():
                        end = np.minimum(first[a] + size[a], first[b] + size[b])
                        exact = np.maximum(end - np.maximum(first[a], first[b]), 0)
                        least = np.where(known, exact, least)
                    common[a][b] = common[b][a] = least
        return common

    def _apart(self, sets: "_Sets") -> dict[tuple[int, int], Bools]:
        """Whether the meshes of two calls cannot overlap: a device would have too little memory for both."""
        nodes, size, copies = sets.nodes, sets.size, sets.copies
        first = self._take("first", nodes)
        end = first + size
        own, working, limit = (self._take(name, nodes) for name in ("own", "working", "limit"))
        found = {}
        for a, b in combinations(range(len(nodes)), 2):
            known = (first[a] >= 0) & (first[b] >= 0)
            apart = known & ((first[a] >= end[b]) | (first[b] >= end[a]))
            if copies:
                held = sum(own[c] for c in (a, b) if self.tables.home[c] == c)
                most = np.maximum(working[a] + copies[a], working[b] + copies[b])
                apart |= held + most > np.maximum(limit[a], limit[b])
            found[a, b] = apart
        return found

    @staticmethod
    def _one_after_another(
        triple: tuple[int, int, int],
        tail: Floats,
        seconds: Floats,
        apart: Mapping[tuple[int, int], Bools],
    ) -> Floats:
        """Earliest end of three calls of which two overlap; infinite if no two can."""
        ends = [
            np.where(apart[p, c], np.inf, np.maximum(tail[p] + seconds[c], tail[c]))
            for p, c in combinations(triple, 2)
        ]
        return np.asarray(np.minimum.reduce(ends))

    def _told(self, c: int, there: int, tail: Floats) -> Floats:
        """Earliest start of what the devices of call `there` do for call `c`: they learn lengths before."""
        told = np.zeros(tail.shape[1])
        for p in range(c):
            if self.tables.knows_lengths[there, p] and self.tables.ordered[c, p]:
                np.maximum(told, tail[p], out=told)
        return told

    def _reallocation(
        self, c: int, nodes: Numbers, tail: Floats, common: list[list[Floats]]
    ) -> tuple[Floats, Floats, Floats, Floats]:
        """Earliest start and least seconds of the reallocation before call `c`, and of loading the parameters
        before that; none where a copy may be kept."""
        tables = self.tables
        home = self.tables.home[c]
        source = self.groups[home]
        transient = ~source.may_keep[nodes[home]]
        load = source.load[nodes[home]]
        load_start = self._told(c, home, tail)
        start = self._told(c, c, tail)
        there = load_start.copy()
        for p in range(c):
            np.maximum(start, np.where(common[p][c] > 0, tail[p], 0.0), out=start)
            if tables.ordered[c, p]:
                np.maximum(there, np.where(common[p][home] > 0, tail[p], 0.0), out=there)
        seconds = self.moves.seconds(tables.reallocation[c], c, nodes)
        # A reallocation that sends nothing does not wait for the devices of the primary placement.
        start = np.maximum(start, np.where(seconds > 0, there, load_start) + load)
        return start * transient, seconds * transient, load_start * transient, load * transient

    def _refresh(self, refresh: Activity, nodes: Numbers, tail: Floats) -> tuple[Floats, Floats]:
        """Earliest start and least seconds of a refresh, or of a reallocation in its place."""
        home, copy = refresh.home, refresh.target
        must, may = (getattr(self.groups[home], name)[nodes[home]] for name in ("must_keep", "may_keep"))
        seconds = self.moves.seconds(self.tables.transfers(refresh), copy, nodes)
        if not must.all():
            other: Floats | float = 0.0
            if copy in self.moves.moving:
                other = self.moves.seconds(self.tables.reallocation[copy], copy, nodes)
            seconds = np.where(must, seconds, np.minimum(seconds, other))
        return np.where(must, tail[refresh.call], 0.0), np.where(may, seconds, 0.0)

    def _work(
        self,
        calls: tuple[int, ...],
        told: Floats,
        head: Floats,
        tail: Floats,
        area: Floats,
        whole: Floats,
        moves: Mapping[int, list[_Work]],
        others: Sequence[_Work] = (),
    ) -> Floats:
        """Earliest end of `calls` by their work: those that start after some moment use the devices only from
        then on. `whole`: work with loading parameters, which begins once lengths are `told`; `others`: what else is
        done."""
        if not calls:
            return np.zeros(head.shape[1])
        every = list(calls)
        moved = [move for c in calls for move in moves.get(c, ())]
        further = [*moved, *others]
        further_starts = [start for start, _ in further]
        ends = [tail[p] for p in self._tellers if p in calls]
        moments = np.stack([np.zeros(head.shape[1]), *ends, *head[every], *further_starts])
        starts = np.stack([*told[every], *head[every], *further_starts])
        costs = np.stack([*(whole - area)[every], *area[every], *(cost for _, cost in further)])
        costs /= self.devices
        found = np.empty(head.shape[1])
        for i in range(0, len(found), _AT_ONCE):
            part = slice(i, i + _AT_ONCE)
            later = starts[:, part] >= moments[:, None, part]
            found[part] = (moments[:, part] + np.where(later, costs[:, part], 0.0).sum(axis=1)).max(axis=0)
        return found
