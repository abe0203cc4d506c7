"""Bytes and messages that reallocations, exchanges and copies are charged for, at one of them per second."""

from dataclasses import replace

import numpy as np
import pytest

from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.families.adapters import LowRank
from realrl.layout.sets import TUNED, TrainablePart
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.moves.transfers import Layouts
from realrl.planner.workload.workload import Workload
from tests.planner.executed_routes import time_routes
from tests.planner.unit_device import SHAPE, make_cluster, make_efficiency, store

LAYER, TABLE, END = 256 * 64 + 64 * 128 + 320 * 64 + 64 * 160 + 2 * 64, 960 * 64, 960 * 64 + 64
WHOLE = 4 * LAYER + TABLE + END
FEW = 1e-6
"""Relative error within which latencies of messages vanish beside bytes."""


def at(first: int, dp: int, tp: int = 1, pp: int = 1) -> Placement:
    return Placement(Mesh(first, dp * tp * pp), Strategy(dp=dp, tp=tp, pp=pp))


def move(
    source: Placement, target: Placement, cluster: ClusterSpec, model=None, parameter_set: str = "base"
) -> float:
    costs = CostModel(cluster, efficiency=make_efficiency())
    return costs.reallocation(model or store(), source, target, parameter_set)


@pytest.mark.parametrize(
    ("source", "target", "elements"),
    [
        (at(0, 1), at(1, 1), WHOLE),
        (at(0, 1), at(0, 1, 2), WHOLE / 2),
        (at(0, 1), at(0, 4), WHOLE),  # each of three others needs all, and passes it on
        (at(0, 2), at(0, 1, 4), WHOLE / 4),
        (at(0, 1, 2), at(0, 2), WHOLE / 2),
        (at(0, 1, 2), at(0, 1, 4), 3 / 8 * WHOLE),  # three quarters that two devices send
        (at(0, 1, 1, 2), at(0, 2), 2 * LAYER + END),
        (at(0, 2), at(0, 1, 1, 2), 0),
        (at(0, 1, 1, 2), at(0, 1, 2), LAYER + END / 2),
        (at(0, 1, 1, 2), at(0, 1, 1, 4), LAYER + END),  # on a device that held nothing of it
        (at(0, 4), at(4, 4), WHOLE),
        (at(0, 4), at(4, 1, 4), WHOLE / 4),
        (at(0, 1), at(4, 1, 4), WHOLE),  # all of it leaves one device
    ],
)
def test_the_busiest_device_receives_what_it_lacks_or_sends_what_others_do(
    source: Placement, target: Placement, elements: float
) -> None:
    wire = make_cluster(1, 8, link_bytes_per_s=1.0)
    assert move(source, target, wire) == pytest.approx(2 * elements, rel=FEW)


@pytest.mark.parametrize(
    ("source", "target", "elements"),
    [
        (at(0, 4), at(4, 4), WHOLE),
        (at(0, 1, 4), at(4, 1, 4), WHOLE),
        (at(0, 4), at(0, 8), WHOLE),
        (at(0, 4), at(4, 8), WHOLE),  # to two nodes, of which one passes it on
        (at(4, 4), at(8, 1, 8), WHOLE),  # one node sends to two, each of which lacks half
        (at(4, 8), at(12, 4), WHOLE),
        (at(0, 1, 4), at(0, 1, 8), WHOLE / 2),
        (at(0, 1, 4, 2), at(8, 1, 4), 2 * LAYER + END + 2 * LAYER + TABLE),
        (at(0, 1, 4, 2), at(0, 2, 4), 2 * LAYER + END),
        (at(0, 4), at(0, 1, 4), 0),
    ],
)
def test_the_busiest_node_receives_what_none_of_its_devices_has(
    source: Placement, target: Placement, elements: float
) -> None:
    nodes = make_cluster(4, 4, node_bytes_per_s=1.0)
    assert move(source, target, nodes) == pytest.approx(2 * elements, rel=FEW)


def test_values_travel_in_the_narrower_type() -> None:
    wire = make_cluster(1, 8, link_bytes_per_s=1.0)
    narrow = replace(at(1, 1), strategy=Strategy(dtype="bfloat16"))
    for target, width in ((at(1, 1), 4), (narrow, 2)):
        found = move(at(0, 1), target, wire, store(dtype="float32"))
        assert found == pytest.approx(width * WHOLE, rel=FEW)


def test_parameter_sets_move_by_themselves() -> None:
    wire = make_cluster(1, 8, link_bytes_per_s=1.0)
    part = store(part=TrainablePart(last_layers=1))
    assert move(at(0, 1), at(1, 1), wire, part) == pytest.approx(2 * (3 * LAYER + TABLE), rel=FEW)
    assert move(at(0, 1), at(1, 1), wire, part, TUNED) == pytest.approx(2 * (LAYER + END), rel=FEW)
    # Of two stages, the last one has the only layer of the set.
    assert move(at(0, 1, 1, 2), at(0, 2), wire, part, TUNED) == pytest.approx(2 * (LAYER + END), rel=FEW)
    lora = store(SHAPE.model_copy(update={"lora": LowRank(rank=4)}), part=TrainablePart(adapters=True))
    adapted = (3 * 64 * 4 + 4 * 256) + (128 * 4 + 4 * 64) + (2 * 64 * 4 + 4 * 320) + (160 * 4 + 4 * 64)
    assert move(at(0, 1), at(1, 1), wire, lora, TUNED) == pytest.approx(2 * 4 * adapted, rel=FEW)
    small = store(SHAPE.model_copy(update={"quantised": "int8"}), part=TrainablePart(quantised=True))
    costs = CostModel(wire, efficiency=make_efficiency())
    matrices, scales = LAYER - 2 * 64, 4 * (256 + 64 + 320 + 64)
    found = costs.reallocation(small, at(0, 1), at(1, 1), "quantised")
    assert found == pytest.approx(4 * (matrices + scales), rel=FEW)


def test_a_tied_table_lies_on_both_ends() -> None:
    wire = make_cluster(1, 8, link_bytes_per_s=1.0)
    tied = store(SHAPE.model_copy(update={"tied_embeddings": True}))
    assert move(at(0, 1, 1, 2), at(0, 2), wire, tied) == pytest.approx(2 * (2 * LAYER + 64), rel=FEW)
    assert move(at(0, 1), at(0, 1, 1, 2), wire, tied) == pytest.approx(2 * (2 * LAYER + 64 + TABLE), rel=FEW)


@pytest.mark.parametrize(
    ("source", "target", "messages"),
    [
        (at(0, 1), at(1, 1), 3),
        (at(0, 1, 1, 4), at(4, 1), 6),
        (at(0, 1, 1, 4), at(4, 1, 1, 4), 2),
        (at(0, 1, 4), at(4, 1), 3 * 4),
        (at(0, 1), at(4, 1, 4), 3),
        (at(0, 1, 3), at(4, 1, 2), 3 * 3),
    ],
)
def test_messages_of_a_reallocation_have_a_latency(
    source: Placement, target: Placement, messages: int
) -> None:
    """There and back: 30 µs each, for each stage and TP rank that a rank receives from."""
    fast = make_cluster(1, 8, link_bytes_per_s=1e30)
    assert move(source, target, fast) == pytest.approx(2 * messages * 30e-6)


def test_a_host_that_posts_messages_bounds_the_links() -> None:
    """Messages of 64 MiB on a GPU, and of 8 MiB on a CPU, each of which takes the host a second to post."""
    for cpu, size in ((False, 64 << 20), (True, 8 << 20)):
        spec = make_cluster(1, 8, cpu=cpu)
        costs = CostModel(spec, efficiency=make_efficiency(collective_host_s=1.0))
        assert costs.reallocation(store(), at(0, 1), at(1, 1)) == pytest.approx(2 * WHOLE / size + 6 * 30e-6)


def test_achieved_fractions_of_links_and_the_slower_of_two_kinds_of_nodes_count() -> None:
    slow, fast = (
        make_cluster(1, 4, link_bytes_per_s=x, node_bytes_per_s=2 * x).groups[0] for x in (1.0, 4.0)
    )
    costs = CostModel(ClusterSpec("two", (slow, fast)), efficiency=make_efficiency(link=0.5))
    for source, target, seconds in (
        (at(0, 1), at(1, 1), 2.0),
        (at(4, 1), at(5, 1), 0.5),
        (at(0, 1), at(4, 1), 2.0),
        (at(4, 4), at(0, 4), 2.0),
    ):
        assert costs.reallocation(store(), source, target) == pytest.approx(seconds * 2 * WHOLE, rel=FEW)


def test_sent_bytes_are_those_that_ranks_and_nodes_lack() -> None:
    costs = CostModel(make_cluster(4, 4), efficiency=make_efficiency())
    assert costs.moved(store(), at(0, 1), at(0, 4)) == (2 * 3 * WHOLE, 0)
    assert costs.moved(store(), at(0, 4), at(4, 8)) == (2 * 8 * WHOLE, 2 * 2 * WHOLE)
    assert costs.moved(store(), at(0, 1, 4), at(4, 1, 4)) == (2 * WHOLE, 2 * WHOLE)
    assert costs.moved(store(), at(0, 4), at(0, 1, 4)) == (0, 0)


def test_routes_that_are_executed_take_what_is_estimated() -> None:
    nodes = make_cluster(2, 4, node_bytes_per_s=1.0, link_bytes_per_s=4.0)
    costs = CostModel(nodes, efficiency=make_efficiency())
    for source, target in ((at(0, 1, 4), at(4, 1, 4)), (at(0, 1), at(1, 1)), (at(0, 4), at(4, 1, 4))):
        exact = time_routes(costs, store(), source, target)
        assert exact == pytest.approx(costs.reallocation(store(), source, target), rel=0.01)
    wide = time_routes(costs, store(dtype="float32"), at(0, 1), at(1, 1))
    assert wide == pytest.approx(WHOLE, rel=1e-3)  # four bytes, four per second


GRAPH = DataflowGraph(
    [
        Call("a.generate", "a", Kind.GENERATE, ("x",), ("s", "p", "n"), work=("x",)),
        Call("a.train", "a", Kind.TRAIN, ("s", "p", "n", "x"), work=("s",)),
    ],
    (Key("x", "int64"), Key("s", "int32"), Key("p", "float32", "s", 3), Key("n", "int16", "one")),
)
STEP = Workload(16, (10, 30), (100,), 100)
ROW = (4 + 3 * 4) * (20 + 100) + 2
"""Bytes of a row: prompt and answer in two keys, and one number."""


def exchange(source: Placement, target: Placement, cluster: ClusterSpec, **efficiency: float) -> float:
    model = CostModel(cluster, efficiency=make_efficiency(**efficiency)).exchange(GRAPH, STEP)
    pair = Layouts.of([source]), Layouts.of([target])
    return float(model.seconds("a.generate", "a.train", *pair)[0])


@pytest.mark.parametrize(
    ("source", "target", "rows"),
    [
        (at(0, 4), at(0, 4), 4),  # every rank receives a quarter of 16 rows
        (at(0, 4), at(0, 1, 2, 2), 16),  # and here all of them
        (at(0, 4), at(0, 2, 2), 8),
        (at(0, 1, 4), at(0, 4), 16),  # one rank sends everything
        (at(0, 2, 1, 2), at(0, 1, 4), 32),  # two ranks send four copies
    ],
)
def test_rows_go_to_every_rank_that_computes_with_them(
    source: Placement, target: Placement, rows: int
) -> None:
    slow = exchange(source, target, make_cluster(1, 8), host_bytes_per_s=1.0)
    assert slow == pytest.approx(rows * ROW, rel=FEW)


def test_rows_take_the_slowest_of_hosts_and_links() -> None:
    within, across = (at(0, 4), at(0, 4)), (at(0, 4), at(4, 4))
    for pair, rates, seconds in (
        (within, {"link_bytes_per_s": 2.0, "node_bytes_per_s": 0.5}, 0.5),
        (across, {"link_bytes_per_s": 2.0, "node_bytes_per_s": 0.5}, 2.0),
        (across, {"link_bytes_per_s": 2.0, "node_bytes_per_s": 8.0}, 0.25),
    ):
        found = exchange(*pair, make_cluster(2, 4, **rates), host_bytes_per_s=4.0)
        assert found == pytest.approx(4 * ROW * seconds, rel=FEW)
    # 30 µs for every sender and every receiver.
    assert exchange(at(0, 4), at(0, 1, 2), make_cluster(), host_bytes_per_s=1e30) == pytest.approx(
        (4 + 2) * 30e-6
    )


def test_bounds_of_exchanges_know_senders_and_receivers_only_in_part() -> None:
    """From 2 to 8 senders to at least 3 ranks, at most 4 of which receive different rows, at least 2 the same"""
    model = CostModel(make_cluster(2, 4), efficiency=make_efficiency(host_bytes_per_s=2.0)).exchange(
        GRAPH, STEP
    )
    few, most, size, copies, rows = (np.array([n]) for n in (2, 8, 3, 2, 4))

    def bound(**of: np.ndarray) -> float:
        known = {"senders": (few, most), "size": size, "copies": copies, "rows": rows} | of
        return float(model.at_least("a.generate", "a.train", **known)[0])  # type: ignore[arg-type]

    latency = (2 + 3) * 30e-6
    assert bound() == pytest.approx(16 * ROW / 4 / 2 + latency)
    # Of eight senders each has an eighth, six times.
    assert bound(copies=np.array([6])) == pytest.approx(16 * ROW * 6 / 8 / 2 + latency)
    assert bound(rows=np.array([1])) == pytest.approx(16 * ROW / 2 + latency)


def test_copies_from_and_to_host_memory_go_through_its_link() -> None:
    spec = make_cluster(host_bytes_per_s=4.0)
    assert CostModel(spec, efficiency=make_efficiency(host_link=0.5)).offload(100.0) == 50.0
