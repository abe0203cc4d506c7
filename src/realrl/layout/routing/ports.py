"""Load of each port under a schedule."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from realrl.layout.routing.hops import Hop
from realrl.layout.routing.links import Links
from realrl.layout.routing.transfer_routes import SpareCapacity
from realrl.plan.cluster import Cluster


@dataclass(frozen=True)
class PortLoads:
    """Elements that pass the ports of devices (by rank) and of nodes."""

    device_out: Mapping[int, int]
    device_in: Mapping[int, int]
    node_out: Mapping[int, int]
    node_in: Mapping[int, int]

    @classmethod
    def of(cls, hops: Iterable[Hop], cluster: Cluster) -> "PortLoads":
        """Count the elements that pass each port of the cluster, idle ones included."""
        device_out, device_in, node_out, node_in = (defaultdict[int, int](int) for _ in range(4))
        for hop in hops:
            size = hop.end - hop.begin
            device_out[hop.sender] += size
            device_in[hop.receiver] += size
            sender = cluster.node(hop.sender)
            receiver = cluster.node(hop.receiver)
            if sender != receiver:
                node_out[sender] += size
                node_in[receiver] += size
        ranks = range(cluster.size)
        nodes = range(cluster.nodes)
        return cls(
            {r: device_out[r] for r in ranks},
            {r: device_in[r] for r in ranks},
            {n: node_out[n] for n in nodes},
            {n: node_in[n] for n in nodes},
        )

    def sending_seconds(self, links: Links) -> float:
        """Compute the seconds of the busiest out-port, at one byte per element."""
        return _seconds(self.device_out, self.node_out, links)

    def receiving_seconds(self, links: Links) -> float:
        """Compute the seconds of the busiest in-port, at one byte per element."""
        return _seconds(self.device_in, self.node_in, links)

    def find_spare_capacity(self, links: Links) -> SpareCapacity:
        """Find ranks that stay below the busiest one when they also send to other nodes at full speed."""
        busiest = max(self.device_out.values())
        spare = links.node_bytes_per_s / links.device_bytes_per_s * busiest
        idle = frozenset(rank for rank, load in self.device_out.items() if load <= busiest - spare)
        return SpareCapacity(idle, self.node_in, self.node_out)


def _seconds(devices: Mapping[int, int], nodes: Mapping[int, int], links: Links) -> float:
    return max(max(devices.values()) / links.device_bytes_per_s, max(nodes.values()) / links.node_bytes_per_s)
