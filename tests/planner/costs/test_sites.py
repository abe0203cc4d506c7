"""Costs of meshes wherever they begin, on nodes of one size and of several."""

import random
from collections import Counter

import numpy as np
import pytest

from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cluster.efficiency import Efficiency
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.cost.network import Network, Ring
from realrl.planner.workload.strategies import Strategies
from tests.plan.meshes import list_all
from tests.planner.problems import BARE_NODES, KINDS, SMALL, STEP, call, drop_tables, stored

UNEVEN = drop_tables(ClusterSpec.parse("a100-80g:1x4+1x2+1x1+1x8"))


def sampled_placement(rng: random.Random, cluster: Cluster) -> Placement:
    mesh = rng.choice(list_all(cluster))
    tp = rng.choice([n for n in range(1, mesh.size + 1) if mesh.size % n == 0])
    pp = rng.choice([n for n in range(1, mesh.size // tp + 1) if mesh.size // tp % n == 0])
    return Placement(mesh, Strategy(dp=mesh.size // tp // pp, tp=tp, pp=pp))


def expected_ring(spec: ClusterSpec, groups: list[list[int]]) -> tuple[float, float, int]:
    """Bandwidth, latency and most nodes of groups that communicate at the same time, by counting."""
    device, network = spec.groups[0].device, spec.groups[0].node_bytes_per_s
    nodes = [{spec.cluster.node(rank) for rank in group} for group in groups]
    through = Counter(node for of in nodes if len(of) > 1 for node in of)
    most = max(map(len, nodes))
    if most == 1:
        return device.link_bytes_per_s, device.link_latency_s, 1
    shared = network / max(through.values())
    crossing = most / len(groups[0])
    hop = crossing * device.node_latency_s + (1 - crossing) * device.link_latency_s
    return min(device.link_bytes_per_s, shared), hop, most


@pytest.mark.parametrize("spec", [UNEVEN, BARE_NODES], ids=["uneven", "even"])
def test_groups_share_the_network_of_the_nodes_that_their_ranks_are_on(spec: ClusterSpec) -> None:
    rng, efficiency = random.Random(0), Efficiency()
    for _ in range(200):
        placement = sampled_placement(rng, spec.cluster)
        s = placement.strategy
        network = Network((spec.site(placement.mesh),), Strategies.of([s]), efficiency)
        rank, dps, tps, pps = placement.rank, range(s.dp), range(s.tp), range(s.pp)
        pairs: list[tuple[Ring, list[list[int]]]] = [
            (network.group("tp"), [[rank(dp=d, tp=t, pp=p) for t in tps] for d in dps for p in pps]),
            (network.group("dp"), [[rank(dp=d, tp=t, pp=p) for d in dps] for t in tps for p in pps]),
            (network.group("mesh"), [list(placement.ranks)]),
        ]
        for ring, groups in pairs:
            width, hop, nodes = expected_ring(spec, groups)
            assert (ring.size[0], ring.nodes[0]) == (len(groups[0]), nodes)
            assert ring.hop_s[0] == pytest.approx(hop)
            assert ring.bytes_per_s[0] == pytest.approx(width * efficiency.link)
        if s.pp > 1:
            leaving: Counter[int] = Counter()
            for sender in range(placement.mesh.first, placement.mesh.first + s.dp * s.tp * (s.pp - 1)):
                nodes_of_pair = spec.cluster.node(sender), spec.cluster.node(sender + s.dp * s.tp)
                leaving[nodes_of_pair[0]] += nodes_of_pair[0] != nodes_of_pair[1]
            share = spec.groups[0].node_bytes_per_s / max(1, *leaving.values())
            device = spec.groups[0].device
            crosses = any(leaving.values())
            width = min(share, device.link_bytes_per_s) if crosses else device.link_bytes_per_s
            latency = device.node_latency_s if crosses else device.link_latency_s
            seconds = latency + 1e9 / (width * efficiency.link)
            assert network.hop(np.array([1e9]))[0] == pytest.approx(seconds)


@pytest.mark.parametrize("name", KINDS)
def test_a_call_takes_as_long_wherever_it_lies_inside_a_node(name: str) -> None:
    cost = CostModel(UNEVEN)
    of, model = call(name), stored(SMALL)
    for strategy in (Strategy(dp=3), Strategy(tp=3), Strategy(pp=3)):
        firsts = [0, 1, *range(7, 13)]  # nodes of 4 and of 8
        found = [cost.call(of, model, Placement(Mesh(first, 3), strategy), STEP) for first in firsts]
        assert all(other == found[0] for other in found)


@pytest.mark.parametrize("name", KINDS)
def test_a_mesh_of_two_halves_of_nodes_pays_for_the_network(name: str) -> None:
    cost = CostModel(BARE_NODES)
    of, model = call(name), stored(SMALL)

    def seconds(first: int, **degrees: int) -> float:
        return cost.call(of, model, Placement(Mesh(first, 8), Strategy(**degrees)), STEP).seconds

    assert seconds(4, tp=8) > 1.01 * seconds(0, tp=8)
    assert seconds(4, dp=2, tp=4) == pytest.approx(seconds(12, dp=2, tp=4)) and seconds(
        4, dp=2, tp=4
    ) >= seconds(0, dp=2, tp=4)
    # Tensor-parallel groups that begin at the same place of a node communicate as those of one node.
    terms = [cost.call(of, model, Placement(Mesh(n, 8), Strategy(dp=2, tp=4)), STEP).terms for n in (0, 4, 6)]
    assert terms[0]["tensor"] == terms[1]["tensor"] < terms[2]["tensor"]
