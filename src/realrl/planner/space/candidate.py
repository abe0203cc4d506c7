"""Candidates are the ways to run a call, with their costs. This file has them one by one, and as columns."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from operator import attrgetter
from typing import Any, Self

import numpy as np

from realrl.plan.axes import Degrees
from realrl.plan.placement import Dtype, Placement
from realrl.planner.moves.transfers import Layouts
from realrl.program.arrays import Bools, Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Placement and offloading of a call, with its costs. Bytes are those of the peak device of the mesh."""

    placement: Placement
    seconds: float
    """Seconds of the call itself, once its parameters and inputs are in place, without `capture_seconds`."""
    weights_bytes: float
    """Bytes of a copy of the role's parameters in this layout."""
    resident_bytes: float
    """Bytes that the role keeps in device memory between calls if this is its primary placement (home)."""
    working_bytes: float
    """Further bytes that the call needs while it runs, beyond resident bytes and a copy of the parameters."""
    base_bytes: float = 0.0
    """Part of the resident bytes: frozen weights that other roles share if their home has this layout."""
    communicator_bytes: float = 0.0
    """Bytes of the NCCL communicators of this layout. Calls of equal layouts share them."""
    host_bytes: float = 0.0
    """Bytes of host memory per device for offloaded state. 0 except at the role's primary placement."""
    offload: bool = False
    """Whether the role's parameters are offloaded between uses. False except at the role's primary placement."""
    offload_optimizer: bool = False
    """Whether gradients and optimizer state are offloaded between uses. False except at the role's primary
    placement."""
    keep: bool = False
    """Whether copies of the role's parameters in other layouts are kept between uses, and refreshed whenever the
    parameters change. False except at the role's primary placement."""
    load_seconds: float = 0.0
    """Seconds to load offloaded parameters."""
    unload_seconds: float = 0.0
    """Seconds to offload parameters again. 0 if they never change."""
    capture_seconds: float = 0.0
    """Further seconds of the call if its parameters have moved in this step (`CallCost.captures`)."""

    @property
    def layout(self) -> tuple[int, Degrees, bool, Dtype | None]:
        """Key of the layout of the parameters. Equal keys mean equal layouts."""
        s = self.placement.strategy
        return self.placement.mesh.first, s.all_degrees, s.shards_parameters, s.dtype


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs in columns named like the fields of `Candidate`. Their shape is [candidates] or [calls, plans]."""

    seconds: Floats
    weights_bytes: Floats
    resident_bytes: Floats
    working_bytes: Floats
    base_bytes: Floats
    communicator_bytes: Floats
    host_bytes: Floats
    load_seconds: Floats
    unload_seconds: Floats
    capture_seconds: Floats
    offload: Bools
    offload_optimizer: Bools
    keep: Bools
    sequence_parallel: Bools
    """Whether sequence parallelism is on. Calls can share a replica only if they agree on it."""

    def __getitem__(self, index: "Ints | Bools | slice") -> Self:
        return type(self)(**{field.name: getattr(self, field.name)[index] for field in fields(self)})


COSTS = tuple(field.name for field in fields(Costs) if field.name != "sequence_parallel")
"""Columns that are fields of a `Candidate`."""
_FLAGS = ("offload", "offload_optimizer", "keep", "sequence_parallel")
_read = attrgetter(*COSTS, "placement.strategy.sequence_parallel")


def count_bytes_alone(costs: Candidate | Costs, *, is_home: bool) -> Any:
    """Compute the least bytes that a device needs while a call runs, as a number or a column.

    `is_home`: whether this is the role's primary placement.
    """
    always = costs.working_bytes + costs.communicator_bytes
    if not is_home:
        return always + costs.weights_bytes
    return always + costs.resident_bytes + costs.weights_bytes * costs.offload


def find_undominated(
    groups: Ints, columns: Sequence[Floats], also: Callable[[Ints], Bools] | None = None
) -> Ints:
    """Find the rows that no other row of their group matches or beats in every column. Of equal rows, the first
    stays.

    `groups`: number of each row's group. `also`: a function for a further condition. Given rows, [groups, members],
    it returns whether one member is at least as good as another, [groups, one, another].
    """
    sizes = np.bincount(groups)
    members = np.argsort(groups, kind="stable")
    beaten = np.zeros(len(groups), dtype=bool)
    for size in np.unique(sizes):
        # Compare groups of equal size together, [groups, members].
        among = members[sizes[groups[members]] == size].reshape(-1, size)
        better = np.ones((*among.shape, size), dtype=bool) if also is None else also(among)
        for column in columns:
            of = column[among]
            better &= of[:, :, None] <= of[:, None]
        equal = better & better.transpose(0, 2, 1)
        earlier = np.tri(size, k=-1, dtype=bool).T
        beaten[among] = ((better & ~equal) | (equal & earlier)).any(axis=1)
    return np.flatnonzero(~beaten)


class CandidateTable(tuple[Candidate, ...]):
    """Candidates of a call. Their layouts and costs as columns are computed once, on first use."""

    @classmethod
    def of(cls, candidates: Iterable[Candidate]) -> "CandidateTable":
        """Build a table of candidates. If they already form a table, return it unchanged."""
        return candidates if isinstance(candidates, cls) else cls(candidates)

    @cached_property
    def layouts(self) -> Layouts:
        return Layouts.of(candidate.placement for candidate in self)

    @cached_property
    def costs(self) -> Costs:
        names = (*COSTS, "sequence_parallel")
        table = np.array([*map(_read, self)], dtype=np.float64).reshape(-1, len(names))
        columns: dict[str, Any] = {
            name: np.ascontiguousarray(column, dtype=bool if name in _FLAGS else np.float64)
            for name, column in zip(names, table.T, strict=True)
        }
        for name in ("load_seconds", "unload_seconds"):
            columns[name] = columns[name] * columns["offload"]
        return Costs(**columns)

    def select(self, numbers: Ints) -> "CandidateTable":
        selected = CandidateTable(map(self.__getitem__, numbers.tolist()))
        selected.layouts = self.layouts[numbers]
        selected.costs = self.costs[numbers]
        return selected
