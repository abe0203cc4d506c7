from math import prod
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realrl.config.errors import UserError
from realrl.families.registry import model_tensors
from realrl.families.shape import ModelShape
from realrl.layout import limits
from realrl.layout.layout import Layout, build_layout, group_stacks
from realrl.layout.ranges import (
    feed_forward,
    kv_heads,
    padded_vocabulary,
    query_heads,
    stage_layers,
    virtual_stage_layers,
    vocabulary,
)
from realrl.plan.axes import COPIES, axes_dividing
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy
from tests.layout.strategies import moves

SHAPE = ModelShape(
    vocab_size=10, hidden_size=8, intermediate_size=7, layers=5, heads=6, kv_heads=2, head_dim=2
)


def place(dp: int, tp: int, pp: int, first: int = 0) -> Placement:
    return Placement(Mesh(first, dp * tp * pp), Strategy(dp=dp, tp=tp, pp=pp))


@pytest.mark.parametrize(
    "layers, sizes", [(7, (1, 2, 2, 1, 1)), (5, (1, 2, 1, 1)), (8, (1, 2, 2, 2, 1)), (6, (2, 2, 2))]
)
def test_larger_pipeline_stages_are_in_the_middle(layers: int, sizes: tuple[int, ...]) -> None:
    assert tuple(map(len, stage_layers(layers, len(sizes)))) == sizes


@given(st.integers(1, 40), st.integers(1, 40))
def test_pipeline_stages_cover_all_layers_in_order(layers: int, pp: int) -> None:
    if pp > layers:
        with pytest.raises(UserError, match="pipeline stages"):
            stage_layers(layers, pp)
        return
    stages = stage_layers(layers, pp)
    assert [layer for stage in stages for layer in stage] == list(range(layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


@given(st.integers(1, 40), st.integers(2, 8), st.integers(1, 6))
def test_virtual_stages_are_runs_of_layers_that_take_turns(layers: int, pp: int, vpp: int) -> None:
    if pp * vpp > layers:
        with pytest.raises(UserError, match="pipeline stages"):
            virtual_stage_layers(layers, pp, vpp)
        return
    stages = virtual_stage_layers(layers, pp, vpp)
    in_turns = [run for turn in zip(*stages, strict=True) for run in turn]
    assert [layer for run in in_turns for layer in run] == list(range(layers))
    sizes = [len(run) for run in in_turns]
    assert max(sizes) - min(sizes) <= 1
    whole = [sum(map(len, runs)) for runs in stages]
    assert max(whole) - min(whole) <= 1


@pytest.mark.parametrize(
    "tp, queries, keys",
    [
        (1, [(0, 6)], [(0, 2)]),
        (2, [(0, 3), (3, 6)], [(0, 1), (1, 2)]),
        (3, [(0, 2), (2, 4), (4, 6)], [(0, 1), (0, 2), (1, 2)]),
        (4, [(0, 1), (1, 3), (3, 4), (4, 6)], [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (6, [(i, i + 1) for i in range(6)], [(0, 1)] * 3 + [(1, 2)] * 3),
    ],
)
def test_tp_ranks_hold_the_key_heads_of_their_query_heads(
    tp: int, queries: list[tuple[int, int]], keys: list[tuple[int, int]]
) -> None:
    assert [query_heads(SHAPE, tp, t) for t in range(tp)] == [range(*r) for r in queries]
    assert [kv_heads(SHAPE, tp, t) for t in range(tp)] == [range(*r) for r in keys]


@pytest.mark.parametrize("tp", range(1, 7))
def test_tp_ranks_partition_ffn_units_and_token_ids(tp: int) -> None:
    assert [i for t in range(tp) for i in feed_forward(7, tp, t)] == list(range(7))
    assert [i for t in range(tp) for i in vocabulary(SHAPE, tp, t)] == list(range(10))
    assert tp * padded_vocabulary(SHAPE, tp) >= 10


def test_last_tp_ranks_of_a_padded_vocabulary_may_be_empty() -> None:
    held = build_layout(SHAPE, "lm", place(1, 6, 1)).tensors(5)[0]
    assert held.region.size == (0, 8) and held.shape == (2, 8)


def test_local_tensors_keep_the_storage_order_of_the_model() -> None:
    order = {spec.name: i for i, spec in enumerate(model_tensors(SHAPE, "lm"))}
    made = build_layout(SHAPE, "lm", place(1, 2, 3))
    for rank in range(6):
        held = [order[local.region.tensor] for local in made.tensors(rank)]
        assert held == sorted(held)


def test_a_tied_embedding_lies_on_first_and_last_stage() -> None:
    tied = SHAPE.model_copy(update={"tied_embeddings": True})
    for head, stages in (("lm", {0, 2}), ("scalar", {0})):
        made = build_layout(tied, head, place(1, 1, 3))  # type: ignore[arg-type]
        names = [{local.region.tensor for local in made.tensors(rank)} for rank in range(3)]
        assert {i for i in range(3) if "model.embed_tokens.weight" in names[i]} == stages
    assert (
        len([t for t in build_layout(tied, "lm", place(1, 1, 1)).tensors(0) if "embed" in t.region.tensor])
        == 1
    )


def test_a_rank_outside_the_mesh_holds_no_tensors() -> None:
    made = build_layout(SHAPE, "lm", place(2, 1, 1, first=4))
    assert made.tensors(3) == made.tensors(6) == () and made.tensors(4) == made.tensors(5) != ()


@pytest.mark.parametrize("degrees, text", [((1, 1, 6), "pp=6"), ((1, 7, 1), "tp=7")])
def test_a_strategy_that_the_model_does_not_fit_is_refused(degrees: tuple[int, int, int], text: str) -> None:
    with pytest.raises(UserError, match=text):
        build_layout(SHAPE, "lm", place(*degrees))


@settings(max_examples=150, deadline=None)
@given(moves())
def test_every_replica_holds_each_element(move: tuple[Layout, Layout, Cluster]) -> None:
    """Under ZeRO-3, ranks that compute with the same parameters hold each element together."""
    made = move[0]
    for of_experts in (False, True):
        specs = [spec for spec in made.specs if (spec.expert is not None) == of_experts]
        placement = made.placement.for_experts() if of_experts else made.placement
        copies = placement.strategy.copies
        shares = placement.strategy.shards_parameters
        for replica in [range(copies)] if shares else [[i] for i in range(copies)]:
            seen = {spec.name: np.zeros(spec.shape, dtype=int) for spec in specs}
            for rank in placement.ranks:
                for local in made.tensors(rank) if placement.copy_index(rank) in replica else ():
                    region = local.region
                    box = tuple(slice(a, b) for a, b in zip(region.offset, region.end, strict=True))
                    if region.tensor in seen:
                        seen[region.tensor][box] += 1
                    assert prod(local.shape) >= region.numel and local.shape[1:] == region.size[1:]
            assert all((count > 0).all() for count in seen.values())


@settings(max_examples=100, deadline=None)
@given(moves(), st.integers(1, 200))
def test_counted_elements_are_those_of_listed_tensors(
    move: tuple[Layout, Layout, Cluster], bucket: int
) -> None:
    made = move[0]
    with mock.patch.object(limits, "BUCKET_ELEMENTS", bucket):
        for rank in made.placement.ranks:
            runs = made.runs(rank)
            padded = sum(run.size for run in runs), sum(run.size // run.replicas for run in runs)
            assert made.count_stored(rank) == padded


@settings(max_examples=100, deadline=None)
@given(moves())
def test_shards_of_zero_3_are_equal_and_lie_back_to_back_in_the_parameters(
    move: tuple[Layout, Layout, Cluster],
) -> None:
    """So that an all-gather of each parameter's rows gives the parameter, with padding after it."""
    made = move[0]
    for first in made.placement.ranks:
        for stack in group_stacks(made.gathered_tensors(first)):
            placement = made.placement_of(stack[0].spec)
            if placement.copy_index(first) or not placement.strategy.shards_parameters:
                continue
            copies, names = placement.strategy.copies, [whole.spec.name for whole in stack]
            offsets = placement.strategy.degrees.offsets(*axes_dividing(*COPIES))
            stored = [{one.spec.name: one for one in made.tensors(first + offset)} for offset in offsets]
            parts = [[tensors[name] for name in names] for tensors in stored]
            rows = [sum(tensor.shape[0] for tensor in part) for part in parts]
            assert len({*rows}) == 1 and sum(rows) < sum(tensor.shape[0] for tensor in stack) + copies
            for i, whole in enumerate(stack):
                held = [part[i].region for part in parts if part[i].region.numel]
                edges = [(region.offset[0], region.end[0]) for region in held]
                assert [a for a, _ in edges[1:]] == [b for _, b in edges[:-1]]
                assert sum(region.numel for region in held) == whole.region.numel
