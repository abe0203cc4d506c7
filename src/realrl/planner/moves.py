"""Seconds of a reallocation without its routes: what the ports must carry, whoever sends what.

Tensors are taken to be cut evenly over tensor ranks, and the ports of senders to be loaded as evenly as holders and
those who received something can share it. `layout.reallocate` finds routes that come near this bound; computing
it takes a fraction of a millisecond, so that a search can ask for all pairs of layouts.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import lcm

from realrl.config.shape import Head, ModelShape
from realrl.layout.links import Links
from realrl.layout.ranges import stage_layers
from realrl.plan.placement import Placement
from realrl.planner.cluster import ClusterSpec
from realrl.planner.sizes import LocalSizes


@dataclass(frozen=True)
class _Piece:
    """Neighbouring layers, or an end of the model, that the same stages of either layout hold."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    elements: int
    """Of all tensor ranks together."""


class Moves:
    """Reallocations of one model on a cluster."""

    def __init__(self, spec: ClusterSpec, links: Links, shape: ModelShape, head: Head) -> None:
        self._spec, self._links, self._shape = spec, links, shape
        whole = LocalSizes(shape, head, 1)
        self._layer, self._embedding, self._end = whole.parts
        self._tied = shape.tied_embeddings and head == "lm"
        self._cache: dict[tuple[object, ...], tuple[float, float]] = {}

    def seconds(self, source: Placement, target: Placement, element_bytes: int) -> float:
        """Time of the busiest port, and a latency for each of its messages."""
        if source.layout == target.layout:
            return 0.0
        key = self._key(source, target)
        if key not in self._cache:
            self._cache[key] = _Move(self, source, target).seconds()
        per_byte, latency = self._cache[key]
        return per_byte * element_bytes + latency

    def _key(self, source: Placement, target: Placement) -> tuple[object, ...]:
        """Equal for moves that differ only by whole nodes of one group."""
        groups = [self._spec.group_index(p.mesh.first) for p in (source, target)]
        start = source.mesh.first
        if groups[0] == groups[1]:
            start %= self._spec.groups[groups[0]].devices_per_node
        a, b = source.strategy, target.strategy
        degrees = (a.dp, a.tp, a.pp, b.dp, b.tp, b.pp)
        return (*degrees, *groups, start, target.mesh.first - source.mesh.first)

    @property
    def links(self) -> Links:
        """Bandwidths."""
        return self._links

    def node(self, rank: int) -> int:
        """The node of a rank."""
        return self._spec.node(rank)

    def pieces(self, before: int, after: int) -> Iterator[_Piece]:
        """The model cut wherever either pipeline cuts it; degrees before and after."""
        layers = self._shape.layers
        stages = [
            [stage for stage, part in enumerate(stage_layers(layers, pp)) for _ in part]
            for pp in (before, after)
        ]
        # A tied embedding is also the head.
        first, second = (tuple(sorted({0, pp - 1 if self._tied else 0})) for pp in (before, after))
        yield _Piece(first, second, self._embedding)
        cuts = [i for i in range(1, layers) if any(s[i] != s[i - 1] for s in stages)]
        for low, high in pairwise([0, *cuts, layers]):
            yield _Piece((stages[0][low],), (stages[1][low],), (high - low) * self._layer)
        yield _Piece((before - 1,), (after - 1,), self._end)


class _Move:
    """One reallocation. Parts of the tensor dimension are bits of a mask, `bits` of them in all."""

    def __init__(self, moves: Moves, source: Placement, target: Placement) -> None:
        self._moves, self._source, self._target = moves, source, target
        self._bits = lcm(source.strategy.tp, target.strategy.tp)
        self._pieces = list(moves.pieces(source.strategy.pp, target.strategy.pp))
        self._by_target: defaultdict[int, list[_Piece]] = defaultdict(list)
        for piece in self._pieces:
            for stage in piece.targets:
                self._by_target[stage].append(piece)

    def seconds(self) -> tuple[float, float]:
        """(of the busiest port at a byte per element, latency)"""
        links, received, entered = self._moves.links, self._received, self._entered
        spread = len({*self._source.ranks, *self._target.ranks})
        out = max(self._first_from_devices, sum(received.values()) / spread)
        nodes = len({self._moves.node(rank) for rank in (*self._source.ranks, *self._target.ranks)})
        node_out = max(self._first_from_nodes, sum(entered.values()) / nodes)
        device = max(max(received.values()), out) / links.device_bytes_per_s
        network = max(max(entered.values()), node_out) / links.node_bytes_per_s
        shared = self._bits // self._target.strategy.tp
        messages = max(map(len, self._by_target.values())) * min(shared, self._source.strategy.tp)
        return max(device, network), 2 * messages * links.latency_s if max(received.values()) else 0.0

    def _mask(self, placement: Placement, rank: int) -> int:
        width = self._bits // placement.strategy.tp
        return ((1 << width) - 1) << placement.tp_index(rank) * width

    def _holds(self, rank: int) -> tuple[int, int]:
        """(stage, mask) of a rank of the source; nothing for others."""
        mesh = self._source.mesh
        if not mesh.first <= rank < mesh.first + mesh.size:
            return -1, 0
        return self._source.pp_index(rank), self._mask(self._source, rank)

    @cached_property
    def _received(self) -> dict[int, float]:
        """Elements that each rank of the target lacks."""
        result = {}
        for rank in self._target.ranks:
            needs, (stage, held) = self._mask(self._target, rank), self._holds(rank)
            whole, kept = needs.bit_count(), (needs & held).bit_count()
            result[rank] = sum(
                piece.elements * (whole - (kept if stage in piece.sources else 0)) / self._bits
                for piece in self._by_target[self._target.pp_index(rank)]
            )
        return result

    @cached_property
    def _masks(self) -> tuple[dict[int, dict[int, int]], dict[int, dict[int, int]]]:
        """Per layout, node -> stage -> parts that the ranks of the node have, or need."""
        found: tuple[dict[int, dict[int, int]], dict[int, dict[int, int]]] = ({}, {})
        for place, by_node in zip((self._source, self._target), found, strict=True):
            for rank in place.ranks:
                stages = by_node.setdefault(self._moves.node(rank), {})
                stage = place.pp_index(rank)
                stages[stage] = stages.get(stage, 0) | self._mask(place, rank)
        return found

    def _missing(self, piece: _Piece, node: int) -> int:
        """Parts of a piece that a node needs and does not have."""
        missing, stages = 0, self._masks[1].get(node, {})
        for stage in piece.targets:
            missing |= stages.get(stage, 0)
        return missing & ~self._held(piece, node)

    def _held(self, piece: _Piece, node: int) -> int:
        """Parts of a piece that a node has."""
        found, stages = 0, self._masks[0].get(node, {})
        for stage in piece.sources:
            found |= stages.get(stage, 0)
        return found

    @cached_property
    def _entered(self) -> dict[int, float]:
        """Elements that enter each node of the target."""
        loads = dict.fromkeys(self._masks[1], 0.0)
        for node, stages in self._masks[1].items():
            for piece in self._pieces:
                if any(stage in stages for stage in piece.targets):
                    loads[node] += piece.elements * self._missing(piece, node).bit_count() / self._bits
        return loads

    @cached_property
    def _first_from_nodes(self) -> float:
        """Elements that the busiest node sends when each piece that others need leaves its holders once."""
        loads: defaultdict[int, float] = defaultdict(float)
        for piece in self._pieces:
            missing = 0
            for node in self._masks[1]:
                missing |= self._missing(piece, node)
            holders = {node: self._held(piece, node) & missing for node in self._masks[0]} if missing else {}
            for node, mask in holders.items():
                for bit in (b for b in range(self._bits) if mask >> b & 1):
                    sharing = sum(other >> bit & 1 for other in holders.values())
                    loads[node] += piece.elements / self._bits / sharing
        return max(loads.values(), default=0.0)

    @cached_property
    def _first_from_devices(self) -> float:
        """The same for devices: a rank sends its share of what anybody lacks who holds none of it."""
        lacking: defaultdict[_Piece, int] = defaultdict(int)
        for rank in self._target.ranks:
            stage, held = self._holds(rank)
            needs = self._mask(self._target, rank)
            for piece in self._by_target[self._target.pp_index(rank)]:
                lacking[piece] |= needs & ~(held if stage in piece.sources else 0)
        strategy, width = self._source.strategy, self._bits // self._source.strategy.tp
        loads: defaultdict[tuple[int, int], float] = defaultdict(float)
        for piece, everything in lacking.items():
            share = piece.elements / self._bits / strategy.dp / len(piece.sources)
            for t in range(strategy.tp if everything else 0):
                parts = (everything >> t * width & ((1 << width) - 1)).bit_count()
                for stage in piece.sources:
                    loads[stage, t] += parts * share
        return max(loads.values(), default=0.0)
