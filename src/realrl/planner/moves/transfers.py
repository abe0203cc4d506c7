"""Interface of reallocation time models, vectorised over pairs of layouts."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np

from realrl.dataflow.call import Call
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.axes import Degrees, Divided, axes_dividing, axis_names, column_of
from realrl.plan.cluster import Cluster
from realrl.plan.placement import DTYPES, Dtype, Mesh, Placement, Strategy
from realrl.program.arrays import Floats, Ints
from realrl.program.order import TrainableParts, changed_sets, set_names

TYPES: tuple[Dtype | None, ...] = (None, *DTYPES.values())
"""Data types of parameters: the role's own, or another one."""
HALF = TYPES.index("bfloat16")

_DEGREE_BITS = 28
"""Bits of a layout's code for the degrees of all axes but one; the mesh and the data type have the others."""

_FEW_PAIRS = 1 << 15
"""Pairs of layouts that are kept apart from older ones."""


@dataclass(frozen=True)
class Layouts:
    """Layouts as columns."""

    first: Ints
    """First rank of the mesh."""
    degrees: Ints
    """Degrees of parallelism, in the order of `plan.axes.AXES`: [..., axes]."""
    sharded: Ints
    """1 if data-parallel ranks shard the parameters (ZeRO-3), otherwise 0."""
    dtype: Ints
    """Data type of the parameters: the place in `TYPES`."""

    @classmethod
    def of(cls, placements: Iterable[Placement]) -> "Layouts":
        """Build columns from placements, in their order."""
        rows = [
            (p.mesh.first, s.shards_parameters, TYPES.index(s.dtype), *s.degrees.values)
            for p in placements
            for s in [p.strategy]
        ]
        table = np.array(rows, dtype=np.int64).reshape(len(rows), 3 + len(axis_names()))
        first, sharded, dtype, degrees = (
            np.ascontiguousarray(part) for part in (*table[:, :3].T, table[:, 3:])
        )
        return cls(first, degrees, sharded, dtype)

    def __getitem__(self, index: Ints) -> "Layouts":
        return Layouts(*(getattr(self, field.name)[index] for field in fields(self)))

    def degree(self, *axes: str) -> Ints:
        """Number of ranks along some axes."""
        return np.asarray(self.degrees[..., [column_of(axis) for axis in axes]].prod(axis=-1))

    @cached_property
    def size(self) -> Ints:
        """Ranks of the mesh."""
        return np.asarray(self.degrees.prod(axis=-1))

    @cached_property
    def shares(self) -> Ints:
        """Number of shares of a batch that ranks work on."""
        return self.degree(*axes_dividing(Divided.ITEMS))

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
        """Number of ranks of a stage that hold different parts of it: consecutive ones."""
        return np.where(self.sharded, self.shares * self.cuts, self.cuts)

    @cached_property
    def codes(self) -> Ints:
        """Integer code of each layout; equal codes mean equal layouts."""
        code = self.first * 65536 + self.size
        # The degree of the first axis follows from the size and the others.
        others = self.degrees[..., 1:]
        bits = _DEGREE_BITS // others.shape[-1]
        assert others.size == 0 or others.max() < 1 << bits, "degrees fit their bits"
        for column in range(others.shape[-1]):
            code = (code << bits) + others[..., column]
        return (code * 2 + self.sharded) * len(TYPES) + self.dtype

    def placements(self) -> list[Placement]:
        """Convert to placements; their micro-batch sizes are defaults and carry no meaning."""
        columns = (self.first, self.size, self.sharded, self.dtype, self.degrees)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [
            Placement(
                Mesh(first, size),
                Strategy(degrees=Degrees(tuple(degrees)), zero=3 if sharded else 1, dtype=TYPES[dtype]),
            )
            for first, size, sharded, dtype, degrees in rows
        ]


@lru_cache(maxsize=64)
def find_nodes(cluster: Cluster) -> Ints:
    """Find the node of every rank, [ranks]."""
    return np.repeat(np.arange(cluster.nodes), np.diff(cluster.bounds))


def name_mixing(role: str, source: str) -> str:
    """Name, for `Transfers`, the parameter sets of a role that is a moving average of another role."""
    return f"{source} mixed into {role}"


def name_refreshing(graph: DataflowGraph, call: Call, role: str, parts: TrainableParts) -> str:
    """Name the parameter sets of a role that a call changes, for `Transfers`: the role where these are all."""
    everything = changed_sets(graph, call, role, parts) == set_names(role, parts)
    return role if everything else f"{role} after {call.name}"


class Transfers(Protocol):
    """Time model of reallocations, by role, `name_mixing` or `name_refreshing`."""

    def seconds(self, role: str, source: Layouts, target: Layouts) -> Floats:
        """Compute the seconds of each pair; 0 for two equal layouts."""
        ...

    def at_least(self, role: str, source: Layouts, target: Layouts) -> Floats:
        """Compute a lower bound on the seconds from each source to each target, [sources, targets].

        It holds for all positions of meshes with these sizes.
        """
        ...


class TransferTable:
    """Reallocation times between two lists of layouts of a role, computed on first use."""

    def __init__(self, transfers: Transfers, role: str, sources: Layouts, targets: Layouts) -> None:
        self._transfers = transfers
        self.role = role
        self._sources = sources
        self._targets = targets
        # Of billions of pairs some hundred thousand are used, here and there. New ones are kept apart until they
        # are some thousands, so that the others need not be sorted again each time.
        self._many, self._few = (_KnownPairs(np.zeros(0, np.int64), np.zeros(0)) for _ in range(2))

    def __call__(self, source: Ints, target: Ints) -> Floats:
        """Return the seconds of pairs of indices."""
        pairs, which = np.unique(source * len(self._targets.first) + target, return_inverse=True)
        seconds = np.full(len(pairs), np.nan)
        for known in (self._many, self._few):
            known.fill(pairs, seconds)
        missing = np.isnan(seconds)
        if missing.any():
            i, j = np.divmod(pairs[missing], len(self._targets.first))
            seconds[missing] = self._transfers.seconds(self.role, self._sources[i], self._targets[j])
            self._few = self._few.merge(pairs[missing], seconds[missing])
            if len(self._few.pairs) > _FEW_PAIRS:
                self._many = self._many.merge(self._few.pairs, self._few.seconds)
                self._few = _KnownPairs(np.zeros(0, np.int64), np.zeros(0))
        return seconds[which.reshape(source.shape)]


@dataclass(frozen=True)
class _KnownPairs:
    """Seconds of pairs, in ascending order of their numbers."""

    pairs: Ints
    seconds: Floats

    def fill(self, pairs: Ints, seconds: Floats) -> None:
        """Fill in the seconds of those pairs that are known."""
        if len(self.pairs):
            place = np.minimum(np.searchsorted(self.pairs, pairs), len(self.pairs) - 1)
            np.copyto(seconds, self.seconds[place], where=self.pairs[place] == pairs)

    def merge(self, pairs: Ints, seconds: Floats) -> "_KnownPairs":
        """Add pairs that are not known."""
        place = np.searchsorted(self.pairs, pairs)
        return _KnownPairs(np.insert(self.pairs, place, pairs), np.insert(self.seconds, place, seconds))
