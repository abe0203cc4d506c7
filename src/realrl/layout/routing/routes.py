"""From one layout of a model to another: what is sent between which ranks, and what that costs."""

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from realrl.layout.layout import Layout
from realrl.layout.region import Region
from realrl.layout.routing.journeys import Relief, journeys
from realrl.layout.routing.legs import Leg, legs
from realrl.layout.routing.links import Links
from realrl.layout.routing.parcels import Parcel, parcels
from realrl.layout.routing.ports import PortLoads
from realrl.plan.cluster import Cluster

_CLOSE = 1.001
"""Senders need no relief when the busiest is at most this much busier than the busiest receiver."""


@dataclass(frozen=True, order=True)
class Transfer:
    """A region sent from rank to rank.

    What is sent in stage 0 its sender holds in the source layout; what is sent in a later stage it received
    in one before.
    """

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
    """Bytes that a rank sends and receives, and those that it copies from its own memory."""

    sent: int = 0
    received: int = 0
    copied: int = 0


@dataclass(frozen=True)
class LinkBytes:
    """Bytes by how far they go: inside a device, from device to device of a node, from node to node."""

    device: int
    node: int
    network: int


@dataclass(frozen=True)
class Reallocation:
    """What turns one layout of a model into another; made by `reallocate`.

    Every region of the target layout is covered exactly once by the copies and the transfers to its rank;
    nothing else is sent. A node without a region takes it in at most once and spreads it.
    """

    source: Layout
    target: Layout
    cluster: Cluster
    parcels: tuple[Parcel, ...]
    legs: tuple[Leg, ...]

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """By stage, sender and receiver; between two ranks in storage order."""
        order = {spec.name: index for index, spec in enumerate(self.source.specs)}
        pieces: dict[tuple[int, int, int], list[Region]] = {}
        found = []
        for leg in self.legs:
            key = (leg.parcel, leg.begin, leg.end)
            if key not in pieces:
                pieces[key] = list(self.parcels[leg.parcel].pieces(leg.begin, leg.end))
            found += [Transfer(leg.stage, leg.sender, leg.receiver, region) for region in pieces[key]]
        found.sort(key=lambda t: (t.stage, t.sender, t.receiver, order[t.region.tensor], t.region.offset))
        return tuple(found)

    @cached_property
    def copies(self) -> tuple[Copy, ...]:
        """What ranks of both layouts need not be sent; by rank, in storage order."""
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
        return PortLoads.of(self.legs, self.cluster)

    def bytes_by_rank(self, element_bytes: int) -> dict[int, RankBytes]:
        """Exact bytes of every rank of either layout; `element_bytes` is the width of an element sent."""
        sent, received = self.loads.device_out, self.loads.device_in
        copied: defaultdict[int, int] = defaultdict(int)
        for parcel in self.parcels:
            for rank in parcel.keepers:
                copied[rank] += parcel.elements
        ranks = sorted({*self.source.placement.ranks, *self.target.placement.ranks})
        return {
            r: RankBytes(sent[r] * element_bytes, received[r] * element_bytes, copied[r] * element_bytes)
            for r in ranks
        }

    def bytes_by_link(self, element_bytes: int) -> LinkBytes:
        """Exact bytes of every class of links; `element_bytes` is the width of an element sent."""
        network = sum(self.loads.node_out.values())
        node = sum(self.loads.device_out.values()) - network
        device = sum(parcel.elements * len(parcel.keepers) for parcel in self.parcels)
        return LinkBytes(device * element_bytes, node * element_bytes, network * element_bytes)

    def busiest_seconds(self, links: Links, element_bytes: int) -> float:
        """Time that the most loaded port, of a device or of a node, needs for its bytes."""
        loads = self.loads
        return element_bytes * max(loads.sending_seconds(links), loads.receiving_seconds(links))

    def seconds(self, links: Links, element_bytes: int) -> float:
        """Modelled time: that of the busiest port, and the latency of each message the busiest rank handles.

        What one rank sends another in one stage is one message. Copies inside a device are not counted.
        """
        messages: defaultdict[int, int] = defaultdict(int)
        for _, sender, receiver in {(leg.stage, leg.sender, leg.receiver) for leg in self.legs}:
            messages[sender] += 1
            messages[receiver] += 1
        latency = links.latency_s * max(messages.values(), default=0)
        return self.busiest_seconds(links, element_bytes) + latency

    def digest(self) -> str:
        """A hash of the schedule; ranks that compute the same one agree on every transfer."""
        state = hashlib.sha256()
        for layout in (self.source, self.target):
            state.update(f"{layout.head} {layout.placement.layout} {layout.shape!r}\n".encode())
        for parcel in self.parcels:
            state.update(f"{parcel.holders} {parcel.targets} {parcel.boxes}\n".encode())
        for leg in self.legs:
            state.update(repr(tuple(leg)).encode())
        return state.hexdigest()


def reallocate(source: Layout, target: Layout, cluster: Cluster, links: Links | None = None) -> Reallocation:
    """The schedule that turns `source` into `target`, with the busiest port of `links` as idle as possible.

    The bandwidths of `links` (default: `Links()`) decide how much sending inside a node counts against sending
    between nodes. Raises ValueError unless both layouts are of the same tensors.
    """
    if source.specs != target.specs:
        raise ValueError("the two layouts of a reallocation must hold the same tensors")
    links = links or Links()
    moving = tuple(parcels(source, target))

    def schedule(relief: Relief | None) -> Reallocation:
        chosen = journeys(moving, cluster, links, relief)
        return Reallocation(source, target, cluster, moving, tuple(leg for j in chosen for leg in legs(j)))

    plain = schedule(None)
    if plain.loads.sending_seconds(links) <= plain.loads.receiving_seconds(links) * _CLOSE:
        return plain
    relieved = schedule(plain.loads.relief(links))
    return min(plain, relieved, key=lambda r: r.busiest_seconds(links, 1))
