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

_DEGREE_BITS = 32
"""Number of bits of a layout's code for the number of its degrees."""
_NUMBERS: dict[tuple[int, ...], int] = {}
"""Number of each combination of degrees that a code has had."""


@dataclass(frozen=True)
class Layouts:
    """Layouts as columns, with one entry per layout."""

    first: Ints
    """First rank of the mesh."""
    degrees: tuple[Ints, ...]
    """Degrees of parallelism, one column per axis, in the order of `plan.axes.AXES`."""
    ep: Ints
    """Degree of expert parallelism, whose ranks are among those of `degrees` (`Strategy.ep`)."""
    vpp: Ints
    """Number of runs of layers of each pipeline stage (`Strategy.vpp`)."""
    sharded: Ints
    """1 if ranks with the same parameters shard them (ZeRO-3), otherwise 0."""
    dtype: Ints
    """Data type of the parameters, as an index in `TYPES`."""

    @classmethod
    def of(cls, placements: Iterable[Placement]) -> "Layouts":
        """Build columns from placements, in their order."""
        rows = [
            (p.mesh.first, s.shards_parameters, TYPES.index(s.dtype), s.ep, s.vpp, *s.degrees.values)
            for p in placements
            for s in [p.strategy]
        ]
        table = np.array(rows, dtype=np.int64).reshape(len(rows), 5 + len(axis_names()))
        # Each column is contiguous, since the search selects among some hundred thousand rows.
        first, sharded, dtype, ep, vpp, *degrees = (np.ascontiguousarray(column) for column in table.T)
        return cls(first, tuple(degrees), ep, vpp, sharded, dtype)

    def __getitem__(self, index: Ints) -> "Layouts":
        degrees = tuple(degree[index] for degree in self.degrees)
        return Layouts(
            self.first[index],
            degrees,
            self.ep[index],
            self.vpp[index],
            self.sharded[index],
            self.dtype[index],
        )

    def for_experts(self) -> "Layouts":
        """Make the experts' own layouts (`Strategy.for_experts`)."""
        apart = self.size // self.stages // self.ep
        folded = {**dict.fromkeys(axis_names(), np.ones_like(self.ep)), "dp": apart, "ep": self.ep}
        for axis in axes_dividing(Divided.LAYERS):
            folded[axis] = self.degree(axis)
        degrees = tuple(
            np.where(self.ep > 1, folded[axis], own)
            for axis, own in zip(axis_names(), self.degrees, strict=True)
        )
        sharded = np.where((self.ep > 1) & (apart == 1), 0, self.sharded)
        return Layouts(self.first, degrees, np.ones_like(self.ep), self.vpp, sharded, self.dtype)

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
    def runs(self) -> Ints:
        """Number of runs of layers of all pipeline stages together."""
        return self.stages * self.vpp

    @cached_property
    def cuts(self) -> Ints:
        """Number of parts into which matrices, or the experts of a layer, are cut."""
        return self.degree(*axes_dividing(Divided.MATRICES, Divided.EXPERTS))

    @cached_property
    def parts(self) -> Ints:
        """Number of consecutive ranks that hold one copy of a stage, each a different part."""
        return np.where(self.sharded, self.copies * self.cuts, self.cuts)

    @cached_property
    def codes(self) -> Ints:
        """Integer code of each layout. Equal codes mean equal layouts."""
        columns = [*self.degrees, self.ep, self.vpp]
        shapes, which = np.unique(np.stack(columns), axis=1, return_inverse=True)
        # Degrees are numbered for the whole process, because codes of several objects are compared.
        numbers = np.array([_NUMBERS.setdefault(tuple(shape), len(_NUMBERS)) for shape in shapes.T.tolist()])
        degrees = numbers[which.reshape(-1)] if len(numbers) else np.zeros_like(self.first)
        return (
            ((self.first << _DEGREE_BITS) + degrees) * 2 * len(TYPES) + self.sharded * len(TYPES) + self.dtype
        )


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
