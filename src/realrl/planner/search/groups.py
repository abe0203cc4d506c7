"""Options of each call in groups of groups: all, those of one size, those of one kind, each alone."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from realrl.planner.evaluate.tables import Tables
from realrl.planner.moves.transfers import Floats, Ints, Layouts

Scalar = TypeVar("Scalar", np.float64, np.int64)

ALL, SIZE, KIND, ALONE = range(4)
"""Levels. Options of a kind differ in nothing but the place of their mesh."""


@dataclass(frozen=True)
class CandidateGroups:
    """Groups of one call. Each is described by what none of its options is below."""

    level: Ints
    child: Ints
    """The first of its children, which are consecutive; those of group i end where `child_end[i]` says."""
    child_end: Ints
    kind: Ints
    """Number of the kind, of groups that are one or part of one."""
    candidate: Ints
    """Number of the option, of groups of one."""
    seconds: Floats
    area: Floats
    """Device-seconds; none of a function."""
    size: Ints
    first: Ints
    """First rank of the mesh, of groups of one option."""
    rows: Ints
    """Degree of data parallelism."""
    most_rows: Ints
    """The most that any option has."""
    copies: Ints
    """Ranks of the same data-parallel index."""
    load: Floats
    weights: Floats
    resident: Floats
    working: Floats
    limit: Floats
    """Most bytes of a device that any option has."""
    layouts: Layouts
    """One layout of each kind."""
    kind_starts: tuple[Ints, Ints, Ints]
    """Per level down to `KIND`, the first kind of each group."""


def group_candidates(tables: Tables, call: int) -> CandidateGroups:
    """The groups of a call's options; group 0 holds them all."""
    columns = tables.candidates(call)
    size = columns.end - columns.first
    layouts = tables.layouts(call)[columns.layout]
    copies = layouts.tp * layouts.pp
    busy = np.zeros_like(columns.seconds) if tables.calls[call].is_function else columns.seconds
    facts = (columns.seconds, columns.load, columns.weights, columns.resident, columns.working, columns.limit)
    table = np.stack([size, layouts.tp, layouts.pp, *facts, columns.offloaded], axis=1)
    _, kind = np.unique(table, axis=0, return_inverse=True)
    order = np.lexsort((columns.first, kind.reshape(-1)))  # kinds are numbered by size before all else
    sorted_kind, sorted_size = kind.reshape(-1)[order], size[order]
    starts = [
        np.array([0]),
        np.flatnonzero(np.diff(sorted_size, prepend=-1)),
        np.flatnonzero(np.diff(sorted_kind, prepend=-1)),
        np.arange(len(order)),
    ]
    counts = [len(s) for s in starts]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    child = [offsets[lv + 1] + np.searchsorted(starts[lv + 1], starts[lv]) for lv in range(ALONE)]
    ends = [np.append(c[1:], offsets[lv + 2]) for lv, c in enumerate(child)]
    nothing = np.full(counts[ALONE], offsets[-1])

    def least(values: NDArray[Scalar]) -> NDArray[Scalar]:
        return np.concatenate([np.minimum.reduceat(values[order], s) for s in starts])

    return CandidateGroups(
        level=np.repeat(np.arange(4), counts),
        child=np.concatenate([*child, nothing]),
        child_end=np.concatenate([*ends, nothing]),
        kind=np.concatenate([np.full(counts[0] + counts[1], -1), np.arange(counts[KIND]), sorted_kind]),
        candidate=np.concatenate([np.full(offsets[ALONE], -1), order]),
        seconds=least(columns.seconds),
        area=least(busy * size),
        size=least(size),
        first=np.concatenate([np.full(offsets[ALONE], -1), columns.first[order]]),
        rows=least(size // copies),
        most_rows=-least(-(size // copies)),
        copies=least(copies),
        load=least(columns.load),
        weights=least(columns.weights),
        resident=least(columns.resident),
        working=least(columns.working),
        limit=-least(-columns.limit),
        layouts=layouts[order[starts[KIND]]],
        kind_starts=(
            np.array([0]),
            np.searchsorted(starts[KIND], starts[SIZE]),
            np.arange(counts[KIND]),
        ),
    )
