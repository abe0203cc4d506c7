from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings

from realrl.families.shape import ModelShape
from realrl.layout.layout import Layout, build_layout
from realrl.layout.region import Region
from realrl.layout.routing.routes import Reallocation, reallocate
from realrl.plan.cluster import Cluster, Links
from realrl.plan.placement import Mesh, Placement, Strategy
from tests.layout.strategies import moves

Move = tuple[Layout, Layout, Cluster]
Memory = dict[int, dict[str, np.ndarray]]
"""Rank -> tensor -> global array; NaN where the rank holds nothing."""

SHAPE = ModelShape(
    vocab_size=50, hidden_size=16, intermediate_size=30, layers=4, heads=4, kv_heads=2, head_dim=4
)


def box(region: Region) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(region.offset, region.end, strict=True))


def fill(made: Layout, cluster: Cluster) -> Memory:
    """Fill what every rank holds; each element of the model has its own number."""
    first, whole = 0, {}
    for spec in made.specs:
        whole[spec.name] = np.arange(first, first + spec.numel, dtype=float).reshape(spec.shape)
        first += spec.numel
    memory: Memory = {
        rank: {spec.name: np.full(spec.shape, np.nan) for spec in made.specs} for rank in range(cluster.size)
    }
    for rank in made.placement.ranks:
        for local in made.tensors(rank):
            part = box(local.region)
            memory[rank][local.region.tensor][part] = whole[local.region.tensor][part]
    return memory


def execute(plan: Reallocation) -> Memory:
    """Run a reallocation stage by stage; a rank may send only what it held before the stage."""
    held = fill(plan.source, plan.cluster)
    result: Memory = {r: {n: np.full_like(a, np.nan) for n, a in t.items()} for r, t in held.items()}
    for copy in plan.copies:
        part = box(copy.region)
        assert np.isnan(result[copy.rank][copy.region.tensor][part]).all(), "copied twice"
        result[copy.rank][copy.region.tensor][part] = held[copy.rank][copy.region.tensor][part]
    for stage in range(1 + max((t.stage for t in plan.transfers), default=0)):
        arriving = []
        for transfer in (t for t in plan.transfers if t.stage == stage):
            part, name = box(transfer.region), transfer.region.tensor
            values = held[transfer.sender][name][part].copy()
            assert not np.isnan(values).any(), "sent what the sender does not hold"
            arriving.append((transfer.receiver, name, part, values))
        for receiver, name, part, values in arriving:
            assert np.isnan(held[receiver][name][part]).all(), "sent what the receiver holds already"
            held[receiver][name][part] = result[receiver][name][part] = values
    return result


def check(plan: Reallocation) -> None:
    """Assert that every rank ends up with its part of the target, and nothing else."""
    result, wanted = execute(plan), fill(plan.target, plan.cluster)
    for rank in range(plan.cluster.size):
        for spec in plan.target.specs:
            np.testing.assert_array_equal(result[rank][spec.name], wanted[rank][spec.name])


@settings(max_examples=300, deadline=None)
@given(moves())
def test_reallocation_gives_every_rank_exactly_its_part(move: Move) -> None:
    check(reallocate(*move))


@settings(max_examples=150, deadline=None)
@given(moves())
def test_each_element_enters_a_node_at_most_once(move: Move) -> None:
    source, target, cluster = move
    entered = {
        (node, spec.name): np.zeros(spec.shape, dtype=int)
        for node in range(cluster.nodes)
        for spec in source.specs
    }
    for transfer in reallocate(source, target, cluster).transfers:
        node = cluster.node(transfer.receiver)
        if cluster.node(transfer.sender) != node:
            entered[node, transfer.region.tensor][box(transfer.region)] += 1
    assert all((count <= 1).all() for count in entered.values())


@settings(max_examples=100, deadline=None)
@given(moves())
def test_counted_bytes_equal_those_of_transfers_and_copies(move: Move) -> None:
    plan = reallocate(*move)
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    copied: Counter[int] = Counter()
    between = 0
    for transfer in plan.transfers:
        size = 2 * transfer.region.numel
        sent[transfer.sender] += size
        received[transfer.receiver] += size
        between += size * (plan.cluster.node(transfer.sender) != plan.cluster.node(transfer.receiver))
    for copy in plan.copies:
        copied[copy.rank] += 2 * copy.region.numel
    by_rank, by_link = plan.bytes_by_rank(2), plan.bytes_by_link(2)
    assert {r: (b.sent, b.received, b.copied) for r, b in by_rank.items()} == {
        r: (sent[r], received[r], copied[r]) for r in by_rank
    }
    assert by_link.device == sum(copied.values()) and by_link.network == between
    assert by_link.node + by_link.network == sum(sent.values())


@settings(max_examples=50, deadline=None)
@given(moves())
def test_reallocation_between_equal_layouts_sends_nothing(move: Move) -> None:
    source, _, cluster = move
    plan = reallocate(source, source, cluster)
    assert plan.transfers == () and plan.seconds(Links(), 2) == 0
    held = [local.region for r in source.placement.ranks for local in source.tensors(r) if local.region.numel]
    assert [copy.region for copy in plan.copies] == held


def place(degrees: tuple[int, int, int], first: int = 0) -> Placement:
    dp, tp, pp = degrees
    return Placement(Mesh(first, dp * tp * pp), Strategy(dp=dp, tp=tp, pp=pp))


def test_transfers_are_listed_by_stage_sender_receiver_and_storage_order() -> None:
    cluster = Cluster(3, 4)
    plan = reallocate(
        build_layout(SHAPE, "lm", place((1, 4, 1))), build_layout(SHAPE, "lm", place((8, 1, 1), 4)), cluster
    )
    order = {spec.name: i for i, spec in enumerate(plan.source.specs)}
    keys = [(t.stage, t.sender, t.receiver, order[t.region.tensor], t.region.offset) for t in plan.transfers]
    assert keys == sorted(keys) and {t.stage for t in plan.transfers} == {0, 1, 2}


def test_nodes_without_a_copy_relay_to_each_other() -> None:
    cluster, links = Cluster(6, 2), Links()
    plan = reallocate(
        build_layout(SHAPE, "lm", place((1, 2, 1))), build_layout(SHAPE, "lm", place((5, 2, 1), 2)), cluster
    )
    elements = sum(spec.numel for spec in plan.source.specs)
    assert plan.busiest_seconds(links, 2) < 1.1 * 2 * elements / links.node_bytes_per_s


def test_idle_holders_of_other_nodes_send_where_local_holders_are_busy() -> None:
    """Each node holds the whole model already, but in it only one device each part."""
    cluster = Cluster(4, 8)
    shape = ModelShape(
        vocab_size=608, hidden_size=22, intermediate_size=37, layers=4, heads=48, kv_heads=6, head_dim=8
    )
    plan = reallocate(
        build_layout(shape, "lm", place((3, 8, 1))), build_layout(shape, "lm", place((1, 12, 2))), cluster
    )
    assert plan.bytes_by_link(1).network > 0
    check(plan)


def test_predicted_seconds_are_busiest_port_plus_message_latency() -> None:
    cluster = Cluster(2, 1)
    plan = reallocate(
        build_layout(SHAPE, "lm", place((1, 1, 1))), build_layout(SHAPE, "lm", place((1, 1, 1), 1)), cluster
    )
    elements = sum(spec.numel for spec in plan.source.specs)
    assert plan.seconds(Links(2e9, 1e9, 0.25), 4) == pytest.approx(4 * elements / 1e9 + 0.25)
    assert plan.seconds(Links(1e9, 2e9, 0.0), 4) == pytest.approx(4 * elements / 1e9)


def test_schedule_digests_are_equal_only_for_equal_schedules() -> None:
    cluster = Cluster(2, 4)
    placements = [place((2, 2, 1)), place((2, 2, 1), 4), place((1, 2, 2)), place((2, 4, 1))]
    layouts = [build_layout(SHAPE, "lm", p) for p in placements]
    digests = [reallocate(a, b, cluster).digest() for a in layouts for b in layouts]
    assert len(set(digests)) == len(digests)
    assert digests == [reallocate(a, b, cluster).digest() for a in layouts for b in layouts]


def test_reallocation_between_different_models_is_refused() -> None:
    with pytest.raises(ValueError, match="same tensors"):
        reallocate(
            build_layout(SHAPE, "lm", place((1, 1, 1))),
            build_layout(SHAPE, "scalar", place((1, 1, 1))),
            Cluster(1, 1),
        )
