"""Groups of ranks that a plan communicates in, and the NCCL communicators made for them. A pure function of a plan.

The runtime makes them, and the planner reserves memory for them.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from realrl.plan.placement import Placement

RankSet = tuple[int, ...]
Role = Literal["data", "tensor", "pipeline", "reverse_pipeline", "mesh", "embedding"]

CTAS: Mapping[Role, int] = {
    "data": 16,
    "tensor": 16,
    "pipeline": 4,
    "reverse_pipeline": 4,
    "mesh": 4,
    "embedding": 4,
}
"""Thread blocks of a collective or message, by what its group is for: channels of the communicator, too.

Memory of a communicator grows with them, and what spins on the device is taken from computing. 16 is what NCCL
itself gives NVLink SHARP on Hopper (`NVLS_NCHANNELS_SM90` of nccl's src/transport/nvls.cc); messages between stages
and numbers of a whole mesh need few."""

WORLD_CTAS = 8
"""Thread blocks of the communicator of all ranks, over which parameters are reallocated."""


@dataclass(frozen=True)
class Communicator:
    """NCCL communicator of some ranks, in ascending order, with at most `ctas` thread blocks per operation."""

    ranks: RankSet
    ctas: int
    roles: frozenset[Role]
    """What groups of these ranks are for; those of two calls may differ."""


def list_own_rank_sets(placement: Placement, rank: int) -> dict[Role, RankSet]:
    """List the ranks of each group that a rank of a placement needs; it need not be in `embedding`.

    `reverse_pipeline` are the stages from last to first; `embedding` the first and the last one, `mesh` all ranks.
    """
    strategy = placement.strategy
    dp = placement.dp_index(rank)
    tp = placement.tp_index(rank)
    pp = placement.pp_index(rank)
    pipeline = tuple(placement.rank(dp=dp, tp=tp, pp=i) for i in range(strategy.pp))
    return {
        "data": tuple(placement.rank(dp=i, tp=tp, pp=pp) for i in range(strategy.dp)),
        "tensor": tuple(placement.rank(dp=dp, tp=i, pp=pp) for i in range(strategy.tp)),
        "pipeline": pipeline,
        "reverse_pipeline": pipeline[::-1],
        "mesh": placement.ranks,
        "embedding": tuple(sorted({pipeline[0], pipeline[-1]})),
    }


RankSets = Mapping[RankSet, frozenset[Role]]
"""Groups of more than one rank, in an order that all ranks agree on, and what each is for."""


def list_rank_sets(placements: Iterable[Placement]) -> RankSets:
    """List every group of the placements once."""
    found: dict[RankSet, frozenset[Role]] = {}
    for placement in dict.fromkeys(placements):
        for rank in placement.ranks:
            for role, ranks in list_own_rank_sets(placement, rank).items():
                if len(ranks) > 1 and role not in found.get(ranks, ()):
                    found[ranks] = found.get(ranks, frozenset()) | {role}
    return found


def list_communicators(rank_sets: RankSets, world: int) -> tuple[Communicator, ...]:
    """List the communicators for groups, and first that of all ranks, which reallocates. Equal ranks share one.

    Both directions of a pipeline do, too: NCCL delivers in the order of posting, see `engine.pipeline.transport`.
    Groups of all ranks share that of all ranks if it has as many thread blocks.
    """
    everyone = tuple(range(world))
    roles: dict[RankSet, frozenset[Role]] = {}
    for ranks, uses in rank_sets.items():
        ascending = tuple(sorted(ranks))
        roles[ascending] = roles.get(ascending, frozenset()) | uses
    ctas = {ranks: max(CTAS[use] for use in uses) for ranks, uses in roles.items()}
    shared = ctas.get(everyone, WORLD_CTAS) <= WORLD_CTAS
    first = Communicator(everyone, WORLD_CTAS, roles.get(everyone, frozenset()) if shared else frozenset())
    others = (
        Communicator(ranks, ctas[ranks], uses)
        for ranks, uses in roles.items()
        if ranks != everyone or not shared
    )
    return first, *others


def group_splits(communicators: Iterable[Communicator]) -> list[list[Communicator]]:
    """Group communicators that one collective split of the world can make: disjoint ones of equal options."""
    splits: list[tuple[int, set[int], list[Communicator]]] = []
    for communicator in communicators:
        ranks = set(communicator.ranks)
        for ctas, taken, members in splits:
            if ctas == communicator.ctas and taken.isdisjoint(ranks):
                taken |= ranks
                members.append(communicator)
                break
        else:
            splits.append((communicator.ctas, ranks, [communicator]))
    return [members for _, _, members in splits]


def reallocates(placements: Iterable[Placement]) -> bool:
    """Check whether parameters may move between ranks: calls of a plan have several layouts."""
    return len({placement.layout for placement in placements}) > 1


def list_stage_pairs(ranks: RankSet) -> Iterator[tuple[int, int]]:
    """List the pairs of a pipeline's ranks that exchange messages: neighbours, and the first with the last."""
    yield from pairwise(ranks)
    if len(ranks) > 2:
        yield ranks[0], ranks[-1]
