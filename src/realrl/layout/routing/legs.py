"""From chosen shares to legs: which stretch of a parcel goes from which rank to which."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from realrl.layout.routing.journeys import Journey, Parts
from realrl.layout.routing.parcels import Parcel

_NOBODY = -1
"""In the place of a relay: holders send to all receivers themselves."""


class Leg(NamedTuple):
    """Elements `begin` to `end` of a parcel, going from rank to rank.

    What is sent in stage 0 its sender holds from the start; in stage n, it received it in a stage before.
    """

    stage: int
    sender: int
    receiver: int
    parcel: int
    begin: int
    end: int


class Stretch(NamedTuple):
    """Elements `begin` to `end` of a parcel, for which a rank or a node was chosen."""

    begin: int
    end: int
    choice: int


def legs(journey: Journey) -> Iterator[Leg]:
    """All legs of a parcel's journey, senders of a stretch before those that pass it on."""
    parcel = journey.parcel
    if journey.entered:
        for stretch in _with_rest(parcel, journey.relays):
            yield from _between_nodes(journey, stretch)
    for node in journey.kept:
        yield from _within_node(journey, node)


def _between_nodes(journey: Journey, stretch: Stretch) -> Iterator[Leg]:
    relay = stretch.choice
    senders = _divide(journey.parcel, stretch, journey.senders)
    gates = {node: _divide(journey.parcel, stretch, journey.gates[node]) for node in journey.entered}
    for node in journey.entered:
        relayed = relay not in (_NOBODY, node)
        for begin, end, sender, gate in _overlay(gates[relay] if relayed else senders, gates[node]):
            yield Leg(int(relayed), sender, gate, journey.number, begin, end)
        for begin, end, gate in gates[node]:
            for other in journey.needers[node]:
                if other != gate:
                    yield Leg(1 + relayed, gate, other, journey.number, begin, end)


def _within_node(journey: Journey, node: int) -> Iterator[Leg]:
    spreaders, helped = journey.spreaders[node], journey.helped[node]
    reach = sum(spreaders.values())
    whole = Stretch(0, journey.parcel.elements, _NOBODY)
    from_outside, from_inside = 1, 0
    for stretch in _divide(journey.parcel, whole, {from_outside: helped, from_inside: 1 - helped}):
        if stretch.choice == from_outside:
            # It may enter only once, so that those who need it must spread it.
            sources, relays = journey.helpers[node], spreaders or dict.fromkeys(journey.needers[node], 1.0)
        else:
            left = max(0.0, reach - helped) / reach if reach else 0.0
            relays = {_NOBODY: max(0.0, 1 - max(reach, helped))}
            relays |= {rank: part * left for rank, part in spreaders.items()}
            sources = journey.givers[node]
        for part in _divide(journey.parcel, stretch, relays):
            yield from _pass_on(journey, node, part, sources)


def _pass_on(journey: Journey, node: int, stretch: Stretch, sources: Parts) -> Iterator[Leg]:
    """From sources to the relay that was chosen for a stretch, if any, and from there to all needers."""
    needers, relay = journey.needers[node], stretch.choice
    first = needers if relay == _NOBODY else [relay]
    for begin, end, source in _divide(journey.parcel, stretch, sources):
        for receiver in first:
            yield Leg(0, source, receiver, journey.number, begin, end)
    for other in needers:
        if other not in first:
            yield Leg(1, relay, other, journey.number, stretch.begin, stretch.end)


def _with_rest(parcel: Parcel, relays: Parts) -> list[Stretch]:
    """Divide a parcel by the fractions that relays take; what is left is nobody's."""
    rest = max(0.0, 1 - sum(relays.values()))
    return _divide(parcel, Stretch(0, parcel.elements, _NOBODY), {_NOBODY: rest} | relays)


def _divide(parcel: Parcel, stretch: Stretch, parts: Parts) -> list[Stretch]:
    """Divide a stretch in proportion, at the nearest boundaries of rows; empty stretches are left out."""
    begin, end, _ = stretch
    total, done, edges = sum(parts.values()), 0.0, [begin]
    for amount in parts.values():
        done += amount
        edges.append(parcel.nearest_row(begin + (end - begin) * done / total))
    edges[-1] = end
    return [Stretch(a, b, choice) for (a, b), choice in zip(pairwise(edges), parts, strict=True) if a < b]


def _overlay(first: list[Stretch], second: list[Stretch]) -> Iterator[tuple[int, int, int, int]]:
    """Where two divisions of the same stretch meet: (begin, end, choice of the first, of the second)."""
    i = j = 0
    while i < len(first) and j < len(second):
        a, b = first[i], second[j]
        yield max(a.begin, b.begin), min(a.end, b.end), a.choice, b.choice
        i, j = i + (a.end <= b.end), j + (b.end <= a.end)
