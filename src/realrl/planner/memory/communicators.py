"""Device memory of NCCL communicators, from the sizes of NCCL's buffers.

Each channel of a communicator has one connection per peer. Between devices of a node, the receiving side allocates
10 MiB. This holds the buffers of the protocols Simple, LL128 and LL (4, 4.7 and 0.5 MiB), rounded up to a multiple
of 2 MiB. The sending side allocates 2 MiB. Sources: `computeBuffSizes` in src/init.cc of nccl,
src/transport/p2p.cc, and the allocations on 8 H100 in nccl#1685. Between nodes, both sides have the buffers of
Simple and LL128 if the network can read device memory. Groups of more than two devices of a node may use NVLink
SHARP, with two buffers of 1 MiB per channel and member (src/transport/nvls.cc). Point-to-point messages use
separate connections. Between nodes, all messages of a channel and direction share 16 buffers of 128 KiB.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from functools import lru_cache

from realrl.plan.axes import Degrees
from realrl.plan.cluster import Cluster
from realrl.plan.communicators import CTAS, WORLD_CTAS, RankSet, Role, list_groups, list_own_rank_sets
from realrl.plan.placement import Mesh, Placement, Strategy

_MIB = 1 << 20
_LOCAL = 12 * _MIB
"""Bytes of a channel for one peer on the same node, to receive and to send."""
_REMOTE = 20 * _MIB
"""Bytes of a channel for one peer on another node."""
_SHARP = 2 * _MIB
"""Bytes per channel and group member for NVLink SHARP. They count on all devices, although not all devices have
it."""
_SHARED = 4 * _MIB
"""Bytes of a channel's buffers, which all messages to and from other nodes share."""
_CHANNELS_PER_PEER = 2
"""Number of channels for messages with one peer, if the communicator spans nodes."""


def collective_bytes(ranks: RankSet, cluster: Cluster, ctas: int) -> int:
    """Compute the bytes per member for ring collectives, which connect each member with two neighbours.

    `ctas` is the number of channels. The result is for the member with the most bytes.
    """
    local, nodes = _spread(ranks, cluster)
    here, there = min(local - 1, 2 if nodes == 1 else 1), 0
    if nodes > 1:
        there = min(nodes - 1, 2) if local == 1 else 1
    sharp = _SHARP * local if local > 2 else 0
    return ctas * (_LOCAL * here + _REMOTE * there + sharp)


def message_bytes(ranks: RankSet, cluster: Cluster, ctas: int, peers: int) -> int:
    """Compute the bytes per member for messages with `peers` other members. These are on its own node as far as
    possible."""
    local, nodes = _spread(ranks, cluster)
    if nodes == 1:
        return ctas * _LOCAL * min(peers, local - 1)
    return min(ctas, _CHANNELS_PER_PEER) * _LOCAL * min(peers, local - 1) + ctas * _SHARED


def world_bytes(cluster: Cluster) -> int:
    """Compute the bytes per device of the communicator of all ranks, which reallocates parameters."""
    if cluster.size == 1:
        return 0
    ranks = tuple(range(cluster.size))
    messages = message_bytes(ranks, cluster, WORLD_CTAS, cluster.largest_node)
    return collective_bytes(ranks, cluster, WORLD_CTAS) + messages


def count_layout_bytes(placements: Iterable[Placement], cluster: Cluster) -> int:
    """Compute the bytes per device of the process groups of several placements. Placements with equal meshes and
    degrees share groups."""
    keys = {(p.mesh, p.strategy.degrees, p.strategy.ep) for p in placements}
    return sum(_layout_bytes(mesh.nodes(cluster), degrees, ep) for mesh, degrees, ep in keys)


@lru_cache(maxsize=1 << 14)
def _layout_bytes(nodes: Cluster, degrees: Degrees, ep: int) -> int:
    """Bytes per device of a layout's process groups on these nodes. If groups of a role differ, the one with the
    most bytes counts."""
    if nodes.size == 1:
        return 0
    placement = Placement(Mesh(0, nodes.size), Strategy(degrees=degrees, ep=ep))
    groups: dict[Role, list[RankSet]] = defaultdict(list)
    devices, stage = nodes.runs[0][1], nodes.size // degrees["pp"]
    if (
        nodes.even
        and devices % (degrees["cp"] * degrees["tp"]) == 0
        and (devices % ep == 0 or ep % devices == 0)
        and (devices % stage == 0 or stage % devices == 0)
    ):
        # Stages begin at nodes, or divide them evenly, so the groups of all ranks span nodes in the same way.
        groups |= {role: [ranks] for role, ranks in list_own_rank_sets(placement, 0).items()}
    else:
        for role, ranks in list_groups(placement):
            groups[role].append(ranks)
    merged: dict[RankSet, set[Role]] = defaultdict(set)
    for role, (first, *_) in groups.items():
        if len(first) > 1:
            merged[tuple(sorted(first))].add(role)
    return sum(_group_bytes(groups[next(iter(uses))], nodes, uses) for uses in merged.values())


def _group_bytes(groups: Iterable[RankSet], nodes: Cluster, uses: Collection[Role]) -> int:
    """Bytes per member of the group with the most bytes."""
    ctas = max(CTAS[use] for use in uses)
    peers = 2 * ("pipeline" in uses)
    return max(
        collective_bytes(ranks, nodes, ctas) + (message_bytes(ranks, nodes, ctas, peers) if peers else 0)
        for ranks in groups
    )


def _spread(ranks: RankSet, cluster: Cluster) -> tuple[int, int]:
    """Return the most ranks on one node, and the number of nodes."""
    counts = Counter(map(cluster.node, ranks))
    return max(counts.values()), len(counts)
