"""What a schedule loads each port with."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from realrl.layout.routing.journeys import Relief
from realrl.layout.routing.legs import Leg
from realrl.layout.routing.links import Links
from realrl.plan.cluster import Cluster


@dataclass(frozen=True)
class PortLoads:
    """Elements that pass the ports of devices (by rank) and of nodes."""

    device_out: Mapping[int, int]
    device_in: Mapping[int, int]
    node_out: Mapping[int, int]
    node_in: Mapping[int, int]

    @classmethod
    def of(cls, legs: Iterable[Leg], cluster: Cluster) -> "PortLoads":
        """The loads of a schedule; every port of the cluster is listed."""
        device_out, device_in, node_out, node_in = (defaultdict[int, int](int) for _ in range(4))
        for leg in legs:
            size = leg.end - leg.begin
            device_out[leg.sender] += size
            device_in[leg.receiver] += size
            sender, receiver = cluster.node(leg.sender), cluster.node(leg.receiver)
            if sender != receiver:
                node_out[sender] += size
                node_in[receiver] += size
        ranks, nodes = range(cluster.size), range(cluster.nodes)
        return cls(
            {r: device_out[r] for r in ranks},
            {r: device_in[r] for r in ranks},
            {n: node_out[n] for n in nodes},
            {n: node_in[n] for n in nodes},
        )

    def sending_seconds(self, links: Links) -> float:
        """Time of the busiest out-port, at a byte per element."""
        return _seconds(self.device_out, self.node_out, links)

    def receiving_seconds(self, links: Links) -> float:
        """Time of the busiest in-port, at a byte per element."""
        return _seconds(self.device_in, self.node_in, links)

    def relief(self, links: Links) -> Relief:
        """What senders in other nodes can take over: those count as idle who stay so when they help."""
        busiest = max(self.device_out.values())
        spare = links.node_bytes_per_s / links.device_bytes_per_s * busiest
        idle = frozenset(rank for rank, load in self.device_out.items() if load <= busiest - spare)
        return Relief(idle, self.node_in, self.node_out)


def _seconds(devices: Mapping[int, int], nodes: Mapping[int, int], links: Links) -> float:
    return max(max(devices.values()) / links.device_bytes_per_s, max(nodes.values()) / links.node_bytes_per_s)
