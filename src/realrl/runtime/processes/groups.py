"""Create the process groups of a run: with gloo, or as splits of one NCCL communicator of all ranks.

All ranks create the same groups in the same order.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations

import torch
import torch.distributed as dist

from realrl.model.group import Group
from realrl.plan.communicators import (
    WORLD_CTAS,
    RankSet,
    RankSets,
    group_splits,
    list_communicators,
    list_stage_pairs,
)

WAIT = timedelta(days=20)
"""Maximum time that ranks wait for each other after the rendezvous. It is long because a rank may compute for
hours.

A watchdog ends a stuck run (`launch.stall_minutes`). Longer times would overflow: parts of gloo count milliseconds
in 32 bits.
"""


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """The place of a rank among all ranks."""

    rank: int
    world: int
    node: range
    """Ranks of this rank's node."""
    device: torch.device


def make_gloo_groups(place: RankPlace, rank_sets: RankSets) -> dict[RankSet, Group]:
    """Create the groups that contain this rank, each with connections between all its ranks.

    The group of all ranks in order is the default group, which exists already.
    """
    found: dict[RankSet, Group] = {}
    everyone = tuple(range(place.world))
    for ranks in rank_sets:
        handle = dist.group.WORLD if ranks == everyone else dist.new_group(sorted(ranks), timeout=WAIT)
        if place.rank in ranks:
            found[ranks] = Group(ranks, ranks.index(place.rank), handle)
    return found


def make_nccl_groups(
    place: RankPlace, rank_sets: RankSets, *, with_node_pairs: bool = False
) -> dict[RankSet, Group]:
    """Create the groups that contain this rank. Groups with the same ranks share one communicator.

    Communicators are split from the communicator of all ranks; disjoint ones are split together. All connections of
    a run are made now, in a fixed order. A collective connects each communicator. Messages connect stages of
    pipelines and, with `with_node_pairs`, all pairs of ranks on a node. A later connection would take memory that
    is planned for other uses, and the host would wait while operations of other communicators run.
    """
    world, *others = list_communicators(rank_sets, place.world)
    handles: dict[RankSet, dist.ProcessGroup | None] = {world.ranks: dist.group.WORLD}
    _reduce(place, dist.group.WORLD)
    for split in group_splits(others):
        handle = dist.split_group(
            split_ranks=[list(communicator.ranks) for communicator in split],
            timeout=WAIT,
            pg_options=make_nccl_options(split[0].ctas),
        )
        own = next((one for one in split if place.rank in one.ranks), None)
        if own is not None:
            handles[own.ranks] = handle
            _reduce(place, handle)
    for ranks, roles in rank_sets.items():
        if "pipeline" in roles and place.rank in ranks:
            _connect(place, list_stage_pairs(ranks), handles[tuple(sorted(ranks))])
    if with_node_pairs:
        _connect(place, combinations(place.node, 2), dist.group.WORLD)
    torch.cuda.synchronize(place.device)
    return {
        ranks: Group(ranks, ranks.index(place.rank), handles[tuple(sorted(ranks))])
        for ranks in rank_sets
        if place.rank in ranks
    }


def make_nccl_options(ctas: int = WORLD_CTAS) -> "dist.ProcessGroupNCCL.Options":
    """Return options of a communicator with at most `ctas` thread blocks, unless the user has set
    `NCCL_MAX_CTAS`."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = ctas
    return options


def _reduce(place: RankPlace, handle: dist.ProcessGroup | None) -> None:
    """Connect the ranks of a communicator by a collective."""
    dist.all_reduce(torch.zeros(1, device=place.device), group=handle)


def _connect(place: RankPlace, pairs: Iterable[tuple[int, int]], handle: dist.ProcessGroup | None) -> None:
    """Exchange a message between the ranks of each pair, one pair after the other."""
    for pair in pairs:
        if place.rank in pair:
            peer = sum(pair) - place.rank
            sent, received = torch.zeros(1, device=place.device), torch.zeros(1, device=place.device)
            operations = [
                dist.P2POp(dist.isend, sent, peer, group=handle),
                dist.P2POp(dist.irecv, received, peer, group=handle),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
