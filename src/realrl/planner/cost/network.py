"""Time model of collectives and messages between the ranks of a placement."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.cluster.cluster_spec import NodeGroup
from realrl.planner.cluster.efficiency import Efficiency
from realrl.planner.operators.tables import MOST_RANKS, Operators, Reduction, find_operators
from realrl.planner.profile.profile import Profile


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Process groups of equal size that communicate at the same time: bandwidth and latency of the slowest."""

    size: int
    bytes_per_s: float
    hop_s: float
    nodes: int = 1
    """Most nodes that one of the groups spans."""
    profile: Profile | None = None
    operators: Operators | None = None
    """Tables of collectives inside a node."""

    def all_gather(self, number_bytes: float) -> float:
        """Compute the seconds of an all-gather whose result has `number_bytes`."""
        return self._seconds("all_gather", 1, number_bytes)

    def reduce_scatter(self, number_bytes: float) -> float:
        """Compute the seconds of a reduce-scatter whose input has `number_bytes`."""
        return self._seconds("reduce_scatter", 1, number_bytes)

    def all_reduce(self, number_bytes: float) -> float:
        """Compute the seconds of an all-reduce of `number_bytes`: a reduce-scatter and an all-gather."""
        return self._seconds("all_reduce", 2, number_bytes)

    def _seconds(self, kind: Reduction, rounds: int, number_bytes: float) -> float:
        if self.size == 1:
            return 0.0
        if self.profile is not None:
            measured = self.profile.collective(kind, self.size, self.nodes, number_bytes)
            if measured is not None:
                return measured
        if self.operators is not None and self.nodes == 1 and self.size <= MOST_RANKS:
            return self.operators.collective(kind, self.size, number_bytes)
        steps = self.size - 1
        return rounds * steps * (self.hop_s + number_bytes / self.size / self.bytes_per_s)


@dataclass(frozen=True)
class Network:
    """Links between the ranks of one call, counted from 0 at the start of a node or an aligned slice of it."""

    group: NodeGroup
    placement: Placement
    efficiency: Efficiency
    profile: Profile | None = None

    @classmethod
    def of(
        cls, group: NodeGroup, placement: Placement, efficiency: Efficiency, profile: Profile | None = None
    ) -> "Network":
        """Build the network of a placement, which does not depend on its position in the node group."""
        s = placement.strategy
        ranks = Placement(Mesh(0, placement.mesh.size), Strategy(s.dp, s.tp, s.pp))
        return cls(group, ranks, efficiency, profile)

    @cached_property
    def tp_group(self) -> Ring:
        """TP groups: ranks that shard the same matrices."""
        s = self.placement.strategy
        return self._ring(
            [self.placement.rank(dp=d, tp=t, pp=p) for t in range(s.tp)]
            for p in range(s.pp)
            for d in range(s.dp)
        )

    @cached_property
    def dp_group(self) -> Ring:
        """DP groups: ranks that hold the same parameters."""
        s = self.placement.strategy
        return self._ring(
            [self.placement.rank(dp=d, tp=t, pp=p) for d in range(s.dp)]
            for p in range(s.pp)
            for t in range(s.tp)
        )

    @cached_property
    def mesh_group(self) -> Ring:
        """Mesh group: all ranks of the placement."""
        return self._ring([list(self.placement.ranks)])

    @cached_property
    def embedding_group(self) -> Ring:
        """Embedding groups: first and last stage of each pipeline."""
        s = self.placement.strategy
        return self._ring(
            [self.placement.rank(dp=d, tp=t, pp=p) for p in sorted({0, s.pp - 1})]
            for d in range(s.dp)
            for t in range(s.tp)
        )

    def hop(self, number_bytes: float) -> float:
        """Compute the seconds until all ranks of a stage have sent `number_bytes` to their peer on the next."""
        device = self.group.device
        crosses = self.placement.mesh.size > self.group.devices_per_node
        measured = self.profile.collective("send", 2, 1 + crosses, number_bytes) if self.profile else None
        if measured is not None:
            return measured
        if not crosses:
            return device.link_latency_s + number_bytes / (device.link_bytes_per_s * self.efficiency.link)
        width = self.group.node_bytes_per_s / self._most_leaving
        seconds = number_bytes / (min(width, device.link_bytes_per_s) * self.efficiency.link)
        return device.node_latency_s + seconds

    @cached_property
    def _most_leaving(self) -> int:
        """Most ranks of one node that send to another node."""
        step = self.placement.strategy.dp * self.placement.strategy.tp
        leaving = Counter(
            self._node(rank)
            for rank in range(self.placement.mesh.size - step)
            if self._node(rank) != self._node(rank + step)
        )
        return max(leaving.values())

    def _node(self, rank: int) -> int:
        return rank // self.group.devices_per_node

    def _ring(self, groups: Iterable[list[int]]) -> Ring:
        """Build a ring; groups that communicate at the same time share the network of a node.

        A part passes every link of the ring but one, of which as many cross nodes as there are nodes.
        """
        members = list(groups)
        device = self.group.device
        groups_through: defaultdict[int, int] = defaultdict(int)
        max_nodes = 1
        for ranks in members:
            nodes = {self._node(rank) for rank in ranks}
            max_nodes = max(max_nodes, len(nodes))
            if len(nodes) > 1:
                for node in nodes:
                    groups_through[node] += 1
        width = device.link_bytes_per_s
        hop = device.link_latency_s
        if groups_through:
            width = min(width, self.group.node_bytes_per_s / max(groups_through.values()))
            crossing = max_nodes / len(members[0])
            hop = crossing * device.node_latency_s + (1 - crossing) * device.link_latency_s
        return Ring(
            size=len(members[0]),
            bytes_per_s=width * self.efficiency.link,
            hop_s=hop,
            nodes=max_nodes,
            profile=self.profile,
            operators=find_operators(device),
        )
