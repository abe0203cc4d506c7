"""Host memory that offloaded state takes, on nodes and under meshes of any size."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from realrl.plan.cluster import Cluster
from realrl.planner.search.many_plans import OffloadedState
from tests.plan.meshes import list_all

PLANS = 200


@pytest.mark.parametrize("seed", range(20))
def test_the_fullest_host_is_found_wherever_meshes_begin(seed: int) -> None:
    rng = random.Random(seed)
    cluster = Cluster.of_nodes(rng.choice([1, 2, 4, 4]) for _ in range(rng.randrange(1, 7)))
    limits = tuple(rng.choice([50.0, 100.0]) for _ in range(cluster.nodes))
    homes = range(rng.randrange(1, 4))
    meshes = [[rng.choice(list_all(cluster)) for _ in range(PLANS)] for _ in homes]
    host = np.array([[rng.choice([0.0, 10.0, 70.0]) for _ in range(PLANS)] for _ in homes])
    columns: Any = SimpleNamespace(
        first=np.array([[mesh.first for mesh in row] for row in meshes]),
        end=np.array([[mesh.first + mesh.size for mesh in row] for row in meshes]),
        host_bytes=host,
    )
    problem: Any = SimpleNamespace(cluster=cluster, host_memory_bytes=limits)
    memory = OffloadedState(problem, homes)
    points = memory.points(columns)
    fill = memory.fill(columns, points)
    for plan in range(PLANS):
        used = [0.0] * cluster.nodes
        for home in homes:
            for rank in meshes[home][plan].ranks:
                used[cluster.node(rank)] += host[home, plan] / limits[cluster.node(rank)]
        assert fill[:, plan].max() == pytest.approx(max(used))
        for point, part in zip(points[:, plan].tolist(), fill[:, plan], strict=True):
            assert part == pytest.approx(used[cluster.node(point)])
            assert any(point in row[plan].ranks for row in meshes)
            assert memory.limit(point) == limits[cluster.node(point)]
