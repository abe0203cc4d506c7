"""Memory that sets of plans certainly need, and how fast calls can be in what it leaves them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from realrl.planner.search.groups import CandidateGroups, Numbers
from realrl.planner.search.tables import Tables
from realrl.program.arrays import Bools, Floats, Ints

_STEPS = 128
"""Sizes of memory that tables of times tell apart."""
_ROUNDING = 1e-9
"""Relative rounding error of bytes."""


@dataclass(frozen=True)
class Room:
    """Room that memory leaves to sets of plans, [calls, nodes] or [nodes]; see `MemoryBound`."""

    full: Bools
    """Whether some device must run out of memory."""
    seconds: Floats
    """Least seconds of calls whose candidates fit into what the others leave."""
    loading: Floats
    """Likewise, with loading the parameters before."""


class MemoryBound:
    """Lower bounds on memory, vectorised over nodes: averages over the devices of each call while it runs.

    What the homes of roles, kept copies and a running call need at least leaves room to the rest. A call has no
    candidate that needs more than its own least and that room: of many candidates, the fast ones often do.
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
        """Bytes that homes certainly keep, whatever the others share."""
        self._when_held: dict[int, tuple[Floats, Floats]] = {}
        self._when_run: dict[int, tuple[Floats, Floats]] = {}
        self._when_moved: dict[int, tuple[Floats, Floats]] = {}
        for c in self._models:
            costs = tables.candidates(c)
            running = costs.working + costs.communicators + costs.weights * costs.offloaded
            if tables.home[c] == c:
                held = costs.resident - costs.base if c in self._sharing else costs.resident
                self._when_held[c] = self._tabulate(c, held)
                self._when_run[c] = self._tabulate(c, held + running)
            else:
                self._when_run[c] = self._tabulate(c, running)
                self._when_moved[c] = self._tabulate(c, running + costs.weights)

    def __call__(
        self,
        nodes: Numbers,
        *,
        size: Floats,
        common: Sequence[Sequence[Floats]],
        copies: Sequence[Floats],
        seconds: Floats,
        loading: Floats,
        apart: Mapping[tuple[int, int], Bools],
    ) -> Room:
        """Find the room of nodes.

        `common`: devices that the meshes of two calls certainly have in common; `copies`: bytes of each call's
        replica, if it certainly needs one; `seconds` and `loading`: least ones, as if there were room for all;
        `apart`: whether two calls at home have no devices in common.
        """
        groups, tables = self._groups, self._tables
        running = [g.working[row] for g, row in zip(groups, nodes, strict=True)]
        # What stays on the devices of calls: the state of roles at home, and copies that are kept.
        stays = {}
        for c in self._models:
            home = tables.home[c]
            kept = groups[home].must_keep[nodes[home]]
            # Later calls of a role may use the same copy as the first.
            first = not any(p < c for p in tables.same_role[c] if p != home)
            stays[c] = self._held[c][nodes[c]] if home == c else np.where(kept, first * copies[c], 0.0)
        shared = [{h: groups[h].base[nodes[h]] for h in homes} for homes in tables.sharing_homes]
        everything = sum(stays[c] * size[c] for c in stays)
        everything += sum(np.max([base[h] * size[h] for h in base], axis=0) for base in shared)
        full = everything > self._capacity
        room = {c: (self._capacity - everything) / size[c] for c in stays}
        seconds, loading = seconds.copy(), loading.copy()
        for c in self._models:
            home, limit = tables.home[c], groups[c].limit[nodes[c]]
            needs = running[c] + (stays[c] if home == c else copies[c])
            others = {
                h: held for h, held in stays.items() if h != c and (h == home or tables.home[h] != home)
            }
            # On average over its devices, all that stays there leaves room.
            left = (limit - needs) * size[c]
            left = left - sum(held * common[h][c] for h, held in others.items())
            left -= sum(np.max([base[h] * common[h][c] for h in base], axis=0) for base in shared)
            # So does what stays on some device, and what stays on all of them.
            covering = sum(np.where(common[h][c] >= size[c], held, 0.0) for h, held in others.items())
            partly = [
                np.where(common[h][c] > 0, np.where(common[h][c] < size[c], held, 0.0), 0.0)
                for h, held in others.items()
            ]
            spare = limit - needs - covering
            worst = np.minimum(spare - np.max(partly, axis=0, initial=0.0), left / size[c])
            for pair, which in apart.items():
                if c not in pair:
                    # Where a call covers devices of two others that are apart, the state of one of them is there.
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
                self._raise(self._when_run[c], c, nodes, worst + needs, seconds, loading)
            else:
                self._raise(self._when_run[c], c, nodes, worst + running[c], seconds, loading)
                moved = np.where(copies[c] > 0, worst + needs, np.inf)
                self._raise(self._when_moved[c], c, nodes, moved, seconds, loading)
        for h, table in self._when_held.items():
            self._raise(table, h, nodes, room[h] + stays[h], seconds, loading)
        # No candidate fits into the room of some call.
        full |= np.isinf(seconds).any(axis=0)
        return Room(full, np.where(full, 0.0, seconds), np.where(full, 0.0, loading))

    def _raise(
        self,
        tables: tuple[Floats, Floats],
        c: int,
        nodes: Numbers,
        size: Floats,
        seconds: Floats,
        loading: Floats,
    ) -> None:
        """Raise the least times of a call to those of candidates that take no more than `size` bytes."""
        row = self._groups[c].row[nodes[c]]
        step = self._step(size * (1 + _ROUNDING) + 1)
        for table, least in zip(tables, (seconds, loading), strict=True):
            np.maximum(least[c], table[row, step], out=least[c])

    def _step(self, size: Floats) -> Ints:
        return np.clip(size * (_STEPS / self._largest), 0, _STEPS).astype(np.int64)

    def _tabulate(self, c: int, needs: Floats) -> tuple[Floats, Floats]:
        """Least seconds of a call, without and with loading, [groups down to layouts, steps of memory]."""
        groups, costs = self._groups[c], self._tables.candidates(c)
        before = int(groups.row.max()) + 1 - len(groups.layouts.first)
        layout = groups.row[groups.alone] - before
        found = []
        for seconds in (costs.seconds, costs.seconds + costs.load):
            table = np.full((len(groups.layouts.first), _STEPS + 1), np.inf)
            np.minimum.at(table, (layout, self._step(needs)), seconds)
            table = np.minimum.accumulate(table, axis=1)
            found.append(
                np.concatenate([np.minimum.reduceat(table, s, axis=0) for s in groups.layout_starts])
            )
        return found[0], found[1]
