"""Device memory of NCCL communicators, from the sizes of NCCL's buffers.

A channel of a communicator has a connection for each peer. Between devices of a node, the receiving side allocates
10 MiB (buffers of the protocols Simple, LL128 and LL: 4, 4.7 and 0.5 MiB, in steps of 2 MiB), the sending side
2 MiB: `computeBuffSizes` in src/init.cc of nccl, src/transport/p2p.cc, and the allocations of 8 H100 in nccl#1685.
Over a network that reads device memory, both sides have the buffers of Simple and LL128. Groups of more than two
devices of a node use NVLink SHARP where there is one: two buffers of 1 MiB per channel and member,
src/transport/nvls.cc. Messages have connections of their own, and share buffers of 16 chunks of 128 KiB per channel
and direction between nodes.
"""

from collections.abc import Iterable
from functools import lru_cache

from realrl.plan.communicators import CTAS, WORLD_CTAS, RankSet, Role, list_own_rank_sets
from realrl.plan.placement import Mesh, Placement, Strategy

_MIB = 1 << 20
_LOCAL = 12 * _MIB
"""Bytes of a channel for a peer of the same node: what is received, and what is sent."""
_REMOTE = 20 * _MIB
"""Bytes of a channel for a peer on another node."""
_SHARP = 2 * _MIB
"""Bytes of a channel and member for NVLink SHARP."""
_SHARED = 4 * _MIB
"""Bytes of a channel for all messages to and from other nodes."""
_CHANNELS_PER_PEER = 2
"""Channels of the messages with one peer, where a communicator spans nodes."""


def collective_bytes(ranks: RankSet, per_node: int, ctas: int) -> int:
    """Compute the bytes of a member for collectives in a ring: of two neighbours, on this node or on others."""
    local, nodes = _spread(ranks, per_node)
    here, there = min(local - 1, 2 if nodes == 1 else 1), 0
    if nodes > 1:
        there = min(nodes - 1, 2) if local == 1 else 1
    sharp = _SHARP * local if local > 2 else 0
    return ctas * (_LOCAL * here + _REMOTE * there + sharp)


def message_bytes(ranks: RankSet, per_node: int, ctas: int, peers: int) -> int:
    """Compute the bytes of a member for messages with `peers` others, as many of them as can be on its own node."""
    local, nodes = _spread(ranks, per_node)
    if nodes == 1:
        return ctas * _LOCAL * min(peers, local - 1)
    return min(ctas, _CHANNELS_PER_PEER) * _LOCAL * min(peers, local - 1) + ctas * _SHARED


def world_bytes(world: int, per_node: int) -> int:
    """Compute the bytes of the communicator of all ranks, over which parameters are reallocated."""
    if world == 1:
        return 0
    ranks = tuple(range(world))
    return collective_bytes(ranks, per_node, WORLD_CTAS) + message_bytes(
        ranks, per_node, WORLD_CTAS, per_node
    )


def placement_bytes(placement: Placement, per_node: int) -> int:
    """Compute the bytes of a device for all groups of a placement, wherever its mesh lies."""
    s = placement.strategy
    return _layout_bytes(placement.mesh.size, s.dp, s.tp, s.pp, per_node)


def count_layout_bytes(placements: Iterable[Placement], per_node: int) -> int:
    """Compute the bytes of a device for the groups of several placements: those of each layout count once."""
    keys = {(p.mesh, p.strategy.dp, p.strategy.tp, p.strategy.pp) for p in placements}
    return sum(_layout_bytes(mesh.size, dp, tp, pp, per_node) for mesh, dp, tp, pp in keys)


@lru_cache(maxsize=4096)
def _layout_bytes(size: int, dp: int, tp: int, pp: int, per_node: int) -> int:
    if size == 1:
        return 0
    placement = Placement(Mesh(0, size), Strategy(dp, tp, pp))
    roles: dict[RankSet, set[Role]] = {}
    for role, ranks in list_own_rank_sets(placement, 0).items():  # the first stage has most groups
        if len(ranks) > 1:
            roles.setdefault(tuple(sorted(ranks)), set()).add(role)
    total = 0
    for ranks, uses in roles.items():
        ctas = max(CTAS[use] for use in uses)
        total += collective_bytes(ranks, per_node, ctas)
        if "pipeline" in uses:
            total += message_bytes(ranks, per_node, ctas, 2)
    return total


def _spread(ranks: RankSet, per_node: int) -> tuple[int, int]:
    """Most ranks of one node, and number of nodes."""
    nodes = [rank // per_node for rank in ranks]
    return max(map(nodes.count, set(nodes))), len(set(nodes))
