"""Groups and communicators of plans, counted without any process."""

import random

import pytest

from realrl.plan.cluster import Cluster
from realrl.plan.communicators import (
    WORLD_CTAS,
    Communicator,
    group_splits,
    list_communicators,
    list_own_rank_sets,
    list_rank_sets,
    list_stage_pairs,
)
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.memory.communicators import (
    collective_bytes,
    count_layout_bytes,
    message_bytes,
    world_bytes,
)
from tests.nccl.programs import random_placement


def place(first: int, dp: int, tp: int, pp: int) -> Placement:
    return Placement(Mesh(first, dp * tp * pp), Strategy(dp=dp, tp=tp, pp=pp))


LARGE = [
    place(0, 32, 4, 1),
    place(0, 64, 2, 1),
    place(0, 32, 2, 2),
    place(0, 128, 1, 1),
    place(0, 4, 4, 7),
    place(112, 16, 1, 1),
]
"""The plan of docs/planning.md for PPO of 70B and 8B models on 128 GPUs."""
NODES = Cluster(16, 8)


def exact_bytes(rank: int, communicators: tuple[Communicator, ...], cluster: Cluster) -> int:
    """Bytes of a rank for each of its communicators."""
    found = world_bytes(cluster)
    for one in communicators[1:]:
        if rank in one.ranks:
            found += collective_bytes(one.ranks, cluster, one.ctas)
            found += message_bytes(one.ranks, cluster, one.ctas, 2) if "pipeline" in one.roles else 0
    return found


def test_a_plan_for_128_gpus_needs_a_dozen_splits_and_no_connections_between_hosts() -> None:
    rank_sets = list_rank_sets(LARGE)
    world, *others = list_communicators(rank_sets, 128)
    assert world == Communicator(tuple(range(128)), WORLD_CTAS, frozenset())
    assert (len(rank_sets), len(others), len(group_splits(others))) == (313, 233, 11)
    own = [sum(rank in one.ranks for one in (world, *others)) for rank in range(128)]
    assert (min(own), max(own)) == (9, 12)
    # With gloo for each of them, as on CPUs, a rank would have so many connections more than for groups of all.
    assert max(sum(len(ranks) - 1 for ranks in rank_sets if rank in ranks) for rank in range(128)) == 385
    exact = exact_bytes(0, (world, *others), NODES)
    assert 4.5 < exact / (1 << 30) < 5
    assert exact < world_bytes(NODES) + count_layout_bytes(LARGE[:-1], NODES) < 1.3 * exact


@pytest.mark.parametrize("seed", range(30))
def test_splits_have_every_communicator_once_and_disjoint_ones_together(seed: int) -> None:
    rng = random.Random(seed)
    cluster = Cluster.parse(rng.choice(["1x8", "2x4", "4x8", "1x8+2x4", "1x5+1x3+1x1"]))
    placements = [random_placement(cluster, rng) for _ in range(rng.randrange(1, 6))]
    rank_sets = list_rank_sets(placements)
    communicators = list_communicators(rank_sets, cluster.size)
    splits = group_splits(communicators[1:])
    assert sorted(map(str, communicators[1:])) == sorted(str(one) for split in splits for one in split)
    for split in splits:
        ranks = [rank for one in split for rank in one.ranks]
        assert len(ranks) == len(set(ranks)) and len({one.ctas for one in split}) == 1
    assert {tuple(sorted(ranks)) for ranks in rank_sets} <= {one.ranks for one in communicators}
    for rank in range(cluster.size):
        # The planner counts each layout by itself, though communicators of two may be shared.
        mine = [placement for placement in placements if rank in placement.ranks]
        bound = world_bytes(cluster) + count_layout_bytes(mine, cluster)
        assert exact_bytes(rank, communicators, cluster) <= bound


def test_all_ranks_have_a_communicator_of_their_own_only_where_it_must_be_fast() -> None:
    pipeline = list_communicators(list_rank_sets([place(0, 1, 1, 4)]), 4)
    assert len(pipeline) == 2 and pipeline[0].roles == {"pipeline", "reverse_pipeline", "mesh"}
    tensor = list_communicators(list_rank_sets([place(0, 1, 4, 1)]), 4)
    assert [one.ctas for one in tensor] == [WORLD_CTAS, 16] and tensor[1].roles == {"tensor", "mesh"}


def test_pairs_are_those_that_exchange_messages() -> None:
    assert list(list_stage_pairs((4, 6, 8))) == [(4, 6), (6, 8), (4, 8)]
    assert list(list_stage_pairs((4, 6))) == [(4, 6)]
    assert list_rank_sets([place(0, 1, 1, 1)]) == {}


def test_one_rank_and_one_device_need_no_communicator() -> None:
    assert world_bytes(Cluster(1, 1)) == count_layout_bytes([place(0, 1, 1, 1)], NODES) == 0


def test_communicators_grow_with_members_thread_blocks_and_nodes() -> None:
    pair, node, two_nodes = (0, 1), tuple(range(8)), tuple(range(16))
    mib = 1 << 20
    assert collective_bytes(pair, NODES, 16) == 16 * 12 * mib  # the 10 + 2 MiB of a connection
    assert collective_bytes((0, 8), NODES, 16) == 16 * 20 * mib
    sizes = [collective_bytes(ranks, NODES, 16) for ranks in (pair, node, two_nodes)]
    assert sizes == sorted(sizes)
    # Between nodes fewer channels, each with buffers that all messages share.
    assert message_bytes(node, NODES, 8, 7) == 8 * 7 * 12 * mib
    assert message_bytes(two_nodes, NODES, 8, 7) == 2 * 7 * 12 * mib + 8 * 4 * mib


@pytest.mark.parametrize("seed", range(30))
def test_groups_are_those_that_any_of_their_ranks_needs(seed: int) -> None:
    rng = random.Random(seed)
    placements = [random_placement(Cluster(2, 8), rng) for _ in range(3)]
    needed: dict[tuple[int, ...], set[str]] = {}
    for placement in placements:
        for rank in placement.ranks:
            for role, ranks in list_own_rank_sets(placement, rank).items():
                if len(ranks) > 1:
                    needed.setdefault(ranks, set()).add(role)
    assert list_rank_sets(placements) == needed
