"""Tables of candidates, with their costs as columns."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from operator import attrgetter
from typing import Self

import numpy as np

from realrl.planner.moves.transfers import Layouts
from realrl.planner.space.candidate import Candidate
from realrl.program.arrays import Bools, Floats, Ints


@dataclass(frozen=True, kw_only=True)
class CandidateCosts:
    """Costs of candidates, one entry per candidate, or [calls, plans] once they are assigned; see `Candidate`."""

    seconds: Floats
    captures: Floats
    """Further seconds if parameters have moved."""
    load: Floats
    """Seconds to load offloaded parameters; 0 of those that are not."""
    unload: Floats
    weights: Floats
    resident: Floats
    working: Floats
    base: Floats
    """Of the resident bytes, those of weights that other roles may share."""
    communicators: Floats
    host: Floats
    sequence_parallel: Bools
    """Whether sequence parallelism is on; replicas can only be shared by calls that agree."""
    offloaded: Bools
    """Whether parameters are offloaded to host memory between uses."""
    offloads_optimizer: Bools
    """Whether gradients and optimizer state are."""
    keeps: Bools
    """Whether copies of the role's parameters in other layouts are kept."""

    @classmethod
    def of(cls, candidates: Iterable[Candidate]) -> "CandidateCosts":
        """Build columns from candidates, in their order."""
        rows = [*map(_read, candidates)]
        values = np.array([row[: len(_FLOATS)] for row in rows], dtype=np.float64).reshape(-1, len(_FLOATS))
        flags = np.array([row[len(_FLOATS) :] for row in rows], dtype=bool).reshape(-1, len(_FLAGS))
        columns = {
            name: np.ascontiguousarray(column)
            for names, table in ((_FLOATS, values), (_FLAGS, flags))
            for name, column in zip(names, table.T, strict=True)
        }
        for name in ("load", "unload"):
            columns[name] *= columns["offloaded"]
        return CandidateCosts(**columns)

    def bytes_alone(self, *, is_home: bool) -> Floats:
        """See `Candidate.bytes_alone`."""
        if not is_home:
            return self.working + self.weights + self.communicators
        return self.resident + self.communicators + self.working + self.weights * self.offloaded

    def __getitem__(self, index: "Ints | slice") -> Self:
        return type(self)(**{field.name: getattr(self, field.name)[index] for field in fields(self)})


_FLOATS = {
    "seconds": "seconds",
    "captures": "capture_seconds",
    "load": "load_seconds",
    "unload": "unload_seconds",
    "weights": "weights_bytes",
    "resident": "resident_bytes",
    "working": "working_bytes",
    "base": "base_bytes",
    "communicators": "communicator_bytes",
    "host": "host_bytes",
}
_FLAGS = {
    "sequence_parallel": "placement.strategy.sequence_parallel",
    "offloaded": "offload",
    "offloads_optimizer": "offload_optimizer",
    "keeps": "keep",
}
"""Attribute of a candidate that is in each column."""
_read = attrgetter(*_FLOATS.values(), *_FLAGS.values())


class CandidateTable(tuple[Candidate, ...]):
    """Candidates of a call, with their layouts and costs as columns, which are read from them only once."""

    @classmethod
    def of(cls, candidates: Iterable[Candidate]) -> "CandidateTable":
        """Build the table of candidates, unless they are one."""
        return candidates if isinstance(candidates, cls) else cls(candidates)

    @cached_property
    def layouts(self) -> Layouts:
        """Layout of each candidate."""
        return Layouts.of(candidate.placement for candidate in self)

    @cached_property
    def costs(self) -> CandidateCosts:
        """Costs of each candidate."""
        return CandidateCosts.of(self)

    def select(self, numbers: Ints) -> "CandidateTable":
        """Select candidates by their indices."""
        selected = CandidateTable(map(self.__getitem__, numbers.tolist()))
        selected.layouts = self.layouts[numbers]
        selected.costs = self.costs[numbers]
        return selected
