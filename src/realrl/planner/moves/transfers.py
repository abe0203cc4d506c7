"""Layouts as columns, and the names of the parameters that move between them."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce

import numpy as np

from realrl.dataflow.call import Call
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.axes import COPIES, Divided, axes_dividing, axis_names, column_of
from realrl.plan.cluster import Cluster
from realrl.plan.placement import DTYPES, Dtype, Placement
from realrl.program.arrays import Ints
from realrl.program.order import TrainableParts, changed_sets, set_names

TYPES: tuple[Dtype | None, ...] = (None, *DTYPES.values())
"""Data types of parameters. None means the role's own type."""
HALF = TYPES.index("bfloat16")

_DEGREE_BITS = 28
"""Number of bits of a layout's code for the degrees of all axes except one. The other bits hold the mesh and the
data type."""


@dataclass(frozen=True)
class Layouts:
    """Layouts as columns, with one entry per layout."""

    first: Ints
    """First rank of the mesh."""
    degrees: tuple[Ints, ...]
    """Degrees of parallelism, one column per axis, in the order of `plan.axes.AXES`."""
    sharded: Ints
    """1 if ranks with the same parameters shard them (ZeRO-3), otherwise 0."""
    dtype: Ints
    """Data type of the parameters, as an index in `TYPES`."""

    @classmethod
    def of(cls, placements: Iterable[Placement]) -> "Layouts":
        """Build columns from placements, in their order."""
        rows = [
            (p.mesh.first, s.shards_parameters, TYPES.index(s.dtype), *s.degrees.values)
            for p in placements
            for s in [p.strategy]
        ]
        table = np.array(rows, dtype=np.int64).reshape(len(rows), 3 + len(axis_names()))
        # Each column is contiguous, since the search selects among some hundred thousand rows.
        first, sharded, dtype, *degrees = (np.ascontiguousarray(column) for column in table.T)
        return cls(first, tuple(degrees), sharded, dtype)

    def __getitem__(self, index: Ints) -> "Layouts":
        degrees = tuple(degree[index] for degree in self.degrees)
        return Layouts(self.first[index], degrees, self.sharded[index], self.dtype[index])

    def degree(self, *axes: str) -> Ints:
        """Number of ranks along some axes, at least one."""
        return reduce(np.multiply, (self.degrees[column_of(axis)] for axis in axes))

    @cached_property
    def size(self) -> Ints:
        """Number of ranks of the mesh."""
        return reduce(np.multiply, self.degrees)

    @cached_property
    def shares(self) -> Ints:
        """Number of parts into which ranks divide a batch."""
        return self.degree(*axes_dividing(Divided.ITEMS))

    @cached_property
    def copies(self) -> Ints:
        """Number of ranks that compute with the same parameters."""
        return self.degree(*axes_dividing(*COPIES))

    @cached_property
    def stages(self) -> Ints:
        """Number of pipeline stages."""
        return self.degree(*axes_dividing(Divided.LAYERS))

    @cached_property
    def cuts(self) -> Ints:
        """Number of parts into which matrices are cut."""
        return self.degree(*axes_dividing(Divided.MATRICES))

    @cached_property
    def parts(self) -> Ints:
        """Number of consecutive ranks that hold one copy of a stage, each a different part."""
        return np.where(self.sharded, self.copies * self.cuts, self.cuts)

    @cached_property
    def codes(self) -> Ints:
        """Integer code of each layout. Equal codes mean equal layouts."""
        code = self.first * 65536 + self.size
        # The degree of the first axis follows from the size and the others.
        others = self.degrees[1:]
        bits = _DEGREE_BITS // len(others)
        for degrees in others:
            assert degrees.size == 0 or degrees.max() < 1 << bits, "degrees fit their bits"
            code = (code << bits) + degrees
        return (code * 2 + self.sharded) * len(TYPES) + self.dtype


@lru_cache(maxsize=64)
def find_nodes(cluster: Cluster) -> Ints:
    """Find the node of every rank, [ranks]."""
    return np.repeat(np.arange(cluster.nodes), np.diff(cluster.bounds))


def name_mixing(role: str, source: str) -> str:
    """Return the name in `LinkTransfers` of the parameter sets that move when `source` is mixed into its moving
    average `role`."""
    return f"{source} mixed into {role}"


def name_refreshing(graph: DataflowGraph, call: Call, role: str, parts: TrainableParts) -> str:
    """Return the name in `LinkTransfers` of the parameter sets of a role that a call changes. It is the role itself
    if the call changes all sets."""
    everything = changed_sets(graph, call, role, parts) == set_names(role, parts)
    return role if everything else f"{role} after {call.name}"
