"""Seconds of reallocations by what the ports of nodes and devices must carry, for many pairs of layouts at once."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from realrl.layout.ranges import stage_layers
from realrl.layout.routing.links import Links
from realrl.layout.sets import BASE
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Placement
from realrl.planner.moves.transfers import Floats, Ints, Layouts
from realrl.planner.workload.sizes import LocalSizes
from realrl.program.memory import Stored

_AT_ONCE = 1 << 16
"""Nodes, or devices, times pairs that are looked at together."""
_PAIR = tuple[Floats, Floats]


@dataclass(frozen=True)
class Weights:
    """A parameter set of a model, in bytes, by where a pipeline cuts it."""

    layers: int
    """Of the model."""
    layer: float
    """Of each layer that the set has."""
    embedding: float
    """Held by the first stage, and by the last one where it is also the head."""
    end: float
    """What follows the layers."""
    tied: bool = False
    held: tuple[int, ...] | None = None
    """Layers that the set has; None for all of them."""

    @classmethod
    def of(cls, model: Stored, width: int, name: str = BASE) -> "Weights":
        """Those of a set of a model whose parameters have so many bytes each."""
        sizes = LocalSizes(model.shape, model.head, 1, model.part).sets[name]
        return cls(
            layers=sizes.layers_of_model,
            layer=sizes.layer[0] * width,
            embedding=sizes.embedding[0] * width,
            end=sizes.end[0] * width,
            tied=sizes.tied,
            held=None if len(sizes.layers) == sizes.layers_of_model else sizes.layers,
        )

    @property
    def stack(self) -> float:
        """Bytes of all layers."""
        return self.layer * (self.layers if self.held is None else len(self.held))

    def cuts(self, pp: int) -> list[float]:
        """Where the stages of a pipeline begin, and the last one ends, counted from the first layer on."""
        bounds = [0.0]
        for part in stage_layers(self.layers, pp):
            layers = len(part) if self.held is None else sum(layer in part for layer in self.held)
            bounds.append(bounds[-1] + layers * self.layer)
        bounds[-1] += self.end
        return bounds


@dataclass(frozen=True)
class _Boxes:
    """What blocks of neighbouring ranks hold, [blocks, pairs]: a stretch of layers by a part of the tensor
    dimension, and of the embedding the same part, or nothing."""

    low: Floats
    high: Floats
    left: Floats
    right: Floats
    embeds: Floats

    @property
    def whole(self) -> _PAIR:
        """Bytes of layers, and the part of the embedding."""
        width = self.right - self.left
        return (self.high - self.low) * width, self.embeds * width

    def common(self, other: "_Boxes") -> _PAIR:
        """The same of what both hold."""
        width = _overlap(self.left, self.right, other.left, other.right)
        layers = _overlap(self.low, self.high, other.low, other.high)
        return layers * width, self.embeds * other.embeds * width


@dataclass(frozen=True)
class _Ports:
    """Bytes per second that devices and nodes take in or send, and seconds of a message; of nodes, or of pairs."""

    device: Floats
    node: Floats
    latency: Floats


@dataclass(frozen=True)
class LinkTransfers:
    """Transfers as `layout.reallocate` schedules them, whoever sends what.

    A node takes in once what its devices need and none of them holds, a device what it needs and does not
    hold. What is sent leaves the nodes that hold it in equal shares, and is passed on by all. Tensors are taken
    to be cut evenly over tensor ranks. Values that are sent have the width of `weights`. Parameter sets are moved
    one after the other.
    """

    cluster: Cluster
    weights: Mapping[str, tuple[Weights, ...]]
    """By role, or by what it is that moves: one for each parameter set."""
    links: tuple[Links, ...]
    """Of each node; the slower ones count between unlike nodes."""
    _cuts: dict[Weights, Floats] = field(default_factory=dict, compare=False, repr=False)

    def seconds(self, role: str, source: Layouts, target: Layouts) -> Floats:
        """See `Transfers`."""
        return self._sum(role, source, target, self._seconds)

    def one(self, role: str, source: Placement, target: Placement) -> float:
        """Seconds of one pair."""
        return float(self.seconds(role, Layouts.of([source]), Layouts.of([target]))[0])

    def at_least(self, role: str, source: Layouts, target: Layouts) -> Floats:
        """See `Transfers`."""
        return self._sum(role, source, target, self._least)

    def _sum(
        self,
        role: str,
        source: Layouts,
        target: Layouts,
        seconds: Callable[[Weights, Layouts, Layouts], Floats],
    ) -> Floats:
        found = np.zeros(len(source.first))
        for part in self._parts(np.arange(len(found)), self.cluster.nodes):
            for weights in self.weights[role]:
                found[part] += seconds(weights, source[part], target[part])
        return found

    def sent(self, role: str, source: Layouts, target: Layouts) -> _PAIR:
        """Bytes that devices receive, and bytes that nodes do, in all."""
        found = []
        for block in (1, self.cluster.devices_per_node):
            received = [self._lacking(weights, source, target, block)[0] for weights in self.weights[role]]
            found.append(np.asarray(np.sum(received, axis=(0, 1))))
        return found[0], found[1]

    @cached_property
    def _ports_of_nodes(self) -> _Ports:
        rows = [(links.device_bytes_per_s, links.node_bytes_per_s, links.latency_s) for links in self.links]
        return _Ports(*np.array(rows).T)

    def _slower(self, source: Layouts, target: Layouts) -> _Ports:
        """Of the nodes where both meshes of pairs begin; a mesh lies on like nodes."""
        ports, per_node = self._ports_of_nodes, self.cluster.devices_per_node
        nodes = source.first // per_node, target.first // per_node
        return _Ports(
            np.minimum(*(ports.device[node] for node in nodes)),
            np.minimum(*(ports.node[node] for node in nodes)),
            np.maximum(*(ports.latency[node] for node in nodes)),
        )

    @staticmethod
    def _parts(pairs: Ints, blocks: int) -> Iterator[Ints]:
        """So few pairs at a time that what is computed of them and so many blocks stays in the caches."""
        step = max(1, _AT_ONCE // blocks)
        return (pairs[i : i + step] for i in range(0, len(pairs), step))

    def _seconds(self, weights: Weights, source: Layouts, target: Layouts) -> Floats:
        per_node, ports = self.cluster.devices_per_node, self._slower(source, target)
        entering, distinct = self._lacking(weights, source, target, per_node)
        everything = entering.sum(axis=0)
        leaving = np.maximum(distinct / self._nodes(source), everything / self._nodes(source, target))
        network = np.maximum(entering.max(axis=0), leaving) / ports.node
        device = self._needed(weights, target) / ports.device
        # Nothing that a device needs can take longer.
        for part in self._parts(np.flatnonzero(device > network), self.cluster.size):
            device[part] = self._ports(weights, source[part], target[part])
        seconds = np.maximum(network, device)
        seconds = np.where(seconds > 0, seconds + self._latency(source, target), 0.0)
        return np.where(_same(source, target, where=True), 0.0, seconds)

    def _least(self, weights: Weights, source: Layouts, target: Layouts) -> Floats:
        held = self._boxes(weights, source, self.cluster.devices_per_node)
        needed = self._boxes(weights, target, self.cluster.devices_per_node)
        layers = (held.high - held.low).max(axis=0)
        width = (held.right - held.left).max(axis=0)
        common = np.minimum(needed.high - needed.low, layers), np.minimum(needed.right - needed.left, width)
        lacking = needed.whole[0] - common[0] * common[1]
        lacking += weights.embedding * (needed.whole[1] - needed.embeds * common[1])
        most = np.maximum(lacking.max(axis=0), _into_empty(held, needed, weights))
        network = most / self._ports_of_nodes.node.max()
        stage, before = self._largest(weights, target.pp), self._largest(weights, source.pp)
        kept = np.minimum(stage, before) * np.minimum(1 / target.tp, 1 / source.tp)
        new = np.where(target.size > source.size, self._smallest(weights, target.pp) / target.tp, 0.0)
        device = np.maximum(stage / target.tp - kept, new) / self._ports_of_nodes.device.max()
        return np.where(_same(source, target, where=False), 0.0, np.maximum(network, device))

    def _ports(self, weights: Weights, source: Layouts, target: Layouts) -> Floats:
        """Seconds of the busiest port of a device inside its node."""
        received, distinct = self._lacking(weights, source, target, 1)
        first = np.minimum(source.first, target.first)
        last = np.maximum(source.first + source.size, target.first + target.size)
        spread = np.minimum(source.size + target.size, last - first)
        out = np.maximum(distinct / source.size, received.sum(axis=0) / spread)
        return np.asarray(np.maximum(received.max(axis=0), out) / self._slower(source, target).device)

    def _latency(self, source: Layouts, target: Layouts) -> Floats:
        """Of the messages that a rank gets: one for each stage and tensor rank that has some of its part."""
        stages = -(-source.pp // target.pp) + 1 + (target.pp < 3)
        ranks = np.minimum(np.lcm(source.tp, target.tp) // target.tp, source.tp)
        return np.asarray(2 * stages * ranks * self._slower(source, target).latency)

    def _nodes(self, *places: Layouts) -> Ints:
        """Nodes that meshes lie on, from the first to the last."""
        per = self.cluster.devices_per_node
        first = np.minimum.reduce([p.first // per for p in places])
        last = np.maximum.reduce([(p.first + p.size - 1) // per for p in places])
        alone = sum((p.first + p.size - 1) // per - p.first // per + 1 for p in places)
        return np.minimum(alone, last - first + 1)

    def _lacking(self, weights: Weights, source: Layouts, target: Layouts, block: int) -> _PAIR:
        """Bytes that blocks of so many devices need and do not hold, [blocks, pairs], and at most how many of
        them are different ones."""
        held, needed = self._boxes(weights, source, block), self._boxes(weights, target, block)
        (layers, embedding), (layers_held, embedding_held) = needed.whole, needed.common(held)
        layers, embedding = layers - layers_held, weights.embedding * (embedding - embedding_held)
        distinct = np.minimum(layers.sum(axis=0), weights.stack + weights.end)
        return layers + embedding, distinct + np.minimum(embedding.sum(axis=0), weights.embedding)

    def _boxes(self, weights: Weights, layouts: Layouts, block: int) -> _Boxes:
        """What each block of devices holds; empty where it holds nothing. The same layout is often there."""
        _, first, where = np.unique(layouts.codes, return_index=True, return_inverse=True)
        boxes = self._different_boxes(weights, layouts[first], block)
        return _Boxes(*(values.take(where, axis=1) for values in boxes.__dict__.values()))

    def _different_boxes(self, weights: Weights, layouts: Layouts, block: int) -> _Boxes:
        cuts = self._bounds(weights, int(layouts.pp.max()))
        start = np.arange(self.cluster.size // block)[:, None] * block
        a = np.maximum(start - layouts.first, 0)
        b = np.minimum(start + block - layouts.first, layouts.size) - 1
        present = a <= b
        stage = layouts.size // layouts.pp
        first, last = np.where(present, a // stage, 0), np.where(present, b // stage, 0)
        whole = (b - a + 1 >= layouts.tp) | (a % layouts.tp > b % layouts.tp)
        left = np.where(whole, 0, a % layouts.tp) / layouts.tp
        right = np.where(whole, layouts.tp, b % layouts.tp + 1) / layouts.tp
        ends = (first == 0) | (weights.tied & (last == layouts.pp - 1))
        low, high = cuts[layouts.pp, first], cuts[layouts.pp, last + 1]
        return _Boxes(low, np.where(present, high, low), left, np.where(present, right, left), 1.0 * ends)

    def _needed(self, weights: Weights, layouts: Layouts) -> Floats:
        """Bytes of the fullest device, at most."""
        return (self._largest(weights, layouts.pp) + weights.embedding) / layouts.tp

    def _largest(self, weights: Weights, pp: Ints) -> Floats:
        """Bytes of the largest stage, without the embedding."""
        cuts = self._bounds(weights, int(pp.max()))
        return np.asarray(np.diff(cuts, axis=1).max(axis=1)[pp])

    def _smallest(self, weights: Weights, pp: Ints) -> Floats:
        """Bytes of the smallest stage, without the embedding."""
        stages = np.diff(self._bounds(weights, int(pp.max())), axis=1)
        there = np.arange(stages.shape[1]) < np.arange(len(stages))[:, None]
        return np.asarray(np.where(there, stages, np.inf).min(axis=1)[pp])

    def _bounds(self, weights: Weights, most: int) -> Floats:
        """[degree of a pipeline, stage] -> where the stage begins; beyond the last one, where that ends."""
        if weights not in self._cuts or len(self._cuts[weights]) <= most:
            most = min(max(most, self.cluster.size), weights.layers)
            table = np.zeros((most + 1, most + 1))
            for pp in range(1, most + 1):
                cuts = weights.cuts(pp)
                table[pp] = cuts[-1]
                table[pp, : pp + 1] = cuts
            self._cuts[weights] = table
        return self._cuts[weights]


def _into_empty(held: _Boxes, needed: _Boxes, weights: Weights) -> Floats:
    """Bytes of layers that some node must take in or send because nodes where nothing is held need some.

    At best those are the nodes that need the least.
    """
    layers = np.sort(needed.whole[0], axis=0)
    holding = (held.right > held.left).sum(axis=0)
    last = np.maximum(len(layers) - holding - 1, 0)[None]
    entering, everything = (
        np.where(holding < len(layers), np.take_along_axis(values, last, axis=0)[0], 0.0)
        for values in (layers, np.cumsum(layers, axis=0))
    )
    leaving = np.minimum(everything, weights.stack) / holding
    return np.asarray(np.maximum(entering, leaving))


def _overlap(a: Floats, b: Floats, c: Floats, d: Floats) -> Floats:
    return np.maximum(np.minimum(b, d) - np.maximum(a, c), 0)


def _same(source: Layouts, target: Layouts, *, where: bool) -> NDArray[np.bool_]:
    """Whether pairs are equal; `where`: in position, too."""
    equal = (source.size == target.size) & (source.tp == target.tp) & (source.pp == target.pp)
    return equal & (source.first == target.first) if where else equal
