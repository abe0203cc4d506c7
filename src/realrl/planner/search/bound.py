"""Lower bound on step time for sets of plans. Branch and bound (`branch_and_bound`) and local search use it. A node
is such a set: one group of candidate placements for each call. The home of a role is the call in whose placement
the parameters of the role live. Other calls of the role may use a copy (replica) in another layout, which is kept
between steps or made in each step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from realrl.planner.moves.links import TransferTable
from realrl.planner.search.groups import ALONE, LAYOUT, CandidateGroups, Numbers, group_candidates
from realrl.planner.search.tables import Tables
from realrl.program.arrays import Bools, Floats, Ints
from realrl.program.step import Activity

_AT_ONCE = 512
"""Number of nodes whose work is summed together, so that the arrays stay in the caches."""
_STEPS = 128
"""Number of memory sizes that tables of times distinguish."""
_ROUNDING = 1e-9
"""Relative rounding error of bytes."""
_Work = tuple[Floats, Floats]
"""Earliest start of some work, and its device-seconds."""


@dataclass(kw_only=True)
class _Sets:
    """Lower bounds on the costs of each node's calls. Arrays are [calls, nodes] unless stated otherwise, and times
    are in seconds."""

    nodes: Numbers
    """Group indices (`CandidateGroups`)."""
    size: Floats
    """Number of devices of the call."""
    common: list[list[Floats]]
    """Number of devices that the meshes of two calls certainly have in common, [calls][calls][nodes]."""
    seconds: Floats
    load: Floats
    """Seconds of loading parameters before the call."""
    loading: Floats
    """Seconds of loading parameters and of the call, in sequence."""
    unload: Floats
    """Seconds of offloading parameters after the call."""
    area: Floats
    """Device-seconds of the call."""
    copies: list[Floats] = field(default_factory=list)
    """Bytes of the replica that each call certainly needs, [calls][nodes]. Empty if memory is ignored."""


class LeastMoves:
    """Lower bounds on the time to move parameters from homes to other calls, vectorised over nodes."""

    def __init__(self, tables: Tables, groups: Sequence[CandidateGroups]) -> None:
        self._tables = tables
        self._groups = groups
        self._least: dict[tuple[str, int], Floats] = {}
        """(Moved parameters, receiving call) -> seconds, [groups of the home, groups of the call]."""
        # A call that can share the replica of another call may need no reallocation, so it is left out.
        self.moving = {c for c, h in enumerate(tables.home) if h != c and not tables.sharers[c]}
        """Calls that need a reallocation unless they run in the layout of their home."""
        self._with_call = {c: self._tabulate_with_call(c) for c in self.moving}
        # Later calls of a role may use the same copy as an earlier call, and this copy is refreshed only once.
        self.refreshes = [
            refresh
            for refresh in tables.refreshes
            if not any(p < refresh.target for p in tables.same_role[refresh.target] if p != refresh.home)
        ]
        """Refreshes of copies that no earlier call of the role can use."""

    def seconds(self, table: TransferTable, c: int, nodes: Numbers) -> Floats:
        """Bound the seconds of moving the parameters of `table` from their home to call `c`, [nodes]."""
        home = self._tables.home[c]
        source, target = self._groups[home], self._groups[c]
        seconds = self._cheapest(table.role, c)[source.row[nodes[home]], target.row[nodes[c]]]
        both = (source.level[nodes[home]] == ALONE) & (target.level[nodes[c]] == ALONE)
        if both.any():
            mine = self._tables.candidates(c).layout[target.candidate[nodes[c, both]]]
            its = self._tables.candidates(home).layout[source.candidate[nodes[home, both]]]
            seconds[both] = table(its, mine)
        return seconds

    def seconds_with_call(self, c: int, nodes: Numbers) -> tuple[Floats, Floats]:
        """Bound the seconds of call `c` with the reallocation before it, and the device-seconds of both, [nodes].

        The layouts in which a call is fast often differ much from the layout of its home. The least sum of the two
        times then exceeds the sum of their least values. Bounds are 0 if a copy may be kept.
        """
        home = self._tables.home[c]
        source, target = self._groups[home], self._groups[c]
        transient = ~source.may_keep[nodes[home]]
        seconds, work = (
            table[source.row[nodes[home]], target.row[nodes[c]]] * transient for table in self._with_call[c]
        )
        return seconds, work

    def median_seconds(self, c: int) -> float:
        """Compute the median of the least seconds of reallocations to call `c`, over pairs of layouts."""
        if c not in self.moving:
            return 0.0
        return float(np.median(self._between_layouts(c)))

    def copy_bytes(self, c: int, nodes: Numbers) -> Floats:
        """Bound the bytes of the replica that call `c` needs, [nodes]. They are 0 if it may need no replica."""
        if c not in self.moving:
            return np.zeros(nodes.shape[1])
        home = self._tables.home[c]
        source, target = self._groups[home], self._groups[c]
        least = self._cheapest(self._tables.reallocation[c].role, c)
        moved = least[source.row[nodes[home]], target.row[nodes[c]]] > 0
        return np.where(moved, target.weights[nodes[c]], 0.0)

    def _cheapest(self, role: str, c: int) -> Floats:
        """Tabulate the least seconds of transfers to call `c`, [groups of the home, groups of the call].

        The table has only groups down to level `LAYOUT`.
        """
        if (role, c) not in self._least:
            source, target = self._groups[self._tables.home[c]], self._groups[c]
            # Candidates of the home with and without kept copies have the same layouts, so each layout is computed
            # once.
            _, some, of = np.unique(source.layouts.codes, return_index=True, return_inverse=True)
            least = self._tables.problem.transfers.at_least(role, source.layouts[some], target.layouts)
            self._least[role, c] = self._reduce(least[of], c)
        return self._least[role, c]

    def _tabulate_with_call(self, c: int) -> tuple[Floats, Floats]:
        """Tabulate the values of `seconds_with_call`, [groups of the home, groups of the call]."""
        source, target = self._groups[self._tables.home[c]], self._groups[c]
        moved = self._between_layouts(c)
        devices = np.maximum(source.layouts.size[:, None], target.layouts.size)
        of_layouts = target.level == LAYOUT
        seconds = moved + target.seconds[of_layouts]
        work = moved * devices + target.area[of_layouts]
        return self._reduce(seconds, c), self._reduce(work, c)

    def _between_layouts(self, c: int) -> Floats:
        """Return the least seconds of reallocations to call `c`, [layouts of the home, layouts of the call]."""
        source, target = self._groups[self._tables.home[c]], self._groups[c]
        least = self._cheapest(self._tables.reallocation[c].role, c)
        return least[-len(source.layouts.first) :, -len(target.layouts.first) :]

    def _reduce(self, pairs: Floats, c: int) -> Floats:
        """Reduce values of pairs of layouts to the least value of each pair of groups, [groups of the home, groups
        of the call]."""
        for axis, call in enumerate((self._tables.home[c], c)):
            starts = self._groups[call].layout_starts
            pairs = np.concatenate([np.minimum.reduceat(pairs, s, axis=axis) for s in starts], axis=axis)
        return pairs


class MemoryBound:
    """Lower bounds on memory, vectorised over nodes. They average over the devices of each call while it runs.

    Homes of roles, kept copies and a running call all need a least amount of memory. The memory that remains is
    called room. No candidate of a fitting plan needs more than its call's least memory plus the room. Fast
    candidates often need more, so this limit raises the least seconds of calls.
    """

    def __init__(self, tables: Tables, groups: Sequence[CandidateGroups]) -> None:
        self._tables = tables
        self._groups = groups
        cluster = tables.problem.cluster
        self._devices = cluster.size
        self._capacity = float(np.dot(tables.problem.memory_bytes, np.diff(cluster.bounds)))
        self._largest = max(tables.problem.memory_bytes)
        self._models = [c for c, call in enumerate(tables.calls) if not call.is_function]
        self._sharing = {h for homes in tables.sharing_homes for h in homes}
        self._held = [g.own if c in self._sharing else g.resident for c, g in enumerate(groups)]
        """Bytes that each home certainly keeps, even if its role shares frozen weights with other roles, [groups]
        by call."""
        self._when_held: dict[int, tuple[Floats, Floats]] = {}
        self._when_run: dict[int, tuple[Floats, Floats]] = {}
        self._when_moved: dict[int, tuple[Floats, Floats]] = {}
        for c in self._models:
            costs = tables.candidates(c)
            running = costs.working_bytes + costs.communicator_bytes + costs.weights_bytes * costs.offload
            if tables.home[c] == c:
                held = costs.resident_bytes - costs.base_bytes if c in self._sharing else costs.resident_bytes
                self._when_held[c] = self._tabulate(c, held)
                self._when_run[c] = self._tabulate(c, held + running)
            else:
                self._when_run[c] = self._tabulate(c, running)
                self._when_moved[c] = self._tabulate(c, running + costs.weights_bytes)

    def tighten(self, sets: "_Sets", apart: Mapping[tuple[int, int], Bools]) -> Bools:
        """Raise the seconds of `sets` to the least seconds of candidates that fit into the remaining memory.

        `apart`: whether two calls at home must have no devices in common, [nodes] by pair of calls. Returns whether
        some device must run out of memory, [nodes].
        """
        groups, tables = self._groups, self._tables
        nodes, size, common, copies = sets.nodes, sets.size, sets.common, sets.copies
        running = [g.working[row] for g, row in zip(groups, nodes, strict=True)]
        # Bytes that stay on the devices of calls: the state of roles at home, and kept copies.
        stays = {}
        for c in self._models:
            home = tables.home[c]
            kept = groups[home].must_keep[nodes[home]]
            # Later calls of a role may use the same copy as the first, so only the first call counts it.
            first = not any(p < c for p in tables.same_role[c] if p != home)
            stays[c] = self._held[c][nodes[c]] if home == c else np.where(kept, first * copies[c], 0.0)
        shared = [{h: groups[h].base[nodes[h]] for h in homes} for homes in tables.sharing_homes]
        everything = sum(stays[c] * size[c] for c in stays)
        everything += sum(np.max([base[h] * size[h] for h in base], axis=0) for base in shared)
        full = everything > self._capacity
        room = {c: (self._capacity - everything) / size[c] for c in stays}
        for c in self._models:
            home, limit = tables.home[c], groups[c].limit[nodes[c]]
            needs = running[c] + (stays[c] if home == c else copies[c])
            others = {
                h: held for h, held in stays.items() if h != c and (h == home or tables.home[h] != home)
            }
            # On average over the devices of the call, its own need and everything that stays there must fit.
            left = (limit - needs) * size[c]
            left = left - sum(held * common[h][c] for h, held in others.items())
            left -= sum(np.max([base[h] * common[h][c] for h in base], axis=0) for base in shared)
            # On one device, the largest state that certainly lies on it must fit, together with the states that
            # cover all devices of the call.
            covering = sum(np.where(common[h][c] >= size[c], held, 0.0) for h, held in others.items())
            partly = [
                np.where(common[h][c] > 0, np.where(common[h][c] < size[c], held, 0.0), 0.0)
                for h, held in others.items()
            ]
            spare = limit - needs - covering
            worst = np.minimum(spare - np.max(partly, axis=0, initial=0.0), left / size[c])
            for pair, which in apart.items():
                if c not in pair:
                    # If three calls together have more devices than the cluster, this call overlaps one of the two
                    # calls that are apart.
                    less = np.minimum(*(stays[h] for h in pair))
                    less = less - sum(np.where(common[h][c] >= size[c], others[h], 0.0) for h in pair)
                    crowded = which & (size[[*pair, c]].sum(axis=0) > self._devices)
                    np.minimum(worst, np.where(crowded, spare - less, np.inf), out=worst)
            full |= worst < -_ROUNDING * self._largest
            for h, held in others.items():
                there = common[h][c]
                average = np.where(there > 0, left / np.maximum(there, 1), np.inf)
                alone = np.where(there > 0, spare - np.where(there >= size[c], 0.0, held), np.inf)
                np.minimum(room[h], np.minimum(average, alone), out=room[h])
            if home == c:
                self._raise(sets, c, self._when_run[c], worst + needs)
            else:
                self._raise(sets, c, self._when_run[c], worst + running[c])
                moved = np.where(copies[c] > 0, worst + needs, np.inf)
                self._raise(sets, c, self._when_moved[c], moved)
        for h, table in self._when_held.items():
            self._raise(sets, h, table, room[h] + stays[h])
        # If seconds are infinite, no candidate of some call fits into the room.
        full |= np.isinf(sets.seconds).any(axis=0)
        for least in (sets.seconds, sets.loading):
            least[:, full] = 0.0
        return full

    def _raise(self, sets: "_Sets", c: int, tables: tuple[Floats, Floats], size: Floats) -> None:
        """Raise the least times of a call to the least times of those candidates that need at most `size` bytes."""
        row = self._groups[c].row[sets.nodes[c]]
        step = self._step(size * (1 + _ROUNDING) + 1)
        for table, least in zip(tables, (sets.seconds, sets.loading), strict=True):
            np.maximum(least[c], table[row, step], out=least[c])

    def _step(self, size: Floats) -> Ints:
        return np.clip(size * (_STEPS / self._largest), 0, _STEPS).astype(np.int64)

    def _tabulate(self, c: int, needs: Floats) -> tuple[Floats, Floats]:
        """Tabulate the least seconds of a call, without and with loading, [groups down to level `LAYOUT`, memory
        sizes].

        `needs`: bytes that each candidate needs.
        """
        groups, costs = self._groups[c], self._tables.candidates(c)
        before = int(groups.row.max()) + 1 - len(groups.layouts.first)
        layout = groups.row[groups.alone] - before
        found = []
        for seconds in (costs.seconds, costs.seconds + costs.load_seconds):
            table = np.full((len(groups.layouts.first), _STEPS + 1), np.inf)
            np.minimum.at(table, (layout, self._step(needs)), seconds)
            table = np.minimum.accumulate(table, axis=1)
            found.append(
                np.concatenate([np.minimum.reduceat(table, s, axis=0) for s in groups.layout_starts])
            )
        return found[0], found[1]


class Bound:
    """Lower bounds on step time, vectorised over nodes. A node is a set of plans: a group of candidates per call.

    Functions take time, but occupy no device. Four relaxations are combined in one pass through the calls in graph
    order:
    - critical path: a call starts once it has received the outputs of its producers, and after earlier calls whose
      meshes overlap its own. Two meshes certainly overlap if together they have more devices than the cluster;
    - work: before a call starts, its ancestors have spent their device-seconds on the devices of the cluster.
      Ancestors that cannot start before some moment spend their device-seconds after it (energetic reasoning, as in
      cumulative scheduling);
    - reallocation: parameters move in the least seconds over all positions of the meshes, as far as the order of
      activities exposes this time. A kept copy is refreshed after training instead. If a node has plans with and
      without kept copies, the cheaper kind counts;
    - packing: if three meshes together have more devices than the cluster, two of them overlap, and one of their
      calls waits for the other. Two meshes cannot overlap if no device has enough memory for both.

    Each call takes at least the seconds of its fastest candidate that fits into the remaining memory
    (`MemoryBound`). The bound of a node is infinite if some device must run out of memory under all its plans.
    """

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.groups = [group_candidates(tables, c) for c in range(len(tables.calls))]
        self.devices = tables.problem.cluster.size
        self._models = [c for c, call in enumerate(tables.calls) if not call.is_function]
        self._memory = MemoryBound(tables, self.groups)
        self.moves = LeastMoves(tables, self.groups)
        # If calls of a role can run at the same time, they may share loaded parameters, so they are left out.
        self._loads = [
            c
            for c, h in enumerate(tables.home)
            if h == c and all(tables.ordered[c, o] or tables.ordered[o, c] for o in tables.same_role[c])
        ]
        """Calls at home that certainly load offloaded parameters themselves."""
        self._tellers = [c for c, told in enumerate(tables.length_receivers) if told]
        self._ancestors: list[list[int]] = []
        for direct in tables.feeds:
            self._ancestors.append(sorted({*direct, *(a for d in direct for a in self._ancestors[d])}))
        self._triples = list(combinations(self._models, 3))

    def __call__(self, nodes: Numbers, *, memory: bool = True, goal: float = np.inf) -> Floats:
        """Bound the step seconds of nodes, [nodes]. `nodes`: group indices, [calls, nodes].

        If `memory` is false, the bounds ignore memory limits. With a `goal`, bounds below it are tighter. To end
        before `goal`, two calls that take too long in sequence must run side by side, so their states are on
        different devices. The result is at most the earliest end of such calls in sequence, which is at least
        `goal`.
        """
        sets = self._describe(nodes)
        if not memory:
            return self._end(sets)
        sets.copies = [self.moves.copy_bytes(c, nodes) for c in range(len(nodes))]
        apart, otherwise = self._side_by_side(sets, goal)
        loading = sets.loading.copy()
        full = self._memory.tighten(sets, apart)
        # Only the loads of these calls certainly happen.
        loading[self._loads] = sets.loading[self._loads]
        sets.loading = loading
        return np.minimum(np.where(full, np.inf, self._end(sets)), otherwise)

    def _side_by_side(self, sets: "_Sets", goal: float) -> tuple[dict[tuple[int, int], Bools], Floats]:
        """Find pairs of calls at home that end at `goal` or later if they run one after the other.

        Returns whether this holds, [nodes] by pair of calls, and the earliest end of all such pairs, [nodes].
        """
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
        """Collect the least costs of nodes, without regard to memory limits."""
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
        """Return the earliest end of the step, [nodes]."""
        nodes, size, common, unload = sets.nodes, sets.size, sets.common, sets.unload
        busy = np.zeros((len(nodes), 1))
        busy[self._models] = 1.0
        area = np.maximum(sets.area, sets.seconds * size * busy)
        whole = np.maximum(area + sets.load * size, sets.loading * size * busy)
        head = np.zeros(nodes.shape)
        tail = np.zeros(nodes.shape)
        told = np.zeros(nodes.shape)  # time at which the devices of a call know the lengths that it needs
        moves: dict[
            int, list[_Work]
        ] = {}  # call -> reallocation of its parameters, and loading them before it
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
        """Return the earliest time at which call `c` has received all inputs, one after the other, [nodes].

        Also returns the seconds that receiving takes once the devices of the call are free, [nodes].
        """
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
        """Count the devices that the meshes of two calls certainly have in common, [calls][calls][nodes]."""
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
        """Find whether the meshes of two calls cannot overlap, [nodes] by pair of calls.

        Either their positions are known and disjoint, or a device would have too little memory for both calls.
        """
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
        """Return the earliest end of three calls if two of them must overlap, [nodes]. It is infinite if no two of
        them can."""
        ends = [
            np.where(apart[p, c], np.inf, np.maximum(tail[p] + seconds[c], tail[c]))
            for p, c in combinations(triple, 2)
        ]
        return np.asarray(np.minimum.reduce(ends))

    def _told(self, c: int, there: int, tail: Floats) -> Floats:
        """Return the earliest time at which the devices of call `there` know the row lengths that call `c` needs,
        [nodes]."""
        told = np.zeros(tail.shape[1])
        for p in range(c):
            if self.tables.knows_lengths[there, p] and self.tables.ordered[c, p]:
                np.maximum(told, tail[p], out=told)
        return told

    def _reallocation(
        self, c: int, nodes: Numbers, tail: Floats, common: list[list[Floats]]
    ) -> tuple[Floats, Floats, Floats, Floats]:
        """Return the earliest start and the least seconds of the reallocation before call `c`, [nodes]. Also return
        both for loading the parameters before this reallocation. All values are 0 if a copy may be kept.
        """
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
        # A reallocation that sends nothing does not wait for the devices of the home.
        start = np.maximum(start, np.where(seconds > 0, there, load_start) + load)
        return start * transient, seconds * transient, load_start * transient, load * transient

    def _refresh(self, refresh: Activity, nodes: Numbers, tail: Floats) -> tuple[Floats, Floats]:
        """Return the earliest start and least seconds of a refresh, or of a reallocation in its place, [nodes].

        The seconds are 0 if no plan of a node keeps copies. The start is 0 unless all its plans keep copies,
        because a reallocation may come earlier.
        """
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
        """Return the earliest end of `calls` by their work, [nodes]. Work that starts after some moment uses
        devices only after this moment.

        `told`: earliest start of loading parameters. `head`: earliest start of the calls. `tail`: earliest end of
        the calls. `area`: device-seconds of the calls. `whole`: device-seconds of the calls with loading. `moves`
        and `others`: further work.
        """
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
