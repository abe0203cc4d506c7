"""Time model of collectives and messages between the ranks of placements."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd
from typing import Literal

import numpy as np

from realrl.plan.axes import COPIES, Degrees, Divided, axes_dividing
from realrl.plan.cluster import Cluster
from realrl.planner.cluster.cluster_spec import Site
from realrl.planner.cluster.efficiency import Efficiency
from realrl.planner.moves.transfers import find_nodes
from realrl.planner.operators.tables import MOST_RANKS, Operators, Reduction, find_operators
from realrl.planner.profile.profile import Profile
from realrl.planner.workload.strategies import Strategies
from realrl.program.arrays import Floats, Ints, Real

GroupKind = Literal["tp", "cp", "copies", "ep", "expert_copies", "mesh", "embedding"]
"""Process groups of a placement.

`tp`: ranks that hold shards of the same matrices. `cp`: ranks that divide the tokens of a micro-batch or of a KV
cache. `copies`: ranks with the same parameters, which divide a batch or the tokens of micro-batches. `ep`: ranks
that divide the experts of a stage. `expert_copies`: ranks with the same experts. `mesh`: ranks along all axes that
divide anything. `embedding`: the first and the last stage of each pipeline."""


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Process groups of equal size that communicate at the same time.

    The bandwidth and the latency are those of the slowest group. Arrays have an entry for each strategy.
    """

    size: Ints
    """Ranks of each group."""
    bytes_per_s: Floats
    """Bandwidth of the slowest link between two neighbours in a ring."""
    hop_s: Floats
    """Mean latency of a message to the next rank of a ring, in seconds."""
    nodes: Ints
    """Most nodes that any of the groups spans."""
    profile: Profile | None = None
    operators: Operators | None = None
    """Tables of collectives inside a node."""

    def all_gather(self, number_bytes: Real) -> Floats:
        """Compute the seconds of an all-gather whose result has `number_bytes`."""
        return self._seconds("all_gather", 1, number_bytes)

    def broadcast(self, number_bytes: Real) -> Floats:
        """Estimate the seconds of a broadcast of `number_bytes` by those of an all-gather of this size, which takes
        the same number of hops along a ring."""
        return self.all_gather(number_bytes)

    def reduce_scatter(self, number_bytes: Real) -> Floats:
        """Compute the seconds of a reduce-scatter whose input has `number_bytes`."""
        return self._seconds("reduce_scatter", 1, number_bytes)

    def all_reduce(self, number_bytes: Real) -> Floats:
        """Compute the seconds of an all-reduce of `number_bytes`: a reduce-scatter and an all-gather."""
        return self._seconds("all_reduce", 2, number_bytes)

    def all_to_all(self, number_bytes: Real) -> Floats:
        """Compute the seconds of an all-to-all in which each rank sends and receives `number_bytes`, with a part of
        equal size for each rank and for itself.

        All messages of a rank are under way at the same time. If a group spans nodes, the network of a node carries
        the messages of all members on the node to other nodes.
        """
        inside = number_bytes * (self.size - 1) / self.size
        leaving = number_bytes * (self.size / self.nodes) * (1 - 1 / self.nodes)
        seconds = self.hop_s + np.where(self.nodes > 1, leaving, inside) / self.bytes_per_s
        return np.where(self.size == 1, 0.0, seconds)

    def _seconds(self, kind: Reduction, rounds: int, number_bytes: Real) -> Floats:
        """Predict the seconds of a collective from the profile if it measured such a group, or else from the
        operator tables.

        Without either source, each round of a ring takes size - 1 hops, each with 1 / size of the bytes.
        """
        seconds = rounds * (self.size - 1) * (self.hop_s + number_bytes / self.size / self.bytes_per_s)
        if self.operators is not None:
            inside = (self.nodes == 1) & (self.size <= MOST_RANKS)
            tabulated = self.operators.collective(kind, np.maximum(self.size, 2), number_bytes)
            seconds = np.where(inside, tabulated, seconds)
        if self.profile is not None:
            for size, nodes in {*zip(self.size.tolist(), self.nodes.tolist(), strict=True)}:
                measured = self.profile.collective(kind, size, nodes, number_bytes)
                if measured is not None:
                    seconds = np.where((self.size == size) & (self.nodes == nodes), measured, seconds)
        return np.where(self.size == 1, 0.0, seconds)


@dataclass(frozen=True)
class Network:
    """Links between the ranks of a call under several strategies. Rank 0 is the first rank of the mesh."""

    sites: tuple[Site, ...]
    """Site of the mesh under each strategy, all with one kind of device."""
    strategies: Strategies
    efficiency: Efficiency
    profile: Profile | None = None

    def hop(self, number_bytes: Real) -> Floats:
        """Compute the seconds that each rank of a stage takes to send `number_bytes` to its peer on the next
        stage."""
        device = self.sites[0].device
        leaving = [
            _count_leaving(degrees.stride(*axes_dividing(Divided.LAYERS)), site.nodes)
            for degrees, site in zip(self.strategies.degrees, self.sites, strict=True)
        ]
        width = np.minimum(self._node_bytes_per_s / np.maximum(leaving, 1), device.link_bytes_per_s)
        inside = device.link_latency_s + number_bytes / (device.link_bytes_per_s * self.efficiency.link)
        between: Real = device.node_latency_s + number_bytes / (width * self.efficiency.link)
        if self.profile is not None:
            inside, between = (
                computed if measured is None else measured
                for nodes, computed in ((1, inside), (2, between))
                for measured in [self.profile.collective("send", 2, nodes, number_bytes)]
            )
        return np.where([site.nodes.nodes > 1 for site in self.sites], between, inside)

    @cached_property
    def _node_bytes_per_s(self) -> Floats:
        return np.array([site.node_bytes_per_s for site in self.sites])

    @cached_property
    def _groups(self) -> dict[GroupKind, Ring]:
        return {}

    def group(self, kind: GroupKind) -> Ring:
        """Return the process groups of one kind."""
        if kind not in self._groups:
            self._groups[kind] = self._ring(kind)
        return self._groups[kind]

    def _ring(self, kind: GroupKind) -> Ring:
        """Build the rings of one kind of group. Groups that communicate at the same time share the network of a
        node.

        A ring has as many links as ranks. In a ring over n > 1 nodes, n links cross nodes.
        """
        device = self.sites[0].device
        folded = kind in ("ep", "expert_copies")
        every = self.strategies.expert_degrees if folded else self.strategies.degrees
        each = zip(every, self.sites, strict=True)
        spans = [_find_span(kind, degrees, site.nodes) for degrees, site in each]
        size, nodes, through = np.array(spans, dtype=np.int64).reshape(len(spans), 3).T
        shared = np.minimum(device.link_bytes_per_s, self._node_bytes_per_s / np.maximum(through, 1))
        crossing = np.where(through > 0, nodes / size, 0.0)
        return Ring(
            size=size,
            bytes_per_s=np.where(through > 0, shared, device.link_bytes_per_s) * self.efficiency.link,
            hop_s=crossing * device.node_latency_s + (1 - crossing) * device.link_latency_s,
            nodes=nodes,
            profile=self.profile,
            operators=find_operators(device),
        )


@lru_cache(maxsize=1 << 16)
def _find_span(kind: GroupKind, degrees: Degrees, nodes: Cluster) -> tuple[int, int, int]:
    """Return the size of the groups, the most nodes that a group spans, and the most groups that share a node's
    link.

    The last number counts only groups that span several nodes, because only these use the node's network link.
    """
    # On nodes of equal size, the pattern of groups on nodes repeats, so one period is enough to look at.
    period = nodes.runs[0][1] if nodes.even else nodes.size
    if kind == "mesh":
        axes = axes_dividing(*Divided)
        if degrees.count(*axes) == nodes.size:
            return nodes.size, nodes.nodes, int(nodes.nodes > 1)
        ranks = np.add.outer(degrees.origins(*axes), degrees.offsets(*axes))
    elif kind == "embedding":
        stage = degrees.stride("pp")
        first = np.arange(min(stage, period))
        ranks = np.stack([first, first + (degrees["pp"] - 1) * stage], axis=1)[:, : min(degrees["pp"], 2)]
    else:
        axes = axes_dividing(*COPIES) if kind in ("copies", "expert_copies") else (kind,)
        members, stride = degrees.count(*axes), degrees.stride(axes[-1])
        block = members * stride
        blocks = period // gcd(block, period)
        ranks = (
            np.arange(blocks * block).reshape(blocks, members, stride).transpose(0, 2, 1).reshape(-1, members)
        )
    on = find_nodes(nodes)[ranks]
    new = np.diff(on, axis=1, prepend=-1) > 0
    spanned = new.sum(axis=1)
    through = np.bincount(on[new & (spanned > 1)[:, None]], minlength=1)
    return ranks.shape[1], int(spanned.max()), int(through.max())


@lru_cache(maxsize=1 << 16)
def _count_leaving(stage: int, nodes: Cluster) -> int:
    """Count the ranks of a node whose peer on the next stage is on another node, for the node with the most.
    `stage`: ranks per stage."""
    if nodes.even:  # No other node has more such ranks than the first.
        per_node = nodes.runs[0][1]
        return min(per_node, nodes.size - stage) - max(0, per_node - stage)
    on = find_nodes(nodes)
    sender, receiver = on[:-stage], on[stage:]
    return int(np.bincount(sender[sender != receiver], minlength=1).max())
