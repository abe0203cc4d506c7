"""Lower bound on step time for sets of plans."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from realrl.planner.arrays.arrays import Bools, Floats
from realrl.planner.evaluate.tables import Refresh, Tables
from realrl.planner.moves.transfers import TransferTable
from realrl.planner.search.groups import ALONE, Numbers, group_candidates
from realrl.planner.search.room import MemoryBound

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
        # Calls that may share the replica of another call may not need a reallocation: leave them out.
        self.moving = [c for c, h in enumerate(tables.home) if h != c and not tables.sharers[c]]
        self._cheapest_of: dict[tuple[str, int, int], Floats] = {}
        self._least = {c: self._cheapest(tables.reallocation[c], tables.home[c], c) for c in self.moving}
        # Later calls of a role may use the same copy as an earlier one, which is refreshed once.
        self.refreshes = [
            (refresh, self._cheapest(refresh.table, refresh.home, refresh.copy))
            for refresh in tables.refreshes
            if not any(p < refresh.copy for p in tables.same_role[refresh.copy] if p != refresh.home)
        ]
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

    def __call__(self, nodes: Numbers, *, memory: bool = True) -> Floats:
        """Bound nodes. `nodes`: [calls, nodes], group indices. Without `memory`, as if all plans fitted."""
        sets = self._describe(nodes)
        if not memory:
            return self._end(sets)
        sets.copies = [self._copy(c, nodes) for c in range(len(nodes))]
        room = self._memory(
            nodes,
            size=sets.size,
            common=sets.common,
            copies=sets.copies,
            seconds=sets.seconds,
            loading=sets.loading,
        )
        sets.seconds = room.seconds
        sets.loading[self._loads] = room.loading[self._loads]
        return np.where(room.full, np.inf, self._end(sets))

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
            if c in self._least:
                start, cost, load_start, source = self._reallocation(c, nodes, tail, common)
                np.maximum(ready, start + cost, out=ready)
                home = self.tables.home[c]
                moves[c] = [
                    (start, cost * np.maximum(size[c], size[home])),
                    (load_start, source * size[home]),
                ]
            earliest, after = self._receiving(c, nodes, tail)
            for triple, end in packed.items():
                for p in set(triple).difference(self._ancestors[c]):
                    end = np.where(common[c][p] > 0, end, 0.0)
                np.maximum(earliest, end, out=earliest)
            ancestors = tuple(self._ancestors[c])
            if ancestors not in works:
                works[ancestors] = self._work(ancestors, told, head, tail, area, whole, moves)
            head[c] = np.maximum(np.maximum(earliest, ready + sets.load[c] + after), works[ancestors])
            tail[c] = np.maximum(head[c] + sets.seconds[c], ready + after + sets.loading[c])
            for triple in (triple for triple in self._triples if triple[2] == c):
                crowded = size[list(triple)].sum(axis=0) > self.devices
                if crowded.any():
                    end = self._one_after_another(triple, tail, sets.seconds, apart)
                    packed[triple] = np.where(crowded, end, 0.0)
        bound = (tail + unload).max(axis=0)
        further = [(tail[c], unload[c] * size[c]) for c in self._loads]
        for refresh, least in self.refreshes:
            start, cost = self._refresh(refresh, least, nodes, tail)
            np.maximum(bound, start + cost, out=bound)
            further.append((start, cost * np.maximum(size[refresh.copy], size[refresh.home])))
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
        seconds = self._seconds(self._least[c], tables.reallocation[c], home, c, nodes)
        # A reallocation that sends nothing does not wait for the devices of the primary placement.
        start = np.maximum(start, np.where(seconds > 0, there, load_start) + load)
        return start * transient, seconds * transient, load_start * transient, load * transient

    def _refresh(
        self, refresh: Refresh, least: Floats, nodes: Numbers, tail: Floats
    ) -> tuple[Floats, Floats]:
        """Earliest start and least seconds of a refresh, or of a reallocation in its place."""
        home, copy = refresh.home, refresh.copy
        must, may = (getattr(self.groups[home], name)[nodes[home]] for name in ("must_keep", "may_keep"))
        seconds = self._seconds(least, refresh.table, home, copy, nodes)
        if not must.all():
            other: Floats | float = 0.0
            if copy in self._least:
                other = self._seconds(self._least[copy], self.tables.reallocation[copy], home, copy, nodes)
            seconds = np.where(must, seconds, np.minimum(seconds, other))
        return np.where(must, tail[refresh.after], 0.0), np.where(may, seconds, 0.0)

    def _seconds(self, least: Floats, table: TransferTable, home: int, c: int, nodes: Numbers) -> Floats:
        """Least seconds of moving parameters from a home to call `c`; `least`: by `_cheapest` for that `table`."""
        source, target = self.groups[home], self.groups[c]
        seconds = least[source.row[nodes[home]], target.row[nodes[c]]]
        both = (source.level[nodes[home]] == ALONE) & (target.level[nodes[c]] == ALONE)
        if both.any():
            mine = self.tables.candidates(c).layout[target.candidate[nodes[c, both]]]
            its = self.tables.candidates(home).layout[source.candidate[nodes[home, both]]]
            seconds[both] = table(its, mine)
        return seconds

    def _cheapest(self, table: TransferTable, home: int, c: int) -> Floats:
        """Least seconds of transfers, [groups of the home, groups of the call], down to layouts."""
        key = table.role, home, c
        if key not in self._cheapest_of:
            self._cheapest_of[key] = self._compute_cheapest(*key)
        return self._cheapest_of[key]

    def _compute_cheapest(self, role: str, home: int, c: int) -> Floats:
        source = self.groups[home]
        target = self.groups[c]
        m = len(target.layouts.first)
        transfers = self.tables.problem.transfers
        # Homes that keep copies have the layouts of those that do not.
        _, some, of = np.unique(source.layouts.codes, return_index=True, return_inverse=True)
        every = np.tile(np.arange(m), len(some))
        least = transfers.at_least(role, source.layouts[np.repeat(some, m)], target.layouts[every])
        pairs = least.reshape(-1, m)[of]
        table = np.concatenate([np.minimum.reduceat(pairs, s, axis=0) for s in source.layout_starts])
        return np.concatenate([np.minimum.reduceat(table, s, axis=1) for s in target.layout_starts], axis=1)

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

    def _copy(self, c: int, nodes: Numbers) -> Floats:
        """Bytes of the replica that a call certainly needs."""
        if c not in self._least:
            return np.zeros(nodes.shape[1])
        home = self.tables.home[c]
        source = self.groups[home]
        target = self.groups[c]
        moved = self._least[c][source.row[nodes[home]], target.row[nodes[c]]] > 0
        return np.where(moved, target.weights[nodes[c]], 0.0)
