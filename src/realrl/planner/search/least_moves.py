"""Least times of reallocations and refreshes of sets of plans, alone and together with the call that needs them."""

from collections.abc import Sequence

import numpy as np

from realrl.planner.moves.transfers import TransferTable
from realrl.planner.search.groups import ALONE, LAYOUT, CandidateGroups, Numbers
from realrl.planner.search.tables import Tables
from realrl.program.arrays import Floats


class LeastMoves:
    """Lower bounds on moving parameters from homes to other calls, vectorised over nodes, wherever meshes lie."""

    def __init__(self, tables: Tables, groups: Sequence[CandidateGroups]) -> None:
        self._tables = tables
        self._groups = groups
        self._least: dict[tuple[str, int], Floats] = {}
        """By what moves and the call that it moves to: seconds, [groups of the home, groups of the call]."""
        # Calls that may share the replica of another call may not need a reallocation: leave them out.
        self.moving = {c for c, h in enumerate(tables.home) if h != c and not tables.sharers[c]}
        """Calls that need a reallocation unless they run in the layout of their home."""
        self._with_call = {c: self._tabulate_with_call(c) for c in self.moving}
        # Later calls of a role may use the same copy as an earlier one, which is refreshed once.
        self.refreshes = [
            refresh
            for refresh in tables.refreshes
            if not any(p < refresh.target for p in tables.same_role[refresh.target] if p != refresh.home)
        ]
        """Refreshes of copies that are not those of earlier calls."""

    def seconds(self, table: TransferTable, c: int, nodes: Numbers) -> Floats:
        """Bound the seconds of moving what `table` is of from its home to call `c`, [nodes]."""
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

        Often the layouts in which a call is fast are far from its home's: the least of the sum is more than the sum
        of the least ones. 0 where a copy may be kept.
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
        """Bound the bytes of the replica that call `c` needs, [nodes]."""
        if c not in self.moving:
            return np.zeros(nodes.shape[1])
        home = self._tables.home[c]
        source, target = self._groups[home], self._groups[c]
        least = self._cheapest(self._tables.reallocation[c].role, c)
        moved = least[source.row[nodes[home]], target.row[nodes[c]]] > 0
        return np.where(moved, target.weights[nodes[c]], 0.0)

    def _cheapest(self, role: str, c: int) -> Floats:
        """Least seconds of transfers to call `c`, [groups of the home, groups of the call], down to layouts."""
        if (role, c) not in self._least:
            source, target = self._groups[self._tables.home[c]], self._groups[c]
            # Homes that keep copies have the layouts of those that do not.
            _, some, of = np.unique(source.layouts.codes, return_index=True, return_inverse=True)
            least = self._tables.problem.transfers.at_least(role, source.layouts[some], target.layouts)
            self._least[role, c] = self._reduce(least[of], c)
        return self._least[role, c]

    def _tabulate_with_call(self, c: int) -> tuple[Floats, Floats]:
        """Tables of `seconds_with_call`, [groups of the home, groups of the call], down to layouts."""
        source, target = self._groups[self._tables.home[c]], self._groups[c]
        moved = self._between_layouts(c)
        devices = np.maximum(source.layouts.size[:, None], target.layouts.size)
        of_layouts = target.level == LAYOUT
        seconds = moved + target.seconds[of_layouts]
        work = moved * devices + target.area[of_layouts]
        return self._reduce(seconds, c), self._reduce(work, c)

    def _between_layouts(self, c: int) -> Floats:
        """Least seconds of reallocations to call `c`, [layouts of the home, layouts of the call]."""
        source, target = self._groups[self._tables.home[c]], self._groups[c]
        least = self._cheapest(self._tables.reallocation[c].role, c)
        return least[-len(source.layouts.first) :, -len(target.layouts.first) :]

    def _reduce(self, pairs: Floats, c: int) -> Floats:
        """Least values, [groups of the home, groups of the call], down to layouts, from pairs of layouts."""
        for axis, call in enumerate((self._tables.home[c], c)):
            starts = self._groups[call].layout_starts
            pairs = np.concatenate([np.minimum.reduceat(pairs, s, axis=axis) for s in starts], axis=axis)
        return pairs
