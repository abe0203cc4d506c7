"""Reallocation time from the load on node and device links, vectorised over pairs of layouts."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from realrl.layout.ranges import stage_layers, virtual_stage_layers
from realrl.layout.sets import BASE, element_width
from realrl.plan.cluster import Cluster, Links
from realrl.plan.placement import Placement
from realrl.planner.moves.transfers import HALF, Layouts, find_nodes
from realrl.planner.workload.shard_sizes import size_shards
from realrl.program.arrays import Bools, Floats, Ints
from realrl.program.memory import StoredModel

Pair = tuple[Floats, Floats]
"""Two arrays, usually the bytes of layers and the fraction of the embedding."""


@dataclass(frozen=True)
class Boxes:
    """Parameters held by blocks of consecutive ranks, [blocks, pairs].

    A box is some ranges of layers (`low` to `high`, in bytes, [ranges, blocks, pairs]) by a fraction of the TP
    dimension (`left` to `right`). There is a range for each virtual stage of a pipeline stage; further ranges are
    empty. `embeds` is 1 if the block also holds this fraction of the embedding.
    """

    low: Floats
    high: Floats
    left: Floats
    right: Floats
    embeds: Floats

    @cached_property
    def height(self) -> Floats:
        """Bytes of the layers in all ranges, whole."""
        if len(self.low) == 1:
            return self.high[0] - self.low[0]
        return np.asarray((self.high - self.low).sum(axis=0))

    @cached_property
    def ascending(self) -> Pair:
        """Bytes of layers of each block in ascending order, and the sums up to each block."""
        layers = np.sort(self.whole[0], axis=0)
        return layers, np.cumsum(layers, axis=0)

    @cached_property
    def whole(self) -> Pair:
        """Bytes of layers, and the fraction of the embedding."""
        width = self.right - self.left
        return self.height * width, self.embeds * width

    def shapes(self) -> Iterator[tuple[Ints, Floats]]:
        """Iterate over the different (height, width, embedding) of each pair's blocks, [3, pairs].

        The first item has the first shape of every pair. The second item has the second shape of all pairs with two
        or more shapes, and so on. Each item also has the indices of its pairs.
        """
        every = np.stack([self.height, self.right - self.left, self.embeds])
        different, number = np.unique(every.reshape(3, -1), axis=1, return_inverse=True)
        number = np.sort(number.reshape(self.left.shape), axis=0)
        new = np.diff(number, axis=0, prepend=-1) > 0
        place = np.cumsum(new, axis=0)
        for i in range(1, int(place[-1].max()) + 1):
            block, pair = np.nonzero(new & (place == i))
            yield pair, different[:, number[block, pair]]

    def common(self, other: "Boxes", alike: Bools) -> Pair:
        """Intersect with other boxes. Returns the common bytes of layers and the common fraction of the embedding.

        `alike`: whether both layouts cut parameters in the same way. If not, their fractions overlap by chance,
        which is the product of the two fractions.
        """
        width = _overlap(self.left, self.right, other.left, other.right)
        by_chance = (self.right - self.left) * (other.right - other.left)
        width = np.where(alike, width, by_chance)
        layers = sum(
            _overlap(low, high, its_low, its_high)
            for low, high in zip(self.low, self.high, strict=True)
            for its_low, its_high in zip(other.low, other.high, strict=True)
        )
        return layers * width, self.embeds * other.embeds * width


def _overlap(a: Floats, b: Floats, c: Floats, d: Floats) -> Floats:
    return np.maximum(np.minimum(b, d) - np.maximum(a, c), 0)


_AT_ONCE = 1 << 16
"""Number of array elements (nodes or devices, times pairs) that are processed together, so that they stay in the
caches."""
_FEW_PAIRS = 1 << 15
"""Number of new pairs of layouts that a `TransferTable` collects before it merges them into its large table."""
_FEW_NODES = 32
"""Number of nodes up to which bounds for interleaved layouts compare all positions of two meshes."""
_FEW_LAYOUTS, _RECENT = 16, 4
"""Number of layouts up to which boxes are not cached, and number of cache entries for more layouts."""


@dataclass(frozen=True, kw_only=True)
class ParameterBytes:
    """Bytes of a parameter set, by the parts of a model that pipeline stages divide."""

    layers: tuple[float, ...]
    """Bytes of the set in each layer of the model."""
    embedding: float
    """Bytes of the embedding table, on the first stage, and on the last one if it is tied to the head."""
    end: float
    """Bytes of the final norm and the head, on the last stage."""
    tied: bool = False
    experts: tuple[float, ...] | None = None
    """Bytes of experts in each of `layers`. Expert parallelism gives them a layout of their own. None if the set
    has no experts."""

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, model: StoredModel, width: int, name: str = BASE) -> "ParameterBytes":
        """Build from the parameter set `name` of a model. Each parameter has `width` bytes unless it is
        quantised."""
        width = element_width(name, width)
        sizes = size_shards(model, 1).sets[name]
        experts = [0] * sizes.layers_of_model
        for tensor in model.sets[name].tensors:
            if tensor.expert is not None and tensor.layer is not None:
                experts[tensor.layer] += tensor.numel
        return cls(
            layers=tuple(sizes.find_layer(n).elements[0] * width for n in range(sizes.layers_of_model)),
            embedding=sizes.embedding[0] * width,
            end=sizes.end[0] * width,
            tied=sizes.tied,
            experts=tuple(elements * width for elements in experts) if any(experts) else None,
        )

    @cached_property
    def parts(self) -> "tuple[ParameterBytes, ParameterBytes]":
        """The parameters outside experts, and the experts."""
        assert self.experts is not None, "the set has experts"
        others = tuple(a - b for a, b in zip(self.layers, self.experts, strict=True))
        return (
            replace(self, layers=others, experts=None),
            replace(self, layers=self.experts, embedding=0.0, end=0.0, experts=None),
        )

    @cached_property
    def stack(self) -> float:
        """Bytes of all layers."""
        return sum(self.layers)

    def cuts(self, pp: int) -> list[float]:
        """Return the byte offset at which each pipeline stage begins, and the end of the last stage."""
        bounds = [0.0]
        for stage in stage_layers(len(self.layers), pp):
            bounds.append(bounds[-1] + sum(self.layers[stage.start : stage.stop]))
        bounds[-1] += self.end
        return bounds


@dataclass(frozen=True)
class _Ports:
    """Bandwidths in bytes per second and message latency in seconds, per node or per pair."""

    device: Floats
    node: Floats
    latency: Floats


@dataclass(frozen=True)
class LinkTransfers:
    """Time model of reallocations as `layout.routing` schedules them, without choosing senders.

    A device receives the parameters that it needs and does not hold. A node receives each parameter that it needs
    once, unless one of its devices holds the parameter. The nodes that hold the data send equal parts, and all
    nodes forward what they receive. The model assumes that TP ranks shard every tensor evenly. Under ZeRO-3, it
    treats data-parallel ranks like further TP ranks. Layouts with and without ZeRO-3 cut tensors differently, so
    their overlap is the product of the two fractions. Values travel in the narrower of the source's and the
    target's type. Parameter sets move one after the other.
    """

    cluster: Cluster
    weights: Mapping[str, tuple[ParameterBytes, ...]]
    """Parameter bytes of the sets that move together. A key is a role, or a name from `name_mixing` or
    `name_refreshing`."""
    links: tuple[Links, ...]
    """Links of each node. Between two different nodes, the slower links count."""
    halves: Mapping[str, tuple[ParameterBytes, ...]] = field(default_factory=dict)
    """`weights` with two bytes per parameter, for moves from or to layouts in bfloat16. Empty if there are no such
    layouts."""
    _cuts: dict[ParameterBytes, Floats] = field(default_factory=dict, compare=False, repr=False)
    _stages: dict[tuple[ParameterBytes, int], Pair] = field(default_factory=dict, compare=False, repr=False)
    _recent: dict[tuple[ParameterBytes, int, bytes], Boxes] = field(
        default_factory=dict, compare=False, repr=False
    )
    """Cache of the most recent boxes."""

    def seconds(self, role: str, source: Layouts, target: Layouts) -> Floats:
        """Compute the seconds of each pair of layouts. They are 0 if the layouts are equal."""
        result = np.zeros(len(source.first))
        half = (source.dtype == HALF) | (target.dtype == HALF)
        apart = (source.ep > 1) | (target.ep > 1)
        for moving, narrow in ((self.weights, ~half), (self.halves, half)):
            for pairs, split in ((narrow & ~apart, False), (narrow & apart, True)):
                for alike in _split_interleaved(np.flatnonzero(pairs), source, target):
                    for part in self._parts(alike, self.cluster.nodes):
                        for one in _list_moves(moving[role], source[part], target[part], split=split):
                            result[part] += self._seconds(*one)
        return result

    def one(self, role: str, source: Placement, target: Placement) -> float:
        """Compute the seconds from one placement to another."""
        return float(self.seconds(role, Layouts.of([source]), Layouts.of([target]))[0])

    def at_least(self, role: str, source: Layouts, target: Layouts) -> Floats:
        """Compute a lower bound on the seconds from each source to each target, [sources, targets].

        The bound depends on the sizes of the meshes, not on their positions.
        """
        result = np.zeros((len(source.first), len(target.first)))
        half = (source.dtype == HALF)[:, None] | (target.dtype == HALF)
        apart = (source.ep > 1)[:, None] | (target.ep > 1)
        for moving, narrow in ((self.weights, ~half), (self.halves, half)):
            for pairs, split in ((narrow & ~apart, False), (narrow & apart, True)):
                if pairs.any():
                    moves = _list_moves(moving[role], source, target, split=split)
                    result += np.where(pairs, sum(self._least(*one) for one in moves), 0.0)
        return result

    def sent(self, role: str, source: Layouts, target: Layouts) -> Pair:
        """Compute the bytes that all devices receive, and the part of these bytes that crosses nodes, [pairs]."""
        apart = (source.ep > 1) | (target.ep > 1)
        totals = [np.zeros(len(apart)) for _ in range(2)]
        for pairs, split in ((np.flatnonzero(~apart), False), (np.flatnonzero(apart), True)):
            for one in _list_moves(self.weights[role], source[pairs], target[pairs], split=split):
                for total, bounds in zip(totals, (self._devices, self._nodes), strict=True):
                    total[pairs] += self._lacking(*one, bounds)[0].sum(axis=0)
        return totals[0], totals[1]

    @cached_property
    def _ports_of_nodes(self) -> _Ports:
        rows = [(links.device_bytes_per_s, links.node_bytes_per_s, links.latency_s) for links in self.links]
        return _Ports(*np.array(rows).T)

    @cached_property
    def _devices(self) -> Ints:
        """First rank of each block, and end of the last block, if every device is a block."""
        return np.arange(self.cluster.size + 1)

    @cached_property
    def _nodes(self) -> Ints:
        """First rank of each block, and end of the last block, if every node is a block."""
        return np.array(self.cluster.bounds)

    def _slower(self, source: Layouts, target: Layouts) -> _Ports:
        """Find the slowest links among the nodes of each pair's source and target."""
        pairs = len(source.first)
        worst = _Ports(np.full(pairs, np.inf), np.full(pairs, np.inf), np.zeros(pairs))
        spans = [self._span(place) for place in (source, target)]
        for nodes, links in self._alike:
            on = np.logical_or.reduce([(begin < nodes.stop) & (end >= nodes.start) for begin, end in spans])
            np.minimum(worst.device, links.device_bytes_per_s, out=worst.device, where=on)
            np.minimum(worst.node, links.node_bytes_per_s, out=worst.node, where=on)
            np.maximum(worst.latency, links.latency_s, out=worst.latency, where=on)
        return worst

    @cached_property
    def _alike(self) -> list[tuple[range, Links]]:
        """Runs of nodes with equal links."""
        found: list[tuple[range, Links]] = []
        for links, nodes in groupby(range(len(self.links)), self.links.__getitem__):
            numbers = list(nodes)
            found.append((range(numbers[0], numbers[-1] + 1), links))
        return found

    def _span(self, place: Layouts) -> tuple[Ints, Ints]:
        """First and last node of each mesh."""
        nodes = find_nodes(self.cluster)
        return nodes[place.first], nodes[place.first + place.size - 1]

    @staticmethod
    def _parts(pairs: Ints, blocks: int) -> Iterator[Ints]:
        """Split pairs so that arrays of [blocks, pairs] stay in the caches."""
        step = max(1, _AT_ONCE // blocks)
        return (pairs[i : i + step] for i in range(0, len(pairs), step))

    def _seconds(self, weights: ParameterBytes, source: Layouts, target: Layouts) -> Floats:
        ports = self._slower(source, target)
        first, last = self._span(source)
        entering, distinct = self._lacking(weights, source, target, self._nodes)
        network = np.maximum(entering.max(axis=0), distinct / (last - first + 1)) / ports.node
        device = (self._largest(weights, target) + weights.embedding) / target.parts / ports.device
        # `device` is an upper bound so far. Its exact value only matters if the bound exceeds the network's time.
        for part in self._parts(np.flatnonzero(device > network), self.cluster.size):
            device[part] = self._ports(weights, source[part], target[part])
        seconds = np.maximum(network, device)
        seconds = np.where(seconds > 0, seconds + self._latency(source, target), 0.0)
        return np.where(_same(source, target, where=True), 0.0, seconds)

    def _least(self, weights: ParameterBytes, source: Layouts, target: Layouts) -> Floats:
        """Lower bound on the seconds from each source to each target, [sources, targets]."""
        most = self._least_bytes(weights, source, target)
        turned = [np.flatnonzero(layouts.vpp > 1) for layouts in (source, target)]
        for rows, columns in (
            (turned[0], np.arange(len(target.first))),
            (np.flatnonzero(source.vpp == 1), turned[1]),
        ):
            if len(rows) and len(columns):
                found = self._least_interleaved(weights, source[rows], target[columns])
                most[np.ix_(rows, columns)] = np.maximum(most[np.ix_(rows, columns)], found)
        network = most / self._ports_of_nodes.node.max()
        source = source[np.arange(len(source.first))[:, None]]  # [sources, 1]
        stage = self._largest(weights, target)
        before = self._largest(weights, source)
        kept = np.minimum(stage, before) * np.minimum(1 / target.parts, 1 / source.parts)
        new = np.where(target.size > source.size, self._smallest(weights, target) / target.parts, 0.0)
        device = np.maximum(stage / target.parts - kept, new) / self._ports_of_nodes.device.max()
        return np.where(_same(source, target, where=False), 0.0, np.maximum(network, device))

    def _least_bytes(self, weights: ParameterBytes, source: Layouts, target: Layouts) -> Floats:
        """Lower bound on the bytes that enter or leave some node, [sources, targets]."""
        held = [
            np.stack([layers.max(axis=0), width.max(axis=0), (width > 0).sum(axis=0)])
            for part in self._parts(np.arange(len(source.first)), self.cluster.nodes)
            for boxes in [self._different_boxes(weights, source[part], self._nodes)]
            for layers, width in [(boxes.height, boxes.right - boxes.left)]
        ]
        # Many layouts hold the same bytes per node, on the same number of nodes.
        different, which = np.unique(np.concatenate(held, axis=1), axis=1, return_inverse=True)
        layers, width, holding = different[:, :, None]
        found = []
        for part in self._parts(np.arange(len(target.first)), self.cluster.nodes):
            needed = self._different_boxes(weights, target[part], self._nodes)
            most = _into_empty(holding.astype(np.int64), needed, weights)
            for columns, (high, wide, embeds) in needed.shapes():
                lacking = high * wide - np.minimum(high, layers) * np.minimum(wide, width)
                lacking += weights.embedding * embeds * (wide - np.minimum(wide, width))
                most[:, columns] = np.maximum(most[:, columns], lacking)
            found.append(most)
        return np.concatenate(found, axis=1)[which.reshape(-1)]

    def _least_interleaved(self, weights: ParameterBytes, source: Layouts, target: Layouts) -> Floats:
        """Lower bound on the bytes of layers that enter some node, [sources, targets].

        Interleaved stages have little in common with other stages. So this bound compares the layers of the nodes
        themselves. The nodes of the source may lie before, among or after those of the target. On large clusters,
        every node of the target may meet any node of the source.
        """
        sizes = np.array([*weights.layers, weights.end])
        held, needed = (_NodeBlocks.of(layouts, self._nodes) for layouts in (source, target))
        layers = needed.mark_layers(len(weights.layers))
        common = held.mark_layers(len(weights.layers)) * sizes @ layers.T
        lacking = (layers @ sizes)[needed.numbers] * needed.width
        most = np.empty((held.numbers.shape[1], needed.numbers.shape[1]))
        for row, numbers, width in zip(most, held.numbers.T, held.width.T, strict=True):
            if self.cluster.nodes > _FEW_NODES:
                kept = common[numbers].max(axis=0)[needed.numbers] * np.minimum(width.max(), needed.width)
                row[:] = (lacking - kept).max(axis=0)
                continue
            nodes = np.arange(len(needed.numbers))
            row[:] = np.inf
            for begin in range(1 - len(numbers), len(nodes)):
                there = (nodes >= begin) & (nodes < begin + len(numbers))
                met = nodes[there] - begin
                kept = common[numbers[met][:, None], needed.numbers[there]]
                kept = kept * np.minimum(width[met][:, None], needed.width[there])
                left = lacking.copy()
                left[there] -= kept
                np.minimum(row, left.max(axis=0), out=row)
        return most[held.kind[:, None], needed.kind]

    def _ports(self, weights: ParameterBytes, source: Layouts, target: Layouts) -> Floats:
        """Seconds of the busiest device link inside a node."""
        received, distinct = self._lacking(weights, source, target, self._devices)
        busiest = np.maximum(received.max(axis=0), distinct / source.size)
        return np.asarray(busiest / self._slower(source, target).device)

    def _latency(self, source: Layouts, target: Layouts) -> Floats:
        """Seconds of latency of the messages to a rank. Each rank that holds a part of its shard sends one
        message."""
        each = -(-source.runs // target.runs) + 1
        stages = np.minimum(target.vpp * each, np.maximum(each, source.stages)) + (target.stages < 3)
        ranks = np.minimum(np.lcm(source.parts, target.parts) // target.parts, source.parts)
        return np.asarray(2 * stages * ranks * self._slower(source, target).latency)

    def _lacking(self, weights: ParameterBytes, source: Layouts, target: Layouts, bounds: Ints) -> Pair:
        """Compute the bytes that each block of devices needs but does not hold, [blocks, pairs]. Also return an
        upper bound on the distinct bytes among them, [pairs]. `bounds`: first rank of each block, and end of the
        last block."""
        held = self._boxes(weights, source, bounds)
        needed = self._boxes(weights, target, bounds)
        layers, embedding = needed.whole
        by_experts = [places.degree("ep") > 1 for places in (source, target)]
        alike = (source.sharded == target.sharded) & (by_experts[0] == by_experts[1])
        layers_held, embedding_held = needed.common(held, alike)
        layers = layers - layers_held
        embedding = weights.embedding * (embedding - embedding_held)
        distinct = np.minimum(layers.sum(axis=0), weights.stack + weights.end)
        return layers + embedding, distinct + np.minimum(embedding.sum(axis=0), weights.embedding)

    def _boxes(self, weights: ParameterBytes, layouts: Layouts, bounds: Ints) -> Boxes:
        """Return the box of each block of devices. A block that holds nothing has an empty box. Each distinct
        layout is computed once."""
        key = weights, len(bounds), layouts.codes.tobytes()
        if key in self._recent:
            return self._recent[key]
        _, first, where = np.unique(layouts.codes, return_index=True, return_inverse=True)
        different = self._different_boxes(weights, layouts[first], bounds)
        boxes = Boxes(*(values.take(where, axis=-1) for values in different.__dict__.values()))
        if len(first) > _FEW_LAYOUTS:
            while len(self._recent) >= _RECENT:
                self._recent.pop(next(iter(self._recent)))
            self._recent[key] = boxes
        return boxes

    def _different_boxes(self, weights: ParameterBytes, layouts: Layouts, bounds: Ints) -> Boxes:
        cuts = self._bounds(weights, int(layouts.runs.max()))
        a, b = _find_ranks(layouts, bounds)
        present = a <= b
        stage = layouts.size // layouts.stages  # ranks of a stage
        first = np.where(present, a // stage, 0)
        last = np.where(present, b // stage, 0)
        left, right = _find_parts(layouts, a, b)
        ends = (first == 0) | (weights.tied & (last == layouts.stages - 1))
        runs = np.arange(int(layouts.vpp.max()))[:, None, None]
        offset = np.minimum(runs, layouts.vpp - 1) * layouts.stages  # first run of all stages in each turn
        low, high = cuts[layouts.runs, first + offset], cuts[layouts.runs, last + offset + 1]
        high = np.where(present & (runs < layouts.vpp), high, low)
        return Boxes(low, high, left, np.where(present, right, left), 1.0 * ends)

    def _largest(self, weights: ParameterBytes, layouts: Layouts) -> Floats:
        """Bytes of the largest stage, without the embedding."""
        return self._find_stages(weights, layouts, 0)

    def _smallest(self, weights: ParameterBytes, layouts: Layouts) -> Floats:
        """Bytes of the smallest stage, without the embedding."""
        return self._find_stages(weights, layouts, 1)

    def _find_stages(self, weights: ParameterBytes, layouts: Layouts, which: int) -> Floats:
        """Bytes of the largest (0) or smallest (1) stage of each layout."""
        if not (layouts.vpp > 1).any():
            return self._extremes(weights, 1)[which][layouts.stages]
        found = np.zeros(layouts.stages.shape)
        for vpp in np.unique(layouts.vpp).tolist():
            there = layouts.vpp == vpp
            found[there] = self._extremes(weights, vpp)[which][layouts.stages[there]]
        return found

    def _extremes(self, weights: ParameterBytes, vpp: int) -> Pair:
        """Tabulate the bytes of the largest and of the smallest stage, [PP degree]."""
        if (weights, vpp) not in self._stages:
            most = min(self.cluster.size, len(weights.layers) // vpp)
            table = np.zeros((2, most + 1))
            for pp in range(1, most + 1):
                stages = np.diff(weights.cuts(pp * vpp)).reshape(vpp, pp).sum(axis=0)
                table[:, pp] = stages.max(), stages.min()
            self._stages[weights, vpp] = table[0], table[1]
        return self._stages[weights, vpp]

    def _bounds(self, weights: ParameterBytes, most: int) -> Floats:
        """Return a table of the byte offsets at which runs of layers begin, [number of runs, run]. The entry
        after the last run is the end of this run. A stage without virtual stages has one run."""
        if weights not in self._cuts or len(self._cuts[weights]) <= most:
            most = min(max(most, self.cluster.size), len(weights.layers))
            table = np.zeros((most + 1, most + 1))
            for pp in range(1, most + 1):
                cuts = weights.cuts(pp)
                table[pp] = cuts[-1]
                table[pp, : pp + 1] = cuts
            self._cuts[weights] = table
        return self._cuts[weights]


class TransferTable:
    """Reallocation times between two lists of layouts of a role, computed on first use."""

    def __init__(self, transfers: LinkTransfers, role: str, sources: Layouts, targets: Layouts) -> None:
        self._transfers = transfers
        self.role = role
        self._sources = sources
        self._targets = targets
        # A search uses some hundred thousand of the billions of pairs. New pairs first go to a small table, so that
        # adding them does not copy the large table each time.
        self._many, self._few = (_KnownPairs(np.zeros(0, np.int64), np.zeros(0)) for _ in range(2))

    def __call__(self, source: Ints, target: Ints) -> Floats:
        """Return the seconds of pairs of a source and a target, given by their indices in the two lists."""
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
    """Seconds of pairs of layouts, sorted by the numbers of the pairs."""

    pairs: Ints
    seconds: Floats

    def fill(self, pairs: Ints, seconds: Floats) -> None:
        """Write the seconds of all known pairs into `seconds`."""
        if len(self.pairs):
            place = np.minimum(np.searchsorted(self.pairs, pairs), len(self.pairs) - 1)
            np.copyto(seconds, self.seconds[place], where=self.pairs[place] == pairs)

    def merge(self, pairs: Ints, seconds: Floats) -> "_KnownPairs":
        """Return a table to which pairs are added that were not known."""
        place = np.searchsorted(self.pairs, pairs)
        return _KnownPairs(np.insert(self.pairs, place, pairs), np.insert(self.seconds, place, seconds))


def _list_moves(
    sets: Iterable[ParameterBytes], source: Layouts, target: Layouts, *, split: bool
) -> Iterator[tuple[ParameterBytes, Layouts, Layouts]]:
    """List the moves of parameter sets between layouts. With `split`, experts have layouts of their own, and so
    moves of their own."""
    for weights in sets if len(source.first) and len(target.first) else ():
        if split and weights.experts:
            others, experts = weights.parts
            yield others, source, target
            yield experts, source.for_experts(), target.for_experts()
        else:
            yield weights, source, target


def _into_empty(holding: Ints, needed: Boxes, weights: ParameterBytes) -> Floats:
    """Lower bound on the layer bytes that some node receives or sends because some nodes hold no layer bytes.

    `holding`: number of nodes that hold data, [sources, 1]. In the best case, the nodes without data are those that
    need the least.
    """
    blocks, pairs = needed.left.shape
    last = np.maximum(blocks - holding - 1, 0)
    entering, everything = (
        np.where(holding < blocks, values[last, np.arange(pairs)], 0.0) for values in needed.ascending
    )
    leaving = np.minimum(everything, weights.stack) / holding
    return np.maximum(entering, leaving)


def _find_ranks(layouts: Layouts, bounds: Ints) -> tuple[Ints, Ints]:
    """Find the first and the last rank of each layout in each block of devices, counted from the first rank of the
    mesh, [blocks, layouts]. The last one is below the first one if there are none."""
    first = np.maximum(bounds[:-1, None] - layouts.first, 0)
    return first, np.minimum(bounds[1:, None] - layouts.first, layouts.size) - 1


@dataclass(frozen=True)
class _NodeBlocks:
    """Stages that each node of a layout holds, for different kinds of layouts. Nodes are counted from the first
    node of the mesh."""

    different: Ints
    """PP degree, virtual stages, first stage, and end of the stages of each different block, [4, different
    blocks]."""
    numbers: Ints
    """Number of each node's block in `different`, [nodes, kinds]."""
    width: Floats
    """Fraction of the TP dimension that each node holds, [nodes, kinds]."""
    kind: Ints
    """Kind of each layout."""

    @classmethod
    def of(cls, layouts: Layouts, bounds: Ints) -> "_NodeBlocks":
        first, last = _find_ranks(layouts, bounds)
        own = (first <= last).argmax(axis=0) + np.arange(int((first <= last).sum(axis=0).max()))[:, None]
        first, last = (
            np.take_along_axis(ranks, np.minimum(own, len(bounds) - 2), axis=0) for ranks in (first, last)
        )
        there = (first <= last) & (own < len(bounds) - 1)
        stage = layouts.size // layouts.stages
        begin, end = np.where(there, first // stage, 0), np.where(there, last // stage + 1, 0)
        left, right = _find_parts(layouts, first, last)
        width = np.where(there, right - left, 0.0)
        pp, vpp = (np.broadcast_to(column, begin.shape) for column in (layouts.stages, layouts.vpp))
        rows = np.stack([pp, vpp, begin, end]).reshape(4, -1)
        different, numbers = np.unique(rows, axis=1, return_inverse=True)
        kinds, kind = np.unique(np.vstack([numbers.reshape(begin.shape), width]), axis=1, return_inverse=True)
        return cls(different, kinds[: len(own)].astype(np.int64), kinds[len(own) :], kind.reshape(-1))

    def mark_layers(self, layers: int) -> Floats:
        """Mark the layers of each different block with 1, [different blocks, layers + 1]. The last column stands
        for the parameters after the layers."""
        marks = np.zeros((self.different.shape[1], layers + 1))
        for row, (pp, vpp, begin, end) in zip(marks, self.different.T.tolist(), strict=True):
            for runs in virtual_stage_layers(layers, pp, vpp)[begin:end]:
                for run in runs:
                    row[run.start : run.stop] = 1
            row[layers] = end == pp
        return marks


def _find_parts(layouts: Layouts, first: Ints, last: Ints) -> Pair:
    """Find the fraction of the TP dimension that ranks from `first` to `last` hold, as its two ends. Ranks of
    several stages, or of several copies, may hold everything in them."""
    parts = layouts.parts
    whole = (last - first + 1 >= parts) | (first % parts > last % parts)
    return np.where(whole, 0, first % parts) / parts, np.where(whole, parts, last % parts + 1) / parts


def _split_interleaved(pairs: Ints, source: Layouts, target: Layouts) -> tuple[Ints, Ints]:
    """Split pairs into those without and with an interleaved layout, whose boxes have several ranges."""
    several = np.maximum(source.vpp[pairs], target.vpp[pairs]) > 1
    return pairs[~several], pairs[several]


def _same(source: Layouts, target: Layouts, *, where: bool) -> NDArray[np.bool_]:
    """Find the pairs of equal layouts. With `where`, meshes must also begin at the same rank."""
    equal = (source.sharded == target.sharded) & (source.vpp == target.vpp)
    for one, other in zip(source.degrees, target.degrees, strict=True):
        equal = equal & (one == other)
    return equal & (source.first == target.first) if where else equal
