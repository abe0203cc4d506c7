"""Lower bound on step time for sets of plans."""

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from realrl.planner.arrays.arrays import Bools, Floats, Ints
from realrl.planner.evaluate.tables import Refresh, Tables
from realrl.planner.moves.transfers import TransferTable
from realrl.planner.search.groups import ALONE, KIND, CandidateGroups, group_candidates

Numbers = NDArray[np.int32]
"""Group indices, int32 because there may be millions of nodes."""


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

    The bound is infinite for nodes under which some device must run out of memory.
    """

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.groups = [group_candidates(tables, c) for c in range(len(tables.calls))]
        self.devices = tables.problem.cluster.size
        uses = np.array([not call.is_function for call in tables.calls])
        self._compete = (uses[:, None] & uses)[:, :, None]
        """[calls, calls, 1]: whether both use devices."""
        devices = np.diff(tables.problem.cluster.bounds)
        self.capacity = float(np.dot(tables.problem.memory_bytes, devices))
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
        self._ancestors: list[list[int]] = []
        for direct in tables.feeds:
            self._ancestors.append(sorted({*direct, *(a for d in direct for a in self._ancestors[d])}))
        self._triples = list(combinations([c for c, used in enumerate(uses) if used], 3))

    def __call__(self, nodes: Numbers, *, memory: bool = True) -> Floats:
        """Bound nodes. `nodes`: [calls, nodes], group indices. Without `memory`, as if all plans fitted."""
        seconds, area, size = (self._take(name, nodes) for name in ("seconds", "area", "size"))
        meets = self._meeting(nodes, size)
        head = np.zeros(nodes.shape)
        tail = np.zeros(nodes.shape)
        moves: dict[
            int, tuple[Floats, Floats]
        ] = {}  # call -> earliest start and device-seconds of its reallocation
        copies = [self._copy(c, nodes) for c in range(len(nodes))] if memory else []
        apart = self._apart(nodes, size, copies, memory=memory)
        packed: dict[tuple[int, int, int], Floats] = {}
        for c in range(len(nodes)):
            ready = np.zeros(nodes.shape[1])
            for triple, end in packed.items():
                for p in set(triple).difference(self._ancestors[c]):
                    end = np.where(meets[c, p], end, 0.0)
                np.maximum(ready, end, out=ready)
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
            for triple in (triple for triple in self._triples if triple[2] == c):
                crowded = size[list(triple)].sum(axis=0) > self.devices
                if crowded.any():
                    end = self._one_after_another(triple, tail, seconds, apart)
                    packed[triple] = np.where(crowded, end, 0.0)
        bound = tail.max(axis=0)
        refreshes = []
        for refresh, least in self.refreshes:
            start, cost = self._refresh(refresh, least, nodes, tail)
            np.maximum(bound, start + cost, out=bound)
            refreshes.append((start, cost * np.maximum(size[refresh.copy], size[refresh.home])))
        np.maximum(bound, self._work(range(len(nodes)), head, area, moves, refreshes), out=bound)
        for end in packed.values():
            np.maximum(bound, end, out=bound)
        return np.where(self._too_full(nodes, size, copies), np.inf, bound) if memory else bound

    def _received(self, c: int, nodes: Numbers, ready: Floats, tail: Floats) -> Floats:
        """Earliest time at which call `c` has received all inputs, one after the other, once devices are
        `ready`."""
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
        return np.maximum(earliest, ready + after)

    def _take(self, name: str, nodes: Numbers) -> Floats:
        return np.array([getattr(g, name)[row] for g, row in zip(self.groups, nodes, strict=True)])

    def _meeting(self, nodes: Numbers, size: Floats) -> Bools:
        """Whether meshes certainly overlap, [calls, calls, nodes]."""
        first = self._take("first", nodes)
        known = first >= 0
        end = first + size
        apart = (first[:, None] >= end) | (first >= end[:, None])
        certain = known[:, None] & known & ~apart
        return (certain | (size[:, None] + size > self.devices)) & self._compete

    def _apart(
        self, nodes: Numbers, size: Floats, copies: "Sequence[Floats | float]", *, memory: bool
    ) -> dict[tuple[int, int], Bools]:
        """Whether the meshes of two calls cannot overlap: a device would have too little memory for both."""
        first = self._take("first", nodes)
        end = first + size
        own, working, limit = (self._take(name, nodes) for name in ("own", "working", "limit"))
        found = {}
        for a, b in combinations(range(len(nodes)), 2):
            known = (first[a] >= 0) & (first[b] >= 0)
            apart = known & ((first[a] >= end[b]) | (first[b] >= end[a]))
            if memory:
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

    def _reallocation(self, c: int, nodes: Numbers, tail: Floats, meets: Bools) -> tuple[Floats, Floats]:
        """Earliest start and least seconds of the reallocation before call `c`; none where a copy may be kept."""
        tables = self.tables
        home = self.tables.home[c]
        start = np.zeros(nodes.shape[1])
        there = np.zeros(nodes.shape[1])
        for p in range(c):
            if tables.knows_lengths[c, p]:
                np.maximum(start, tail[p], out=start)
            np.maximum(start, np.where(meets[p, c], tail[p], 0.0), out=start)
            if tables.ordered[c, p]:
                np.maximum(there, np.where(meets[p, home], tail[p], 0.0), out=there)
        seconds = self._seconds(self._least[c], tables.reallocation[c], home, c, nodes)
        # A reallocation that sends nothing does not wait for the devices of the primary placement.
        start = np.where(seconds > 0, np.maximum(start, there), start)
        source = self.groups[home]
        transient = ~source.may_keep[nodes[home]]
        return start * transient, (seconds + source.load[nodes[home]]) * transient

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
        seconds = least[self._row(source, nodes[home]), self._row(target, nodes[c])]
        both = (source.level[nodes[home]] == ALONE) & (target.level[nodes[c]] == ALONE)
        if both.any():
            mine = self.tables.candidates(c).layout[target.candidate[nodes[c, both]]]
            its = self.tables.candidates(home).layout[source.candidate[nodes[home, both]]]
            seconds[both] = table(its, mine)
        return seconds

    @staticmethod
    def _row(groups: CandidateGroups, numbers: Numbers) -> Ints:
        """Row of groups in `_least`; single candidates are in the row of their kind."""
        before = int((groups.level < KIND).sum())
        return np.where(groups.level[numbers] == ALONE, before + groups.kind[numbers], numbers)

    def _cheapest(self, table: TransferTable, home: int, c: int) -> Floats:
        """Least seconds of transfers, [groups of the home, groups of the call], down to kinds."""
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
        from_each = (source.layouts[np.full(m, i)] for i in some)
        pairs = np.array([transfers.at_least(role, one, target.layouts) for one in from_each])[of]
        rows = [np.minimum.reduceat(pairs, s, axis=0) for s in source.layout_starts]
        rows.append(pairs[source.layout_of_kind])
        table = np.concatenate(rows)
        columns = [np.minimum.reduceat(table, s, axis=1) for s in target.layout_starts]
        columns.append(table[:, target.layout_of_kind])
        return np.concatenate(columns, axis=1)

    def _work(
        self,
        calls: "range | list[int]",
        head: Floats,
        area: Floats,
        moves: dict[int, tuple[Floats, Floats]],
        others: Sequence[tuple[Floats, Floats]] = (),
    ) -> Floats:
        """Earliest end of `calls` by their work: those that start after some moment use the devices only from
        then on. `others`: starts and device-seconds of what else is done."""
        if not calls:
            return np.zeros(head.shape[1])
        reallocations = [*(moves[c] for c in calls if c in moves), *others]
        starts = np.array([head[c] for c in calls] + [start for start, _ in reallocations])
        work = np.array([area[c] for c in calls] + [cost for _, cost in reallocations])
        later = starts[None] >= starts[:, None]
        return (starts + np.where(later, work, 0.0).sum(axis=1) / self.devices).max(axis=0)

    def _too_full(self, nodes: Numbers, size: Floats, copies: "Sequence[Floats | float]") -> Bools:
        """Whether resident bytes exceed total memory, or those on the devices of some call exceed what it
        leaves."""
        working, limit = (self._take(name, nodes) for name in ("working", "limit"))
        held = self._take("own", nodes), self._take("base", nodes)
        full = self._least_resident(*held, size) > self.capacity
        for c in range(len(nodes)):
            there = np.maximum(size + size[c] - self.devices, 0)
            left = size[c] * (limit[c] - working[c] - copies[c])
            full |= self._least_resident(*held, there) > left
        return full

    def _least_resident(self, own: Floats, base: Floats, devices: Floats) -> Floats:
        """Least resident bytes on so many devices of each home, [calls, nodes]; what may be shared counts once."""
        shared = self.tables.sharing_homes
        alone = set(self.tables.home).difference(*shared)
        found = sum((own[h] * devices[h] for h in set(self.tables.home)), np.zeros(own.shape[1]))
        found += sum((base[h] * devices[h] for h in alone), np.zeros(own.shape[1]))
        for homes in shared:
            found += np.max([base[h] * devices[h] for h in homes], axis=0)
        return found

    def _copy(self, c: int, nodes: Numbers) -> "Floats | float":
        """Bytes of the transient replica that a call certainly needs."""
        if c not in self._least:
            return 0.0
        home = self.tables.home[c]
        source = self.groups[home]
        target = self.groups[c]
        moved = self._least[c][self._row(source, nodes[home]), self._row(target, nodes[c])] > 0
        return np.where(moved, target.weights[nodes[c]], 0.0)
