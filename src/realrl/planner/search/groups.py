"""Hierarchy of candidate groups per call: all, by sizes, by TP degree, by layout, by kind, single candidates."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from realrl.plan.cluster import Cluster
from realrl.planner.moves.transfers import Layouts
from realrl.planner.search.tables import Columns, Tables
from realrl.program.arrays import Bools, Floats, Ints

Numbers = NDArray[np.int32]
"""Group indices, int32 because there may be millions of nodes."""
Scalar = TypeVar("Scalar", np.float64, np.int64, np.bool_)

ALL, SIZES, SIZE, TENSOR, LAYOUT, KIND, ALONE = range(7)
"""Levels of the hierarchy: sizes from one power of two to the next; candidates of one size keep copies of their
role, or none does; those of one TP degree have meshes over equal parts of nodes, wherever they lie, and so have
layouts; candidates of a kind differ only in where their mesh lies."""


@dataclass(frozen=True)
class CandidateGroups:
    """Candidate groups of one call, each with the minimum of its candidates' costs unless stated otherwise."""

    level: Ints
    child: Ints
    """First child of a group; its children are `child[i]` to `child_end[i]` - 1."""
    child_end: Ints
    kind: Ints
    """Index of the kind, for kinds and single candidates; -1 for others."""
    candidate: Ints
    """Index of the candidate, for single candidates; -1 for others."""
    seconds: Floats
    area: Floats
    """Device-seconds; none of a function."""
    size: Ints
    first: Ints
    """First rank of the mesh, for single candidates; -1 for others."""
    rows: Ints
    """Smallest DP degree."""
    most_rows: Ints
    """Largest DP degree."""
    copies: Ints
    """Smallest number of ranks per DP index."""
    load: Floats
    unload: Floats
    weights: Floats
    resident: Floats
    own: Floats
    """Resident bytes without those that other roles may share."""
    base: Floats
    """Resident bytes that other roles may share."""
    working: Floats
    """What the call needs while it runs, with parameters that are loaded, and its communicators."""
    limit: Floats
    """Largest usable bytes of a device."""
    layouts: Layouts
    """Layout of one candidate of each group at the level of layouts."""
    may_keep: Bools
    """Whether some candidate keeps copies of its role."""
    must_keep: Bools
    """Whether all candidates do."""
    alone: Ints
    """Group of each single candidate, by its index."""
    layout_starts: tuple[Ints, ...]
    """First of `layouts` of each group, by level down to `LAYOUT`."""
    row: Ints
    """Row of each group in tables of groups down to the level of layouts: its own, or that of its layout."""

    def containing(self, alone: Ints, level: int) -> Ints:
        """Return the groups at a level that contain single candidates, by the groups of these."""
        if level == ALONE:
            return alone
        if level == KIND:
            return np.searchsorted(self.level, KIND) + self.kind[alone]
        return self.row[alone]


def _number_parts(tables: Tables, columns: Columns) -> Ints:
    """Number the parts of nodes under the mesh of each candidate; equal numbers mean equal parts."""
    cluster = tables.problem.cluster
    numbers: dict[Cluster, int] = {}
    ends = cluster.size + 1
    meshes, mesh = np.unique(columns.first * ends + columns.end, return_inverse=True)
    spans = ((first, end - first) for first, end in (divmod(number, ends) for number in meshes.tolist()))
    return np.array([numbers.setdefault(cluster.part(*span), len(numbers)) for span in spans])[mesh]


def group_candidates(tables: Tables, call: int) -> CandidateGroups:
    """Group a call's candidates; group 0 contains them all."""
    columns = tables.candidates(call)
    size = columns.end - columns.first
    layouts = tables.layouts(call)[columns.layout]
    copies = layouts.size // layouts.shares
    busy = np.zeros_like(columns.seconds) if tables.calls[call].is_function else columns.seconds
    sizes = (columns.weights, columns.resident, columns.base, columns.working, columns.limit)
    parts = _number_parts(tables, columns)
    where = (*layouts.degrees.T, layouts.sharded, layouts.dtype)
    costs = (columns.seconds, columns.load, columns.unload, *sizes, columns.offloaded)
    power = np.frexp(size)[1]
    table = np.stack([power, size, columns.keeps, parts, layouts.cuts, *where, *costs], axis=1)
    # So many of the first columns tell the groups of a level apart.
    deciding = {SIZES: 1, SIZE: 3, TENSOR: 5, LAYOUT: 5 + len(where)}
    _, kind = np.unique(table, axis=0, return_inverse=True)
    order = np.lexsort((columns.first, kind.reshape(-1)))  # kinds are numbered by size before all else
    sorted_kind = kind.reshape(-1)[order]
    starts = [
        np.array([0]),
        *(
            np.flatnonzero(np.diff(table[order, :number], axis=0, prepend=-1.0).any(axis=1))
            for number in deciding.values()
        ),
        np.flatnonzero(np.diff(sorted_kind, prepend=-1)),
        np.arange(len(order)),
    ]
    counts = [len(s) for s in starts]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    child = [offsets[lv + 1] + np.searchsorted(starts[lv + 1], starts[lv]) for lv in range(ALONE)]
    ends = [np.append(c[1:], offsets[lv + 2]) for lv, c in enumerate(child)]
    nothing = np.full(counts[ALONE], offsets[-1])
    layout = [np.searchsorted(starts[LAYOUT], starts[level], side="right") - 1 for level in (KIND, ALONE)]

    def least(values: NDArray[Scalar]) -> NDArray[Scalar]:
        return np.concatenate([np.minimum.reduceat(values[order], s) for s in starts])

    return CandidateGroups(
        level=np.repeat(np.arange(len(counts)), counts),
        child=np.concatenate([*child, nothing]),
        child_end=np.concatenate([*ends, nothing]),
        kind=np.concatenate([np.full(offsets[KIND], -1), np.arange(counts[KIND]), sorted_kind]),
        candidate=np.concatenate([np.full(offsets[ALONE], -1), order]),
        seconds=least(columns.seconds),
        area=least(busy * size),
        size=least(size),
        first=np.concatenate([np.full(offsets[ALONE], -1), columns.first[order]]),
        rows=least(size // copies),
        most_rows=-least(-(size // copies)),
        copies=least(copies),
        load=least(columns.load),
        unload=least(columns.unload),
        weights=least(columns.weights),
        resident=least(columns.resident),
        own=least(columns.resident - columns.base),
        base=least(columns.base),
        working=least(columns.working + columns.communicators + columns.weights * columns.offloaded),
        limit=-least(-columns.limit),
        layouts=layouts[order[starts[LAYOUT]]],
        may_keep=~least(~columns.keeps),
        must_keep=least(columns.keeps),
        alone=offsets[ALONE] + np.argsort(order),
        layout_starts=tuple(np.searchsorted(starts[LAYOUT], starts[level]) for level in range(KIND)),
        row=np.concatenate([np.arange(offsets[KIND]), *(offsets[LAYOUT] + of for of in layout)]),
    )
