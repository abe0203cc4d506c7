"""The hops of a transfer route: which slices of a region group go from rank to rank. A region group has all regions
with the same source ranks and the same target ranks."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from realrl.layout.routing.region_groups import RegionGroup
from realrl.layout.routing.transfer_routes import Shares, TransferRoute

_NO_RELAY = -1
"""Stands for no relay: holders send to all receivers directly."""


class Hop(NamedTuple):
    """Elements `begin` to `end` of a region group, sent from one rank to another. In stage 0, the sender holds
    these elements in the source layout. In later stages, it has received them in an earlier stage."""

    stage: int
    sender: int
    receiver: int
    group: int
    begin: int
    end: int


class ElementSlice(NamedTuple):
    """Elements `begin` to `end` of a region group, and the rank or node that was chosen for them."""

    begin: int
    end: int
    choice: int


def list_hops(route: TransferRoute) -> Iterator[Hop]:
    """List all hops of a route; the first hops of a slice come before the hops that forward it."""
    group = route.group
    if route.entered_nodes:
        for piece in _divide_by_relay(group, route.relays):
            yield from _between_nodes(route, piece)
    for node in route.holding_nodes:
        yield from _within_node(route, node)


def _between_nodes(route: TransferRoute, piece: ElementSlice) -> Iterator[Hop]:
    relay = piece.choice
    senders = _divide(route.group, piece, route.senders)
    ingress = {node: _divide(route.group, piece, route.ingress[node]) for node in route.entered_nodes}
    for node in route.entered_nodes:
        relayed = relay not in (_NO_RELAY, node)
        sources = ingress[relay] if relayed else senders
        for begin, end, sender, ingress_rank in _overlay(sources, ingress[node]):
            yield Hop(
                stage=int(relayed),
                sender=sender,
                receiver=ingress_rank,
                group=route.number,
                begin=begin,
                end=end,
            )
        for begin, end, ingress_rank in ingress[node]:
            for other in route.receivers[node]:
                if other != ingress_rank:
                    yield Hop(
                        stage=1 + relayed,
                        sender=ingress_rank,
                        receiver=other,
                        group=route.number,
                        begin=begin,
                        end=end,
                    )


def _within_node(route: TransferRoute, node: int) -> Iterator[Hop]:
    forwarders = route.local_forwarders[node]
    remote = route.remote_fraction[node]
    forwarded = sum(forwarders.values())
    whole = ElementSlice(0, route.group.elements, _NO_RELAY)
    from_outside, from_inside = 1, 0
    for piece in _divide(route.group, whole, {from_outside: remote, from_inside: 1 - remote}):
        if piece.choice == from_outside:
            # A byte enters the node only once, so its receivers must forward it among themselves.
            sources = route.remote_sources[node]
            relays = forwarders or dict.fromkeys(route.receivers[node], 1.0)
        else:
            # All slices from other nodes are forwarded, which uses up an equal part of the forwarders' fractions.
            left = max(0.0, forwarded - remote) / forwarded if forwarded else 0.0
            relays = {_NO_RELAY: max(0.0, 1 - max(forwarded, remote))}
            relays |= {rank: part * left for rank, part in forwarders.items()}
            sources = route.local_sources[node]
        for part in _divide(route.group, piece, relays):
            yield from _forward(route, node, part, sources)


def _forward(route: TransferRoute, node: int, piece: ElementSlice, sources: Shares) -> Iterator[Hop]:
    """Send a slice to its relay, if it has one, and from there to all other receivers."""
    receivers = route.receivers[node]
    relay = piece.choice
    first = receivers if relay == _NO_RELAY else [relay]
    for begin, end, source in _divide(route.group, piece, sources):
        for receiver in first:
            yield Hop(stage=0, sender=source, receiver=receiver, group=route.number, begin=begin, end=end)
    for other in receivers:
        if other not in first:
            yield Hop(
                stage=1, sender=relay, receiver=other, group=route.number, begin=piece.begin, end=piece.end
            )


def _divide_by_relay(group: RegionGroup, relays: Shares) -> list[ElementSlice]:
    """Divide a group by the fractions of relays; the remaining elements have no relay."""
    rest = max(0.0, 1 - sum(relays.values()))
    return _divide(group, ElementSlice(0, group.elements, _NO_RELAY), {_NO_RELAY: rest} | relays)


def _divide(group: RegionGroup, piece: ElementSlice, parts: Shares) -> list[ElementSlice]:
    """Divide a slice in proportion to `parts`, at the nearest row boundaries; empty slices are left out."""
    begin, end, _ = piece
    total = sum(parts.values())
    done = 0.0
    edges = [begin]
    for amount in parts.values():
        done += amount
        edges.append(group.nearest_row(begin + (end - begin) * done / total))
    edges[-1] = end
    return [
        ElementSlice(a, b, choice) for (a, b), choice in zip(pairwise(edges), parts, strict=True) if a < b
    ]


def _overlay(first: list[ElementSlice], second: list[ElementSlice]) -> Iterator[tuple[int, int, int, int]]:
    """Intersect two divisions of the same slice: (begin, end, first choice, second choice) of each piece."""
    i = j = 0
    while i < len(first) and j < len(second):
        a = first[i]
        b = second[j]
        yield max(a.begin, b.begin), min(a.end, b.end), a.choice, b.choice
        i += a.end <= b.end
        j += b.end <= a.end
