"""Seconds of bringing a role's parameters from layout to layout, for many pairs of layouts at once."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from realrl.layout.links import Links
from realrl.plan.cluster import Cluster
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

    def placements(self) -> list[Placement]:
        """As placements, whose micro-batches say nothing."""
        rows = zip(*(c.tolist() for c in (self.first, self.size, self.tp, self.pp)), strict=True)
        return [Placement(Mesh(f, n), Strategy(n // (tp * pp), tp, pp)) for f, n, tp, pp in rows]


class Transfers(Protocol):
    """What reallocation costs."""

    def seconds(self, role: str, source: Layouts, target: Layouts) -> Floats:
        """Seconds of each pair; 0 for two equal layouts."""
        ...

    def at_least(self, role: str, source: Layouts, target: Layouts) -> Floats:
        """Seconds that each pair takes at the least, wherever meshes of these sizes lie."""
        ...


class PairTransfers:
    """Transfers by a function of one pair, with no bound better than 0."""

    def __init__(self, seconds: Callable[[str, Placement, Placement], float]) -> None:
        self._seconds = seconds

    def seconds(self, role: str, source: Layouts, target: Layouts) -> Floats:
        """See `Transfers`."""
        pairs = zip(source.placements(), target.placements(), strict=True)
        return np.array([self._seconds(role, a, b) if a != b else 0.0 for a, b in pairs], dtype=np.float64)

    def at_least(self, role: str, source: Layouts, target: Layouts) -> Floats:
        """See `Transfers`."""
        return np.zeros(len(source.first))


@dataclass(frozen=True)
class LinkTransfers:
    """Transfers by the bytes that pass the busiest ports, as `layout.reallocate` schedules them.

    A node takes in once what its devices need and none of them holds, a device its part. What is sent leaves
    the nodes, or the devices, of the source in equal shares. Layers and tensors are taken as divisible without
    limit, so what a node holds is a box of fractions of the model: some layers, some part of the tensor
    dimension. Over random pairs the median ratio to what `layout.reallocate` needs is 1.0.
    """

    cluster: Cluster
    role_bytes: Mapping[str, float]
    """All parameters of a role, in the width in which they are sent."""
    links: Links

    def seconds(self, role: str, source: Layouts, target: Layouts) -> Floats:
        """See `Transfers`."""
        held, needed = self._boxes(source), self._boxes(target)
        inside = _overlap(held[0], held[1], needed[0], needed[1])
        inside *= _overlap(held[2], held[3], needed[2], needed[3])
        missing = (needed[1] - needed[0]) * (needed[3] - needed[2]) - inside
        sent = np.minimum(missing.sum(axis=0), 1.0) / (held[1] > held[0]).sum(axis=0)
        busiest = np.maximum(missing.max(axis=0), sent)
        return self._total(role, busiest, source, target, _same(source, target, where=True))

    def at_least(self, role: str, source: Layouts, target: Layouts) -> Floats:
        """See `Transfers`."""
        widest = []
        for layouts in (source, target):
            low, high, left, right = self._boxes(layouts)
            widest.append(((high - low).max(axis=0), (right - left).max(axis=0)))
        (layers, part), (layers_needed, part_needed) = widest
        missing = layers_needed * part_needed - np.minimum(layers, layers_needed) * np.minimum(
            part, part_needed
        )
        return self._total(role, missing, source, target, _same(source, target, where=False))

    def _total(
        self, role: str, missing: Floats, source: Layouts, target: Layouts, same: NDArray[np.bool_]
    ) -> Floats:
        network = np.maximum(missing, 0.0) / self.links.node_bytes_per_s
        parts = np.minimum(target.tp * target.pp, source.size)
        device = 1 / (parts * self.links.device_bytes_per_s)
        seconds = self.role_bytes[role] * np.maximum(network, device) + self.links.latency_s
        return np.where(same, 0.0, seconds)

    def _boxes(self, layouts: Layouts) -> tuple[Floats, Floats, Floats, Floats]:
        """First and last layer, first and last part of the tensor dimension that each node [nodes, pairs]
        holds, as fractions of the model; empty where it holds nothing."""
        start = np.arange(self.cluster.nodes)[:, None] * self.cluster.devices_per_node
        a = np.maximum(start - layouts.first, 0)
        b = np.minimum(start + self.cluster.devices_per_node - layouts.first, layouts.size) - 1
        present = a <= b
        stage = layouts.size // layouts.pp
        layers = (
            np.where(present, a // stage, 0) / layouts.pp,
            np.where(present, b // stage + 1, 0) / layouts.pp,
        )
        whole = (b - a + 1 >= layouts.tp) | (a % layouts.tp > b % layouts.tp)
        left = np.where(whole, 0, a % layouts.tp) / layouts.tp
        right = np.where(whole, layouts.tp, b % layouts.tp + 1) / layouts.tp
        return *layers, np.where(present, left, 0), np.where(present, right, 0)


def _overlap(a: Floats, b: Floats, c: Floats, d: Floats) -> Floats:
    return np.maximum(np.minimum(b, d) - np.maximum(a, c), 0)


def _same(source: Layouts, target: Layouts, *, where: bool) -> NDArray[np.bool_]:
    """Whether pairs are equal; `where`: in position, too."""
    equal = (source.size == target.size) & (source.tp == target.tp) & (source.pp == target.pp)
    return equal & (source.first == target.first) if where else equal


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
