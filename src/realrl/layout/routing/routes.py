"""Reallocation of a model between two layouts: transfers between ranks, their bytes, and their time."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from realrl.layout.layout import Layout
from realrl.layout.region import Region
from realrl.layout.routing.hops import Hop, list_hops
from realrl.layout.routing.region_groups import RegionGroup, group_regions
from realrl.layout.routing.transfer_routes import SpareCapacity, find_transfer_routes
from realrl.plan.cluster import Cluster, Links

_CLOSE = 1.001
"""Senders in other nodes are added only if the busiest sender needs more than this multiple of the busiest
receiver's time."""


@dataclass(frozen=True, order=True)
class Transfer:
    """A region that is sent from one rank to another. In stage 0, the sender holds the region in the source layout.
    In later stages, it has received the region in an earlier stage."""

    stage: int
    sender: int
    receiver: int
    region: Region


@dataclass(frozen=True, order=True)
class Copy:
    """A region that a rank holds in both layouts."""

    rank: int
    region: Region


@dataclass(frozen=True)
class RankBytes:
    """Bytes that a rank sends, receives, and copies from its own memory."""

    sent: int = 0
    received: int = 0
    copied: int = 0


@dataclass(frozen=True)
class LinkBytes:
    """Bytes on each class of links: inside a device, between devices of a node, between nodes."""

    device: int
    node: int
    network: int


@dataclass(frozen=True)
class PortLoads:
    """Number of elements that pass each port of a device (rank -> elements) and of a node (node -> elements)."""

    device_out: Mapping[int, int]
    device_in: Mapping[int, int]
    node_out: Mapping[int, int]
    node_in: Mapping[int, int]

    @classmethod
    def of(cls, hops: Iterable[Hop], cluster: Cluster) -> "PortLoads":
        """Count the elements that pass each port of the cluster, idle ports included."""
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
        """Compute the seconds that the busiest out-port takes, at one byte per element."""
        return _seconds(self.device_out, self.node_out, links)

    def receiving_seconds(self, links: Links) -> float:
        """Compute the seconds that the busiest in-port takes, at one byte per element."""
        return _seconds(self.device_in, self.node_in, links)

    def find_spare_capacity(self, links: Links) -> SpareCapacity:
        """Find the ranks that could also send to other nodes at full speed without becoming the busiest."""
        busiest = max(self.device_out.values())
        spare = links.node_bytes_per_s / links.device_bytes_per_s * busiest
        idle = frozenset(rank for rank, load in self.device_out.items() if load <= busiest - spare)
        return SpareCapacity(idle, self.node_in, self.node_out)


@dataclass(frozen=True)
class Reallocation:
    """The schedule that turns one layout of a model into another; `reallocate` makes it.

    Copies and transfers cover every region of the target layout exactly once, and send nothing else. A node that
    does not hold a region receives it at most once, and then distributes it among its own ranks.
    """

    source: Layout
    target: Layout
    cluster: Cluster
    groups: tuple[RegionGroup, ...]
    hops: tuple[Hop, ...]

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """Transfers, sorted by stage, sender and receiver. Transfers between two ranks are in storage order."""
        order = {spec.name: index for index, spec in enumerate(self.source.specs)}
        pieces: dict[tuple[int, int, int], list[Region]] = {}
        found = []
        for hop in self.hops:
            key = (hop.group, hop.begin, hop.end)
            if key not in pieces:
                pieces[key] = list(self.groups[hop.group].pieces(hop.begin, hop.end))
            found += [Transfer(hop.stage, hop.sender, hop.receiver, region) for region in pieces[key]]
        found.sort(key=lambda t: (t.stage, t.sender, t.receiver, order[t.region.tensor], t.region.offset))
        return tuple(found)

    @cached_property
    def copies(self) -> tuple[Copy, ...]:
        """Regions that ranks hold in both layouts, sorted by rank. The regions of a rank are in storage order."""
        found = []
        for rank in sorted(set(self.source.placement.ranks) & set(self.target.placement.ranks)):
            before = {local.region.tensor: local.region for local in self.source.tensors(rank)}
            for local in self.target.tensors(rank):
                held = before.get(local.region.tensor)
                common = held.intersect(local.region) if held is not None else None
                if common is not None:
                    found.append(Copy(rank, common))
        return tuple(found)

    @cached_property
    def loads(self) -> PortLoads:
        """Elements that pass each port."""
        return PortLoads.of(self.hops, self.cluster)

    def bytes_by_rank(self, element_bytes: int) -> dict[int, RankBytes]:
        """Count the bytes of every rank of either layout; an element in messages has `element_bytes` bytes."""
        sent = self.loads.device_out
        received = self.loads.device_in
        copied: defaultdict[int, int] = defaultdict(int)
        for group in self.groups:
            for rank in group.resident:
                copied[rank] += group.elements
        ranks = sorted({*self.source.placement.ranks, *self.target.placement.ranks})
        return {
            r: RankBytes(sent[r] * element_bytes, received[r] * element_bytes, copied[r] * element_bytes)
            for r in ranks
        }

    def bytes_by_link(self, element_bytes: int) -> LinkBytes:
        """Count the bytes on every class of links; an element in messages has `element_bytes` bytes."""
        network = sum(self.loads.node_out.values())
        node = sum(self.loads.device_out.values()) - network
        device = sum(group.elements * len(group.resident) for group in self.groups)
        return LinkBytes(device * element_bytes, node * element_bytes, network * element_bytes)

    def busiest_seconds(self, links: Links, element_bytes: int) -> float:
        """Compute the seconds that the busiest port, of a device or a node, needs for its bytes."""
        loads = self.loads
        return element_bytes * max(loads.sending_seconds(links), loads.receiving_seconds(links))

    def seconds(self, links: Links, element_bytes: int) -> float:
        """Predict the seconds of the reallocation: the time of the busiest port, plus a latency for each message of
        the rank with the most messages.

        Everything that one rank sends to another in one stage counts as one message. Copies inside a device are
        free.
        """
        messages: defaultdict[int, int] = defaultdict(int)
        for _, sender, receiver in {(hop.stage, hop.sender, hop.receiver) for hop in self.hops}:
            messages[sender] += 1
            messages[receiver] += 1
        latency = links.latency_s * max(messages.values(), default=0)
        return self.busiest_seconds(links, element_bytes) + latency

    def digest(self) -> str:
        """Hash the schedule; ranks with the same hash agree on every transfer."""
        state = hashlib.sha256()
        for layout in (self.source, self.target):
            state.update(f"{layout.head} {layout.placement.layout} {layout.shape!r}\n".encode())
        for group in self.groups:
            state.update(f"{group.holders} {group.targets} {group.boxes}\n".encode())
        for hop in self.hops:
            state.update(repr(tuple(hop)).encode())
        return state.hexdigest()


def reallocate(source: Layout, target: Layout, cluster: Cluster, links: Links | None = None) -> Reallocation:
    """Schedule the transfers that turn `source` into `target`, with the smallest load on the busiest port.

    The bandwidths of `links` (default: `Links()`) weigh sending inside a node against sending between nodes.
    Raises ValueError unless both layouts hold the same tensors.
    """
    if source.specs != target.specs:
        raise ValueError("the two layouts of a reallocation must hold the same tensors")
    links = links or Links()
    groups = tuple(group_regions(source, target))

    def schedule(spare: SpareCapacity | None) -> Reallocation:
        routes = find_transfer_routes(groups, cluster, links, spare)
        hops = tuple(hop for route in routes for hop in list_hops(route))
        return Reallocation(source=source, target=target, cluster=cluster, groups=groups, hops=hops)

    plain = schedule(None)
    if plain.loads.sending_seconds(links) <= plain.loads.receiving_seconds(links) * _CLOSE:
        return plain
    with_remote_sources = schedule(plain.loads.find_spare_capacity(links))
    return min(plain, with_remote_sources, key=lambda r: r.busiest_seconds(links, 1))


def _seconds(devices: Mapping[int, int], nodes: Mapping[int, int], links: Links) -> float:
    return max(max(devices.values()) / links.device_bytes_per_s, max(nodes.values()) / links.node_bytes_per_s)
