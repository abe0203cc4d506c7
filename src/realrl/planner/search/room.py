"""Lower bound on the memory of sets of plans, and least seconds of calls in the memory that remains."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from realrl.planner.search.groups import CandidateGroups, Numbers
from realrl.planner.search.tables import Tables
from realrl.program.arrays import Bools, Floats, Ints

_STEPS = 128
"""Number of memory sizes that tables of times distinguish."""
_ROUNDING = 1e-9
"""Relative rounding error of bytes."""


@dataclass(frozen=True)
class Room:
    """Result of `MemoryBound` for nodes (sets of plans)."""

    full: Bools
    """Whether some device must run out of memory, [nodes]."""
    seconds: Floats
    """Least seconds of each call among candidates that fit into the remaining memory, [calls, nodes]."""
    loading: Floats
    """Least seconds of loading parameters and of the call, [calls, nodes]."""


class MemoryBound:
    """Lower bounds on memory, vectorised over nodes: averages over the devices of each call while it runs.

    Homes of roles, kept copies and a running call need at least some memory; the remaining memory is their room. No
    candidate of a fitting plan needs more than its call's least memory plus this room. Fast candidates often need
    more, so the room raises the least seconds of calls.
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
        """Bytes that each home certainly keeps, even if it shares its frozen weights, [groups] by call."""
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
        replica, if it certainly needs one; `seconds` and `loading`: least values if memory were unlimited; `apart`:
        whether two calls at home must have no devices in common.
        """
        groups, tables = self._groups, self._tables
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
        seconds, loading = seconds.copy(), loading.copy()
        for c in self._models:
            home, limit = tables.home[c], groups[c].limit[nodes[c]]
            needs = running[c] + (stays[c] if home == c else copies[c])
            others = {
                h: held for h, held in stays.items() if h != c and (h == home or tables.home[h] != home)
            }
            # On average over the devices of the call, everything that stays there fits beside it.
            left = (limit - needs) * size[c]
            left = left - sum(held * common[h][c] for h, held in others.items())
            left -= sum(np.max([base[h] * common[h][c] for h in base], axis=0) for base in shared)
            # On one device, the largest state that certainly lies there fits, with the states that cover all
            # devices.
            covering = sum(np.where(common[h][c] >= size[c], held, 0.0) for h, held in others.items())
            partly = [
                np.where(common[h][c] > 0, np.where(common[h][c] < size[c], held, 0.0), 0.0)
                for h, held in others.items()
            ]
            spare = limit - needs - covering
            worst = np.minimum(spare - np.max(partly, axis=0, initial=0.0), left / size[c])
            for pair, which in apart.items():
                if c not in pair:
                    # If the three calls are too large for the cluster, this call meets one of two calls that are
                    # apart.
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
        """Raise the least times of a call to the least times of its candidates with at most `size` bytes."""
        row = self._groups[c].row[nodes[c]]
        step = self._step(size * (1 + _ROUNDING) + 1)
        for table, least in zip(tables, (seconds, loading), strict=True):
            np.maximum(least[c], table[row, step], out=least[c])

    def _step(self, size: Floats) -> Ints:
        return np.clip(size * (_STEPS / self._largest), 0, _STEPS).astype(np.int64)

    def _tabulate(self, c: int, needs: Floats) -> tuple[Floats, Floats]:
        """Tabulate the least seconds of a call, without and with loading, [groups down to layouts, memory sizes].

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
