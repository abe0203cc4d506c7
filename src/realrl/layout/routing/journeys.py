"""Who sends what, chosen so that the busiest port carries as little as possible.

A needer receives a byte exactly once and a node takes it in at most once, so that the loads of in-ports are
given; what is chosen is who sends. Two kinds of work are shared out, first over nodes, then over the devices
of each node: the copy that holders must send themselves, and the further copies, which whoever has received
the bytes can send just as well. Paths of two hops are enough for any such distribution: some holder sends to
a relay, which sends to all others.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from realrl.layout.routing.balance import Capacity, Task, balance
from realrl.layout.routing.links import Links
from realrl.layout.routing.parcels import Parcel
from realrl.plan.cluster import Cluster

Parts = dict[int, float]
"""Node or rank -> its part of something; parts are relative to their sum, fractions to a parcel."""

OUTSIDE = -1
"""In the place of a rank of a node: the other nodes."""


@dataclass
class Journey:
    """How one parcel gets to its needers. Ranks are listed by node."""

    number: int
    parcel: Parcel
    holders: dict[int, list[int]]
    needers: dict[int, list[int]]
    sent: Parts = field(default_factory=dict)
    """Node -> elements that its ranks send to nodes without holders."""
    senders: Parts = field(default_factory=dict)
    """Holder -> its part of what holders send to nodes without holders."""
    relays: Parts = field(default_factory=dict)
    """Node without holders -> the fraction that it passes on to all other such nodes."""
    gates: dict[int, Parts] = field(default_factory=dict)
    """Node without holders -> its device -> the part that the device takes in and spreads inside the node."""
    givers: dict[int, Parts] = field(default_factory=dict)
    """Node with holders -> its holder -> its part of what holders send inside the node."""
    spreaders: dict[int, Parts] = field(default_factory=dict)
    """Node with holders -> its device -> the fraction that it passes on to all others of the node."""
    helped: dict[int, float] = field(default_factory=dict)
    """Node with holders -> the fraction that enters from other nodes all the same, to relieve its holders."""
    helpers: dict[int, Parts] = field(default_factory=dict)
    """Such a node -> holder in another node -> its part of that fraction."""

    @cached_property
    def entered(self) -> tuple[int, ...]:
        """Nodes that need the parcel and have no holder."""
        return tuple(node for node in self.needers if node not in self.holders)

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """Nodes that need the parcel and have a holder."""
        return tuple(node for node in self.needers if node in self.holders)


@dataclass(frozen=True)
class Relief:
    """What a schedule leaves free, for holders in other nodes to help out."""

    idle: frozenset[int]
    """Ranks that can send more."""
    node_in: Mapping[int, float]
    """Node -> elements that it takes in already."""
    node_out: Mapping[int, float]
    """Node -> elements that it sends out already."""


def journeys(
    parcels: Sequence[Parcel], cluster: Cluster, links: Links, relief: Relief | None = None
) -> list[Journey]:
    """The journeys of all parcels that somebody needs; with `relief`, holders elsewhere may help."""
    result = [
        Journey(i, p, _by_node(p.holders, cluster), _by_node(p.needers, cluster))
        for i, p in enumerate(parcels)
        if p.needers
    ]
    seconds = receiving_seconds(result, links)
    _choose_nodes(result, seconds * links.node_bytes_per_s)
    loads: defaultdict[int, float] = defaultdict(float)
    for journey in result:
        for node, amount in journey.sent.items():
            loads[node] += amount
    seconds = max([seconds, *(load / links.node_bytes_per_s for load in loads.values())])
    busiest = _choose_devices(result, seconds * links.device_bytes_per_s, links, relief)
    if relief is not None:
        seconds = max(seconds, busiest / links.device_bytes_per_s)
        _choose_helpers(result, seconds * links.node_bytes_per_s, relief)
    return result


def receiving_seconds(journeys: Sequence[Journey], links: Links) -> float:
    """Time, at a byte per element, of the busiest in-port when nothing enters a node that it holds."""
    nodes: defaultdict[int, int] = defaultdict(int)
    devices: defaultdict[int, int] = defaultdict(int)
    for journey in journeys:
        for node in journey.entered:
            nodes[node] += journey.parcel.elements
        for rank in journey.parcel.needers:
            devices[rank] += journey.parcel.elements
    node, device = max(nodes.values(), default=0), max(devices.values(), default=0)
    return max(node / links.node_bytes_per_s, device / links.device_bytes_per_s)


def _by_node(ranks: Iterable[int], cluster: Cluster) -> dict[int, list[int]]:
    result: dict[int, list[int]] = {}
    for rank in ranks:
        result.setdefault(cluster.node(rank), []).append(rank)
    return result


def _choose_nodes(journeys: Sequence[Journey], floor: float) -> None:
    """Set `sent` and `relays`."""
    crossing = [journey for journey in journeys if journey.entered]
    tasks: list[Task] = []
    for journey in crossing:
        size, holders, entered = journey.parcel.elements, tuple(journey.holders), journey.entered
        tasks += [Task(size, holders), Task(size * (len(entered) - 1), holders, entered)]
    shares = iter(balance(tasks, floor))
    for journey in crossing:
        journey.sent = _sum(next(shares), again := next(shares))
        copies = (len(journey.entered) - 1) * journey.parcel.elements
        journey.relays = {node: again[node] / copies for node in journey.entered if node in again}


def _choose_devices(journeys: Sequence[Journey], floor: float, links: Links, relief: Relief | None) -> float:
    """Set what is chosen inside nodes, node by node; the elements that the busiest device sends.

    `floor`: elements that any device may send.
    """
    tasks: defaultdict[int, list[Task]] = defaultdict(list)
    for journey in journeys:
        for node, task in _device_tasks(journey, relief):
            tasks[node].append(task)
    speed = {OUTSIDE: links.node_bytes_per_s / links.device_bytes_per_s}
    shares = {}
    loads: defaultdict[int, float] = defaultdict(float)
    for node, mine in tasks.items():
        busy = {OUTSIDE: relief.node_in[node]} if relief is not None else {}
        result = balance(mine, floor, Capacity(busy, speed))
        shares[node] = iter(result)
        for rank, amount in (item for parts in result for item in parts.items()):
            loads[rank] += amount
    loads[OUTSIDE] = 0.0
    for journey in journeys:
        size = journey.parcel.elements
        for node in journey.sent:
            if node in journey.holders:
                journey.senders |= next(shares[node])
        for node in journey.entered:
            journey.gates[node] = next(shares[node]) or dict.fromkeys(journey.needers[node], 1.0)
        for node in journey.kept:
            first, again = next(shares[node]), next(shares[node])
            journey.helped[node] = first.pop(OUTSIDE, 0.0) / size
            needers = journey.needers[node]
            copies = (len(needers) - 1) * size
            journey.spreaders[node] = {d: again[d] / copies for d in needers if d in again}
            journey.givers[node] = {d: a for d, a in _sum(first, again).items() if d not in needers}
    return max(loads.values())


def _device_tasks(journey: Journey, relief: Relief | None) -> Iterable[tuple[int, Task]]:
    """By node, the tasks of its devices, in the order in which their shares are read."""
    size = journey.parcel.elements
    for node, amount in journey.sent.items():
        if node in journey.holders:
            yield node, Task(amount, tuple(journey.holders[node]))
    for node in journey.entered:
        relayed = journey.relays.get(node, 0.0) * (len(journey.entered) - 1)
        needers = tuple(journey.needers[node])
        yield node, Task((len(needers) - 1 + relayed) * size, needers)
    for node in journey.kept:
        holders, needers = tuple(journey.holders[node]), tuple(journey.needers[node])
        can_be_helped = relief is not None and any(_candidates(journey, node, relief).values())
        yield node, Task(size, holders, (OUTSIDE,) if can_be_helped else ())
        yield node, Task((len(needers) - 1) * size, holders, needers)


def _candidates(journey: Journey, node: int, relief: Relief) -> dict[int, list[int]]:
    """By node, the holders in other nodes that could help."""
    idle = {n: [h for h in holders if h in relief.idle] for n, holders in journey.holders.items()}
    return {n: holders for n, holders in idle.items() if holders and n != node}


def _choose_helpers(journeys: Sequence[Journey], limit: float, relief: Relief) -> None:
    """Set `helpers`: nodes by how much they send already, all idle holders of a node alike.

    Where all helpers together would make a node send more than `limit` elements, they help the less.
    """
    helped = [(j, node, part) for j in journeys for node, part in j.helped.items() if part > 0]
    candidates = [_candidates(journey, node, relief) for journey, node, _ in helped]
    tasks = [
        Task(part * journey.parcel.elements, tuple(nodes))
        for (journey, _, part), nodes in zip(helped, candidates, strict=True)
    ]
    shares = balance(tasks, limit, Capacity(busy=relief.node_out))
    added: defaultdict[int, float] = defaultdict(float)
    for node, amount in (item for amounts in shares for item in amounts.items()):
        added[node] += amount
    scale = {n: min(1.0, max(0.0, limit - relief.node_out[n]) / amount) for n, amount in added.items()}
    for (journey, node, _), nodes, amounts in zip(helped, candidates, shares, strict=True):
        parts = {other: amount * scale[other] for other, amount in amounts.items()}
        journey.helped[node] = sum(parts.values()) / journey.parcel.elements
        journey.helpers[node] = {
            rank: part / len(nodes[other]) for other, part in parts.items() for rank in nodes[other]
        }


def _sum(first: Parts, second: Parts) -> Parts:
    both = sorted(first.keys() | second.keys())
    return {key: first.get(key, 0.0) + second.get(key, 0.0) for key in both}
