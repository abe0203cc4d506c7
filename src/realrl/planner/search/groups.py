"""Hierarchy of candidate groups per call, from the group of all candidates down to single candidates.

Branch and bound bounds whole groups, and splits only groups that may contain a good plan.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from realrl.plan.cluster import Cluster
from realrl.planner.moves.transfers import Layouts
from realrl.planner.search.tables import Columns, Tables
from realrl.program.arrays import Bools, Floats, Ints

Numbers = NDArray[np.int32]
"""Group indices. They are int32 because there may be millions of nodes."""
Scalar = TypeVar("Scalar", np.float64, np.int64, np.bool_)

ALL, SIZES, SIZE, TENSOR, LAYOUT, KIND, ALONE = range(7)
"""Levels of the hierarchy. Each level splits the groups of the level before it.

- `SIZES`: mesh sizes from one power of two to the next.
- `SIZE`: one mesh size. Either all candidates keep copies of their role, or none of them does.
- `TENSOR`: one TP degree, and meshes that span equal parts of nodes. The position of the mesh still varies.
- `LAYOUT`: one set of degrees, ZeRO sharding and data type.
- `KIND`: the same costs as well. Candidates of a kind differ only in the position of their mesh.
- `ALONE`: single candidates.
"""


@dataclass(frozen=True)
class CandidateGroups:
    """Candidate groups of one call. Arrays have one entry per group. Group 0 contains all candidates.

    Every cost is the minimum over the candidates of a group, unless stated otherwise.
    """

    level: Ints
    """Level of each group, ascending."""
    child: Ints
    """First child of each group. The children of group i are `child[i]` to `child_end[i]` - 1."""
    child_end: Ints
    kind: Ints
    """Index of the kind (level `KIND`) for kinds and single candidates, and -1 for other groups."""
    candidate: Ints
    """Index of the candidate for single candidates, and -1 for other groups."""
    seconds: Floats
    area: Floats
    """Device-seconds, which are 0 for a function."""
    size: Ints
    """Number of devices."""
    first: Ints
    """First rank of the mesh for single candidates, and -1 for other groups."""
    rows: Ints
    """Smallest DP degree."""
    most_rows: Ints
    """Largest DP degree."""
    copies: Ints
    """Smallest number of ranks per data-parallel index."""
    load: Floats
    unload: Floats
    weights: Floats
    resident: Floats
    own: Floats
    """Resident bytes except frozen weights that other roles may share."""
    base: Floats
    """Bytes of frozen weights that other roles may share."""
    working: Floats
    """Bytes that the call needs while it runs, with loaded parameters and communicators."""
    limit: Floats
    """Usable bytes of a device. This is the maximum over the candidates of the group."""
    layouts: Layouts
    """Layout of one candidate of each group of level `LAYOUT`."""
    may_keep: Bools
    """Whether some candidate keeps copies of its role."""
    must_keep: Bools
    """Whether all candidates keep copies of their role."""
    alone: Ints
    """Index of the candidate -> its group of level `ALONE`."""
    layout_starts: tuple[Ints, ...]
    """Index of the first of `layouts` in each group, one array per level from `ALL` to `LAYOUT`."""
    row: Ints
    """Row of each group in tables that end at level `LAYOUT`. Kinds and single candidates have the row of their
    layout."""

    def containing(self, alone: Ints, level: int) -> Ints:
        """Return the groups of a level (`LAYOUT` or below) that contain the single candidates' groups `alone`."""
        if level == ALONE:
            return alone
        if level == KIND:
            return np.searchsorted(self.level, KIND) + self.kind[alone]
        return self.row[alone]


def _number_parts(tables: Tables, columns: Columns) -> Ints:
    """Number the parts of nodes that the mesh of each candidate spans, [candidates]. Meshes with equal numbers span
    equal numbers of devices on their nodes."""
    cluster = tables.problem.cluster
    numbers: dict[Cluster, int] = {}
    ends = cluster.size + 1
    meshes, mesh = np.unique(columns.first * ends + columns.end, return_inverse=True)
    spans = ((first, end - first) for first, end in (divmod(number, ends) for number in meshes.tolist()))
    return np.array([numbers.setdefault(cluster.part(*span), len(numbers)) for span in spans])[mesh]


def group_candidates(tables: Tables, call: int) -> CandidateGroups:
    columns = tables.candidates(call)
    size = columns.end - columns.first
    layouts = tables.layouts(call)[columns.layout]
    copies = layouts.size // layouts.shares
    busy = np.zeros_like(columns.seconds) if tables.calls[call].is_function else columns.seconds
    sizes = (
        columns.weights_bytes,
        columns.resident_bytes,
        columns.base_bytes,
        columns.working_bytes,
        columns.limit,
    )
    parts = _number_parts(tables, columns)
    where = (*layouts.degrees, layouts.ep, layouts.vpp, layouts.sharded, layouts.dtype)
    costs = (columns.seconds, columns.load_seconds, columns.unload_seconds, *sizes, columns.offload)
    power = np.frexp(size)[1]
    table = np.stack([power, size, columns.keep, parts, layouts.cuts, *where, *costs], axis=1)
    # Number of leading columns of the table that are equal within a group of each level.
    deciding = {SIZES: 1, SIZE: 3, TENSOR: 5, LAYOUT: 5 + len(where)}
    _, kind = np.unique(table, axis=0, return_inverse=True)
    order = np.lexsort(
        (columns.first, kind.reshape(-1))
    )  # `unique` numbers kinds in the order of the columns, so by size first
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
        load=least(columns.load_seconds),
        unload=least(columns.unload_seconds),
        weights=least(columns.weights_bytes),
        resident=least(columns.resident_bytes),
        own=least(columns.resident_bytes - columns.base_bytes),
        base=least(columns.base_bytes),
        working=least(
            columns.working_bytes + columns.communicator_bytes + columns.weights_bytes * columns.offload
        ),
        limit=-least(-columns.limit),
        layouts=layouts[order[starts[LAYOUT]]],
        may_keep=~least(~columns.keep),
        must_keep=least(columns.keep),
        alone=offsets[ALONE] + np.argsort(order),
        layout_starts=tuple(np.searchsorted(starts[LAYOUT], starts[level]) for level in range(KIND)),
        row=np.concatenate([np.arange(offsets[KIND]), *(offsets[LAYOUT] + of for of in layout)]),
    )
