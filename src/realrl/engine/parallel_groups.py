"""Process groups of a placement, and the place of this rank in them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from realrl.model.group import Group
from realrl.plan.placement import Placement

RankSet = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """Groups of one rank under a placement.

    `reverse_pipeline` are the ranks of `pipeline` once more, last stage first: a connection of their own for what
    flows against the stages. `embedding`: the first and the last stage of its pipeline, where it is one of them
    (Megatron's embedding group, for tied embeddings); `mesh`: all ranks of the placement.
    """

    data: Group
    tensor: Group
    pipeline: Group
    reverse_pipeline: Group
    mesh: Group
    embedding: Group | None


def select_groups(placement: Placement, rank: int, groups: Mapping[RankSet, Group]) -> ParallelGroups:
    """Select the groups of a rank of the placement among `groups`, made for `list_rank_sets`."""
    own = {name: groups.get(ranks) for name, ranks in _list_own_rank_sets(placement, rank).items()}
    present = {name: group for name, group in own.items() if group is not None}
    # Only the embedding group lacks some ranks of the placement: the stages between the first and the last.
    assert len(present) >= len(own) - 1, "groups are made for every placement of a plan"
    return ParallelGroups(
        data=present["data"],
        tensor=present["tensor"],
        pipeline=present["pipeline"],
        reverse_pipeline=present["reverse_pipeline"],
        mesh=present["mesh"],
        embedding=present.get("embedding"),
    )


def list_rank_sets(placements: Iterable[Placement]) -> Iterator[RankSet]:
    """List every group of the placements, in an order that all ranks agree on; some may recur."""
    for placement in placements:
        for rank in placement.ranks:
            yield from _list_own_rank_sets(placement, rank).values()


def _list_own_rank_sets(placement: Placement, rank: int) -> dict[str, RankSet]:
    """List the ranks of each group that a rank needs; it need not be in `embedding`."""
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
