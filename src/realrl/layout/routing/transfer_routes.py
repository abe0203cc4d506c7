"""Choose the senders of every region group so that the load of the busiest port is as small as possible. A region
group has all regions with the same source ranks and the same target ranks.

Every receiver gets each byte exactly once, and a node receives it from outside at most once. So the loads of
in-ports are fixed, and only the choice of senders is free. Two kinds of work are balanced: a holder must send the
first copy, and any rank that has received the bytes can send more copies. The work is balanced over nodes first,
then over the devices of each node. Two hops are enough for every such distribution: a holder sends to a relay, and
the relay sends to all other receivers.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from realrl.layout.routing.balance import Capacity, Task, balance
from realrl.layout.routing.region_groups import RegionGroup
from realrl.plan.cluster import Cluster, Links

Shares = dict[int, float]
"""Node or rank -> its share. Values called shares are relative to their sum. Values called fractions are relative
to the elements of the group."""

OUTSIDE = -1
"""Stands for all other nodes in a list of the ranks of a node."""


@dataclass
class TransferRoute:
    """How one region group gets from its holders to its receivers. `holders` and `receivers` map each node to its
    ranks."""

    number: int
    group: RegionGroup
    holders: dict[int, list[int]]
    receivers: dict[int, list[int]]
    sent: Shares = field(default_factory=dict)
    """Node -> elements that its ranks send to nodes without holders."""
    senders: Shares = field(default_factory=dict)
    """Holder -> its share of the elements that holders send to nodes without holders."""
    relays: Shares = field(default_factory=dict)
    """Node without holders -> the fraction that it forwards to all other such nodes."""
    ingress: dict[int, Shares] = field(default_factory=dict)
    """Node without holders -> ingress rank -> the share that this rank takes in and forwards inside the node."""
    local_sources: dict[int, Shares] = field(default_factory=dict)
    """Node with holders -> holder -> its share of the elements that holders send inside the node."""
    local_forwarders: dict[int, Shares] = field(default_factory=dict)
    """Node with holders -> receiver -> the fraction that it forwards to all other receivers of the node."""
    remote_fraction: dict[int, float] = field(default_factory=dict)
    """Node with holders -> the fraction that comes from other nodes, because the holders in this node are busy."""
    remote_sources: dict[int, Shares] = field(default_factory=dict)
    """Node with holders -> holder in another node -> its share of the remote fraction."""

    @cached_property
    def entered_nodes(self) -> tuple[int, ...]:
        """Nodes that need the group and have no holder."""
        return tuple(node for node in self.receivers if node not in self.holders)

    @cached_property
    def holding_nodes(self) -> tuple[int, ...]:
        """Nodes that need the group and have a holder."""
        return tuple(node for node in self.receivers if node in self.holders)


@dataclass(frozen=True)
class SpareCapacity:
    """Send capacity that a schedule leaves unused; holders can serve other nodes with it."""

    idle: frozenset[int]
    """Ranks that can send more."""
    node_in: Mapping[int, float]
    """Node -> elements that it already takes in."""
    node_out: Mapping[int, float]
    """Node -> elements that it already sends out."""


def find_transfer_routes(
    groups: Sequence[RegionGroup], cluster: Cluster, links: Links, spare: SpareCapacity | None = None
) -> list[TransferRoute]:
    """Find the routes of all groups that have receivers. With `spare`, holders in other nodes may send too."""
    result = [
        TransferRoute(
            number=number,
            group=group,
            holders=_by_node(group.holders, cluster),
            receivers=_by_node(group.receivers, cluster),
        )
        for number, group in enumerate(groups)
        if group.receivers
    ]
    seconds = receiving_seconds(result, links)
    _choose_nodes(result, seconds * links.node_bytes_per_s)
    loads: defaultdict[int, float] = defaultdict(float)
    for route in result:
        for node, amount in route.sent.items():
            loads[node] += amount
    seconds = max([seconds, *(load / links.node_bytes_per_s for load in loads.values())])
    busiest = _choose_devices(result, seconds * links.device_bytes_per_s, links, spare)
    if spare is not None:
        seconds = max(seconds, busiest / links.device_bytes_per_s)
        _choose_remote_sources(result, seconds * links.node_bytes_per_s, spare)
    return result


def receiving_seconds(routes: Sequence[TransferRoute], links: Links) -> float:
    """Compute the seconds of the busiest in-port, at one byte per element, if no node receives what it already
    holds."""
    nodes: defaultdict[int, int] = defaultdict(int)
    devices: defaultdict[int, int] = defaultdict(int)
    for route in routes:
        for node in route.entered_nodes:
            nodes[node] += route.group.elements
        for rank in route.group.receivers:
            devices[rank] += route.group.elements
    node = max(nodes.values(), default=0)
    device = max(devices.values(), default=0)
    return max(node / links.node_bytes_per_s, device / links.device_bytes_per_s)


def _by_node(ranks: Iterable[int], cluster: Cluster) -> dict[int, list[int]]:
    result: dict[int, list[int]] = {}
    for rank in ranks:
        result.setdefault(cluster.node(rank), []).append(rank)
    return result


def _choose_nodes(routes: Sequence[TransferRoute], floor: float) -> None:
    """Set `sent` and `relays` of each route."""
    crossing = [route for route in routes if route.entered_nodes]
    tasks: list[Task] = []
    for route in crossing:
        size = route.group.elements
        holders = tuple(route.holders)
        entered = route.entered_nodes
        # A holder sends the first copy; any node that has a copy can send the next ones.
        tasks += [Task(size, holders), Task(size * (len(entered) - 1), holders, entered)]
    shares = iter(balance(tasks, floor))
    for route in crossing:
        route.sent = _sum(next(shares), again := next(shares))
        copies = (len(route.entered_nodes) - 1) * route.group.elements
        route.relays = {node: again[node] / copies for node in route.entered_nodes if node in again}


def _choose_devices(
    routes: Sequence[TransferRoute], floor: float, links: Links, spare: SpareCapacity | None
) -> float:
    """Set the senders inside each node; return the elements that the busiest device sends. Loads of a device up to
    `floor` elements cost nothing."""
    tasks: defaultdict[int, list[Task]] = defaultdict(list)
    for route in routes:
        for node, task in _device_tasks(route, spare):
            tasks[node].append(task)
    speed = {OUTSIDE: links.node_bytes_per_s / links.device_bytes_per_s}
    shares = {}
    loads: defaultdict[int, float] = defaultdict(float)
    for node, node_tasks in tasks.items():
        busy = {OUTSIDE: spare.node_in[node]} if spare is not None else {}
        result = balance(node_tasks, floor, Capacity(busy, speed))
        shares[node] = iter(result)
        for rank, amount in (item for parts in result for item in parts.items()):
            loads[rank] += amount
    loads[OUTSIDE] = 0.0
    for route in routes:
        size = route.group.elements
        for node in route.sent:
            if node in route.holders:
                route.senders |= next(shares[node])
        for node in route.entered_nodes:
            route.ingress[node] = next(shares[node]) or dict.fromkeys(route.receivers[node], 1.0)
        for node in route.holding_nodes:
            first = next(shares[node])
            again = next(shares[node])
            route.remote_fraction[node] = first.pop(OUTSIDE, 0.0) / size
            receivers = route.receivers[node]
            copies = (len(receivers) - 1) * size
            route.local_forwarders[node] = {d: again[d] / copies for d in receivers if d in again}
            route.local_sources[node] = {d: a for d, a in _sum(first, again).items() if d not in receivers}
    return max(loads.values())


def _device_tasks(route: TransferRoute, spare: SpareCapacity | None) -> Iterable[tuple[int, Task]]:
    """Yield (node, task of its devices), in the order in which `_choose_devices` reads the shares."""
    size = route.group.elements
    for node, amount in route.sent.items():
        if node in route.holders:
            yield node, Task(amount, tuple(route.holders[node]))
    for node in route.entered_nodes:
        relayed = route.relays.get(node, 0.0) * (len(route.entered_nodes) - 1)
        receivers = tuple(route.receivers[node])
        yield node, Task((len(receivers) - 1 + relayed) * size, receivers)
    for node in route.holding_nodes:
        holders = tuple(route.holders[node])
        receivers = tuple(route.receivers[node])
        has_remote = spare is not None and any(_candidates(route, node, spare).values())
        yield node, Task(size, holders, (OUTSIDE,) if has_remote else ())
        yield node, Task((len(receivers) - 1) * size, holders, receivers)


def _candidates(route: TransferRoute, node: int, spare: SpareCapacity) -> dict[int, list[int]]:
    """Find the idle holders in each of the other nodes."""
    idle = {n: [h for h in holders if h in spare.idle] for n, holders in route.holders.items()}
    return {n: holders for n, holders in idle.items() if holders and n != node}


def _choose_remote_sources(routes: Sequence[TransferRoute], limit: float, spare: SpareCapacity) -> None:
    """Set `remote_sources`: nodes are chosen by their load so far, and all idle holders of a node share evenly.
    Shares are reduced if a node would otherwise send more than `limit` elements."""
    served = [
        (route, node, part) for route in routes for node, part in route.remote_fraction.items() if part > 0
    ]
    candidates = [_candidates(route, node, spare) for route, node, _ in served]
    tasks = [
        Task(part * route.group.elements, tuple(nodes))
        for (route, _, part), nodes in zip(served, candidates, strict=True)
    ]
    shares = balance(tasks, limit, Capacity(busy=spare.node_out))
    added: defaultdict[int, float] = defaultdict(float)
    for node, amount in (item for amounts in shares for item in amounts.items()):
        added[node] += amount
    scale = {n: min(1.0, max(0.0, limit - spare.node_out[n]) / amount) for n, amount in added.items()}
    for (route, node, _), nodes, amounts in zip(served, candidates, shares, strict=True):
        parts = {other: amount * scale[other] for other, amount in amounts.items()}
        route.remote_fraction[node] = sum(parts.values()) / route.group.elements
        route.remote_sources[node] = {
            rank: part / len(nodes[other]) for other, part in parts.items() for rank in nodes[other]
        }


def _sum(first: Shares, second: Shares) -> Shares:
    both = sorted(first.keys() | second.keys())
    return {key: first.get(key, 0.0) + second.get(key, 0.0) for key in both}
