"""How communicators are made and connected, on stand-ins for torch's functions."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from realrl.plan.cluster import Cluster
from realrl.plan.communicators import list_communicators, list_rank_sets
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.runtime.processes.groups import RankPlace, make_nccl_groups, make_nccl_options
from tests.nccl.recording import Handle, recording
from tests.nccl.simulator import Action, Collective, check

CPU = torch.device("cpu")


def place(first: int, dp: int, tp: int, pp: int) -> Placement:
    return Placement(Mesh(first, dp * tp * pp), Strategy(dp=dp, tp=tp, pp=pp))


PLANS = [
    [place(0, 2, 2, 2)],
    [place(0, 1, 1, 8), place(0, 8, 1, 1), place(4, 1, 4, 1), place(0, 2, 1, 2)],
    [place(0, 2, 1, 4), place(0, 1, 4, 2), place(2, 2, 1, 1), place(7, 1, 1, 1)],
]


class Options:
    """Stand-in for `ProcessGroupNCCL.Options`."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(max_ctas=None)


def make_as(
    rank: int, plan: list[Placement], *, moves: bool
) -> tuple[dict[Any, Any], list[Action], list[Any]]:
    """Make the groups of one of 8 ranks: groups, what was posted, and the splits."""
    splits: list[Any] = []
    world = Handle(tuple(range(8)))
    with recording() as recorder:

        def split_group(*, split_ranks: list[list[int]], timeout: object, pg_options: Options) -> Any:
            splits.append((split_ranks, pg_options.config.max_ctas))
            # A split is an operation of all ranks of the communicator that it splits.
            recorder.collective(f"split {split_ranks}", world)
            return next((Handle(tuple(ranks)) for ranks in split_ranks if rank in ranks), None)

        with (
            mock.patch.object(dist, "split_group", split_group),
            mock.patch.object(dist, "group", SimpleNamespace(WORLD=world)),
            mock.patch.object(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), create=True),
            mock.patch.object(torch.cuda, "synchronize") as synchronize,
        ):
            at = RankPlace(rank=rank, world=8, node=Cluster(2, 4).ranks(rank // 4), device=CPU)
            groups = make_nccl_groups(at, list_rank_sets(plan), with_node_pairs=moves)
        synchronize.assert_called_once()
    return groups, recorder.actions, splits


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("moves", [False, True])
def test_all_ranks_make_and_connect_the_same_groups_without_deadlock(
    plan: list[Placement], moves: bool
) -> None:
    made = {rank: make_as(rank, plan, moves=moves) for rank in range(8)}
    check({rank: actions for rank, (_, actions, _) in made.items()})
    assert all(splits == made[0][2] for _, _, splits in made.values())
    rank_sets = list_rank_sets(plan)
    for rank, (groups, _, _) in made.items():
        assert set(groups) == {ranks for ranks in rank_sets if rank in ranks}
        for ranks, group in groups.items():
            assert group.ranks == ranks and group.index == ranks.index(rank)
            assert group.handle.ranks == tuple(sorted(ranks))


def test_every_communicator_is_connected_before_it_is_used() -> None:
    plan = PLANS[1]
    for rank in range(8):
        _, actions, _ = make_as(rank, plan, moves=False)
        reduced = {
            a.operation.members for a in actions if isinstance(getattr(a, "operation", None), Collective)
        }  # type: ignore[union-attr]
        own = {one.ranks for one in list_communicators(list_rank_sets(plan), 8) if rank in one.ranks}
        assert own <= reduced


def test_options_limit_thread_blocks() -> None:
    with mock.patch.object(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), create=True):
        assert make_nccl_options(4).config.max_ctas == 4
