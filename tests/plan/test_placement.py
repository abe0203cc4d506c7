import re
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from realrl.config.errors import UserError
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy
from tests.plan.meshes import list_all


@pytest.mark.parametrize("text", ["1x2", "2x8", "16x4", "2x8+1x4", "1x4+2x8+1x4"])
def test_cluster_text_round_trip(text: str) -> None:
    assert str(Cluster.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["2", "x2", "0x1", "1x0", "axb", "1 x 2 x 3", "2x8+", "2x8+4", "1x2+0x3", "h100:1x2+1x1"]
)
def test_a_cluster_that_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="cluster"):
        Cluster.parse(text)


def test_ranks_are_numbered_node_by_node() -> None:
    assert [Cluster(2, 3).node(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    uneven = Cluster.parse("1x3+2x1+1x2")
    assert [uneven.node(rank) for rank in range(uneven.size)] == [0, 0, 0, 1, 2, 3, 3]
    assert [list(uneven.ranks(node)) for node in range(uneven.nodes)] == [[0, 1, 2], [3], [4], [5, 6]]
    assert (uneven.even, uneven.largest_node) == (False, 3)


def test_equal_neighbours_are_one_run_of_nodes() -> None:
    assert Cluster.parse("1x8+1x8") == Cluster(2, 8) == Cluster.of_nodes([8, 8])
    assert str(Cluster.parse("1x8 + 1x8+2x4")) == "2x8+2x4"
    assert Cluster.parse("1x8+2x4") != Cluster.parse("2x4+1x8")


@pytest.mark.parametrize("devices", [[4], [4, 4], [3, 1, 2], [2, 5, 5, 1]])
def test_the_nodes_under_a_mesh_have_its_ranks_of_each(devices: list[int]) -> None:
    cluster = Cluster.of_nodes(devices)
    for mesh in list_all(cluster):
        counts = Counter(cluster.node(rank) for rank in mesh.ranks)
        assert mesh.nodes(cluster) == Cluster.of_nodes(counts[node] for node in sorted(counts))


@pytest.mark.parametrize("text", ["0", "3", "0-7", "8-15"])
def test_mesh_text_round_trip(text: str) -> None:
    assert str(Mesh.parse(text)) == text


@pytest.mark.parametrize("text", ["", "a", "3-1", "0-", "0,1"])
def test_a_mesh_that_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="mesh"):
        Mesh.parse(text)


@pytest.mark.parametrize("cluster", [Cluster(2, 4), Cluster.of_nodes([3, 1, 4])], ids=str)
def test_meshes_of_a_cluster_are_all_runs_of_its_ranks(cluster: Cluster) -> None:
    valid = set(list_all(cluster))
    for first in range(-1, 9):
        for size in range(10):
            mesh = Mesh(first, size)
            if mesh in valid:
                mesh.check(cluster)
            else:
                with pytest.raises(UserError, match=re.escape(f"outside the 8 devices of cluster {cluster}")):
                    mesh.check(cluster)


def test_overlap_is_a_shared_rank() -> None:
    meshes = [Mesh(first, size) for first in range(5) for size in range(1, 5)]
    for a in meshes:
        for b in meshes:
            assert a.overlaps(b) == bool(set(a.ranks) & set(b.ranks))


def test_context_parallel_ranks_are_neighbours_that_share_items_and_parameters() -> None:
    placement = Placement(Mesh(8, 16), Strategy(dp=2, cp=2, tp=2, pp=2))
    assert [placement.item_index(rank) for rank in range(8, 16)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [placement.copy_index(rank) for rank in range(8, 16)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert placement.output_ranks == (16, 20)
    assert placement.strategy.copies == placement.strategy.replicas == 4
    assert placement.strategy.for_generation() == placement.strategy
    assert placement.strategy.for_generation(exact=True) == Strategy(dp=4, tp=2, pp=2)


def test_coordinates_are_counted_pipeline_then_data_then_tensor() -> None:
    placement = Placement(Mesh(8, 8), Strategy(dp=2, tp=2, pp=2))
    ranks = [placement.rank(dp=dp, tp=tp, pp=pp) for pp in (0, 1) for dp in (0, 1) for tp in (0, 1)]
    assert ranks == list(range(8, 16))
    assert [placement.item_index(rank) for rank in range(8, 16)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert placement.output_ranks == (12, 14)


def test_a_strategy_must_fill_its_mesh() -> None:
    with pytest.raises(UserError, match="dp=2 tp=1 pp=1 needs 2 devices, but mesh 0-3 has 4"):
        Placement(Mesh(0, 4), Strategy(dp=2))


def test_layout_text_round_trip() -> None:
    strategy = Strategy(dp=2, cp=3, tp=2, micro_batch_tokens=77, sequence_parallel=True)
    placement = Placement(Mesh(4, 12), strategy)
    assert placement.layout == "d2 c3 t2 p1 @4-15"
    for dtype, again in product((None, "bfloat16", "float32"), (False, True)):
        typed = replace(placement, strategy=replace(placement.strategy, dtype=dtype, recompute=again))
        assert Placement.parse(str(typed)) == typed
    turns = Placement(Mesh(0, 4), Strategy(dp=2, pp=2, vpp=3, micro_batch_tokens=7, zero_bubble=True))
    assert str(turns) == "d2 t1 p2 v3 @0-3 mb=7 zb"
    assert Placement.parse(str(turns)) == turns


def test_unusual_settings_of_a_strategy_are_named() -> None:
    assert Strategy(dp=4, tp=2, micro_batch_tokens=99).settings == ()
    every = Strategy(dp=2, tp=2, sequence_parallel=True, recompute=True, zero=3, dtype="bfloat16")
    assert every.settings == ("sequence parallel", "recompute", "ZeRO-3", "bfloat16")
    assert Strategy(dp=2, zero=2).settings == ("ZeRO-2",)
    assert Strategy(pp=2, zero_bubble=True).settings == ("zero bubble",)


def test_calls_that_generate_have_no_virtual_stages() -> None:
    training = Strategy(dp=2, pp=2, vpp=2, zero_bubble=True)
    assert not training.can_generate()
    assert training.for_generation() == Strategy(dp=2, pp=2)
