"""Seconds of bringing a role's parameters from layout to layout, for many pairs of layouts at once."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from realrl.plan.placement import Mesh, Placement, Strategy

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Layouts:
    """Layouts as columns: first rank and size of the mesh, tensor and pipeline degrees."""

    first: Ints
    size: Ints
    tp: Ints
    pp: Ints

    @classmethod
    def of(cls, placements: Iterable[Placement]) -> "Layouts":
        """The layouts of placements, in their order."""
        rows = [(p.mesh.first, p.mesh.size, p.strategy.tp, p.strategy.pp) for p in placements]
        columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        return cls(*(np.ascontiguousarray(column) for column in columns))

    def __getitem__(self, index: Ints) -> "Layouts":
        return Layouts(self.first[index], self.size[index], self.tp[index], self.pp[index])

    @property
    def codes(self) -> Ints:
        """A number for each, equal exactly where layouts are."""
        return ((self.first * 65536 + self.size) * 4096 + self.tp) * 4096 + self.pp

    def placements(self) -> list[Placement]:
        """As placements, whose micro-batches say nothing."""
        rows = zip(*(c.tolist() for c in (self.first, self.size, self.tp, self.pp)), strict=True)
        return [Placement(Mesh(f, n), Strategy(n // (tp * pp), tp, pp)) for f, n, tp, pp in rows]


def mixing(role: str, source: str) -> str:
    """What `Transfers` knows by this name: the parameter sets in which a role follows another one."""
    return f"{source} mixed into {role}"


class Transfers(Protocol):
    """What reallocation costs, by role or by `mixing`."""

    def seconds(self, role: str, source: Layouts, target: Layouts) -> Floats:
        """Seconds of each pair; 0 for two equal layouts."""
        ...

    def at_least(self, role: str, source: Layouts, target: Layouts) -> Floats:
        """Seconds that each pair takes at the least, wherever meshes of these sizes lie."""
        ...


class TransferTable:
    """Transfers between two lists of layouts of a role, each pair computed when it is first asked for."""

    def __init__(self, transfers: Transfers, role: str, sources: Layouts, targets: Layouts) -> None:
        self._transfers, self._role, self._sources, self._targets = transfers, role, sources, targets
        # 1 + seconds; 0 is not known yet: memory that stays 0 costs nothing, and most pairs are never asked for.
        self._known = np.zeros((len(sources.first), len(targets.first)))

    def __call__(self, source: Ints, target: Ints) -> Floats:
        """Seconds of pairs of indices."""
        found = self._known[source, target]
        missing = found == 0
        if missing.any():
            wanted = np.unique(source[missing] * self._known.shape[1] + target[missing])
            i, j = np.divmod(wanted, self._known.shape[1])
            self._known[i, j] = 1 + self._transfers.seconds(self._role, self._sources[i], self._targets[j])
            found = self._known[source, target]
        return found - 1
