"""Memory of communicators: no rank needs more than is counted, however stages lie on nodes."""

from collections import defaultdict

import pytest

from realrl.plan.cluster import Cluster
from realrl.plan.communicators import CTAS, RankSet, Role, list_own_rank_sets
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.memory.communicators import collective_bytes, count_layout_bytes, message_bytes


def bytes_of_rank(placement: Placement, rank: int, cluster: Cluster) -> int:
    """Bytes of the groups of one rank; roles with the same ranks share a group."""
    groups: dict[RankSet, set[Role]] = defaultdict(set)
    for role, ranks in list_own_rank_sets(placement, rank).items():
        if len(ranks) > 1:
            groups[tuple(sorted(ranks))].add(role)
    total = 0
    for ranks, roles in groups.items():
        ctas = max(CTAS[role] for role in roles)
        total += collective_bytes(ranks, cluster, ctas)
        total += message_bytes(ranks, cluster, ctas, 2) if "pipeline" in roles else 0
    return total


@pytest.mark.parametrize(
    ("cluster", "dp", "tp", "pp"),
    [
        ("1x8", 2, 2, 2),
        ("2x8", 4, 2, 2),
        ("2x8", 2, 8, 1),
        ("2x3", 2, 1, 3),  # stages of two straddle nodes of three
        ("2x6", 2, 2, 3),
        ("3x8", 3, 2, 4),
        ("3x8", 6, 1, 4),
        ("6x4", 3, 1, 8),
    ],
)
def test_no_rank_needs_more_than_is_counted(cluster: str, dp: int, tp: int, pp: int) -> None:
    nodes = Cluster.parse(cluster)
    placement = Placement(Mesh(0, nodes.size), Strategy(dp=dp, tp=tp, pp=pp))
    needed = [bytes_of_rank(placement, rank, nodes) for rank in placement.ranks]
    assert max(needed) <= count_layout_bytes([placement], nodes)
