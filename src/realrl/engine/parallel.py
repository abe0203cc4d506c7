"""Process groups of a placement, and the place of this rank in them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from realrl.model.group import Group
from realrl.plan.placement import Placement

RankSet = tuple[int, ...]


@dataclass(frozen=True)
class Parallel:
    """Groups of one rank under a placement.

    `backward` are the ranks of `pipeline` once more, last stage first: a connection of their own for what flows
    against the stages. `ends`: the first and the last stage of its pipeline, where it is one of them;
    `everyone`: the whole mesh.
    """

    data: Group
    tensor: Group
    pipeline: Group
    backward: Group
    everyone: Group
    ends: Group | None


def rank_sets(placement: Placement) -> Iterator[RankSet]:
    """List every group of the placement, in an order that all ranks agree on."""
    for rank in placement.ranks:
        yield from _sets_of(placement, rank).values()


def parallel(placement: Placement, rank: int, groups: Mapping[RankSet, Group]) -> Parallel:
    """Make the groups of a rank of the placement."""
    own = {name: groups.get(ranks) for name, ranks in _sets_of(placement, rank).items()}
    found = {name: group for name, group in own.items() if group is not None}
    assert len(found) >= len(own) - 1, "groups are made for every placement of a plan"
    return Parallel(
        data=found["data"],
        tensor=found["tensor"],
        pipeline=found["pipeline"],
        backward=found["backward"],
        everyone=found["everyone"],
        ends=found.get("ends"),
    )


def _sets_of(placement: Placement, rank: int) -> dict[str, RankSet]:
    s = placement.strategy
    d, t, p = placement.dp_index(rank), placement.tp_index(rank), placement.pp_index(rank)
    pipeline = tuple(placement.rank(dp=d, tp=t, pp=i) for i in range(s.pp))
    return {
        "data": tuple(placement.rank(dp=i, tp=t, pp=p) for i in range(s.dp)),
        "tensor": tuple(placement.rank(dp=d, tp=i, pp=p) for i in range(s.tp)),
        "pipeline": pipeline,
        "backward": pipeline[::-1],
        "everyone": placement.ranks,
        "ends": tuple(sorted({pipeline[0], pipeline[-1]})),
    }


def all_rank_sets(placements: Iterable[Placement]) -> Iterator[RankSet]:
    """List every group of several placements; some may recur."""
    for placement in placements:
        yield from rank_sets(placement)
