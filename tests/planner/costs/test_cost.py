from dataclasses import replace

import pytest

from realrl.config.errors import UserError
from realrl.plan.placement import Dtype, Mesh, Placement
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cluster.efficiency import Efficiency
from realrl.planner.cost.cost_model import CallCost, CostModel
from realrl.planner.moves.transfers import Layouts
from realrl.planner.profile.profile import CollectiveTime, LayerTimes, Measurement, Profile, ShapeKey
from tests.planner.problems import (
    BARE_NODES,
    GRAPH,
    GROUPED,
    KINDS,
    LARGE,
    NODES,
    SMALL,
    STEP,
    call,
    place,
    recomputing,
    stored,
)

MODEL = CostModel(NODES)
IDEAL = Efficiency(
    matmul=1,
    memory=1e9,
    least_kernel_s=0,
    attention=1e9,
    link=1e9,
    decode_operations=0,
    forward_operations=0,
    collective_host_s=0,
)
"""Efficiency under which only matmuls take time."""


def cost(
    name: str, placement: Placement, *, shape=SMALL, step=STEP, model=MODEL, dtype: Dtype = "bfloat16"
) -> CallCost:
    return model.call(call(name), stored(shape, "lm", dtype), placement, step)


STRATEGIES = [
    place(8),
    place(1, 8),
    place(1, 1, 8),
    place(2, 2, 2),
    place(4, 8),
    place(1, 8, 4),
    place(2, 3, 1),
]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("placement", STRATEGIES, ids=lambda p: p.layout)
def test_cost_terms_are_nonnegative_times(name: str, placement: Placement) -> None:
    found = cost(name, placement)
    assert all(seconds >= 0 for seconds in found.terms.values())
    assert 0 < found.seconds < 3600 and found.seconds == sum(found.terms.values())


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("placement", STRATEGIES, ids=lambda p: p.layout)
@pytest.mark.parametrize(
    "change", [{"items": 512}, {"prompts": (256,)}, {"answers": (500,), "max_new_tokens": 500}]
)
def test_more_tokens_are_never_cheaper(name: str, placement: Placement, change: dict) -> None:
    more = cost(name, placement, step=replace(STEP, **change)).seconds
    assert more >= cost(name, placement).seconds * (1 - 1e-9)


@pytest.mark.parametrize(("name", "times"), [("ref.inference", 1), ("actor.train", 3)])
def test_compute_time_is_that_of_the_parameters(name: str, times: int) -> None:
    """2 operations per token and parameter of a product, twice as many backward; logits of one chunk are kept."""
    layer = SMALL.hidden_size * (4 * SMALL.heads * SMALL.head_dim + 3 * SMALL.intermediate_size)
    table = SMALL.vocab_size * SMALL.hidden_size
    found = cost(name, place(1), model=CostModel(BARE_NODES, efficiency=IDEAL)).terms["compute"]
    operations = 2 * STEP.tokens(GRAPH) * times * (SMALL.layers * layer + table)
    assert found == pytest.approx(operations / 312e12, rel=1e-6)


def test_recomputation_costs_one_more_forward_pass() -> None:
    model = CostModel(BARE_NODES, efficiency=IDEAL)
    plain, again = (
        cost("actor.train", placement, model=model).terms["compute"]
        for placement in (place(1), recomputing(place(1)))
    )
    forward = cost("ref.inference", place(1), model=model).terms["compute"]
    head = 2 * STEP.tokens(GRAPH) * SMALL.vocab_size * SMALL.hidden_size / 312e12
    assert again - plain == pytest.approx(forward - head, rel=1e-6)


@pytest.mark.parametrize("name", KINDS[1:])
def test_tensor_parallelism_halves_matmul_time(name: str) -> None:
    model = CostModel(BARE_NODES, efficiency=IDEAL)
    one, two = (cost(name, place(1, tp), model=model).terms["compute"] for tp in (1, 2))
    assert two == pytest.approx(one / 2, rel=1e-6)


@pytest.mark.parametrize("name", KINDS[1:])
def test_data_parallel_ranks_share_compute_time(name: str) -> None:
    one, eight = (cost(name, place(dp, tokens=2048)).terms["compute"] for dp in (1, 8))
    assert eight == pytest.approx(one / 8, rel=1e-6)


def test_narrow_matmuls_are_less_efficient() -> None:
    one, eight = (cost("ref.inference", place(1, tp)).terms["compute"] for tp in (1, 8))
    assert one / 8 < eight < one / 4


def test_float32_takes_as_much_longer_as_its_peak_is_lower() -> None:
    model = CostModel(BARE_NODES, efficiency=IDEAL)
    half, full = (
        cost("ref.inference", place(1), model=model, dtype=dtype).seconds for dtype in ("bfloat16", "float32")
    )
    assert full / half == pytest.approx(312 / 19.5, rel=1e-6)


def test_communication_crosses_nodes_slowly() -> None:
    terms = [cost("actor.train", p).terms["tensor"] for p in (place(1), place(1, 8), place(1, 16))]
    assert terms[0] == 0 and terms[2] > 3 * terms[1] > 0


def test_gradients_are_hidden_behind_long_backward_passes() -> None:
    long, short = (cost("actor.train", place(32, tokens=n)).terms["data"] for n in (1024, 512))
    assert 0 < long < short
    assert cost("actor.train", place(1, 8)).terms["data"] == 0


def test_a_four_stage_pipeline_has_the_bubble_of_its_schedule() -> None:
    """1F1B with m micro-batches takes as long as m + 3 of the slowest stage, if all are equal."""
    found = cost("actor.train", recomputing(place(1, 1, 4)), shape=SMALL)
    busy = found.terms["compute"]
    assert found.terms["bubble"] / busy == pytest.approx(3 / 8, rel=0.1)


def test_decoding_is_bound_by_memory_and_without_graphs_by_the_host() -> None:
    """One token for each of few sequences reads all parameters once."""
    step = replace(STEP, items=4, answers=(1000,), max_new_tokens=1000)
    model = CostModel(BARE_NODES, efficiency=Efficiency(least_kernel_s=0))
    terms = cost("actor.generate", place(1), step=step, model=model).terms
    assert terms["decode"] > 1000 * 2 * 6.5e9 / 2039e9
    assert terms["decode"] == pytest.approx(1000 * 2 * 6.7e9 / (0.85 * 2039e9), rel=0.2)
    # A graph is launched kernel by kernel first, and its tokens are looked at every 16 steps.
    assert 0 < terms["launch"] < 0.01 * terms["decode"]
    eager = CostModel(NODES, efficiency=Efficiency(decode_graphs=False))
    fast = cost("actor.generate", place(1, 8), step=step, model=eager).terms
    # 10 kernels of 12 µs and 2 collectives of 40 µs a layer.
    host = 1000 * SMALL.layers * (10 * 12e-6 + 2 * 40e-6)
    assert fast["launch"] > 0.1 * host
    assert fast["launch"] + fast["decode"] + fast["tensor"] == pytest.approx(host, rel=0.15)


def test_generation_ends_with_its_longest_sequence() -> None:
    short = replace(STEP, answers=tuple(range(1, 65)))
    assert (
        cost("actor.generate", place(8), step=short).seconds < 0.3 * cost("actor.generate", place(8)).seconds
    )


@pytest.mark.parametrize("kind", ["cpu", "a100-80g"])
def test_samples_of_a_prompt_share_its_prefill_and_on_a_cpu_read_its_cached_tokens_once(kind: str) -> None:
    lone = replace(STEP, prompts=(4096,))
    model = CostModel(ClusterSpec.parse(f"{kind}:1x8"))
    apart, shared, short = (
        cost("actor.generate", place(8, tokens=1 << 20), step=step, model=model)
        for step in (lone, replace(lone, samples=8), replace(lone, prompts=(4096 // 8,)))
    )
    # Of long prompts attention costs more than an eighth of the tokens would.
    assert shared.terms["compute"] < apart.terms["compute"] / 6
    assert short.terms["compute"] < shared.terms["compute"]
    same = short if kind == "cpu" else apart
    assert shared.terms["decode"] == pytest.approx(same.terms["decode"], rel=0.01)


def test_a_larger_cache_means_fewer_decode_rounds() -> None:
    small, large = (cost("actor.generate", place(8, tokens=tokens)).seconds for tokens in (2048, 16384))
    assert small > 3 * large


def test_call_costs_are_invariant_under_mesh_position() -> None:
    moved = Placement(Mesh(8, 16), place(2, 8).strategy)
    assert cost("actor.train", moved) == cost("actor.train", place(2, 8))


def test_faster_devices_are_faster() -> None:
    seconds = [
        cost(name, place(8), model=CostModel(ClusterSpec.parse(f"{kind}:1x8"))).seconds
        for name in KINDS
        for kind in ("b200", "h200", "h100", "a100-80g", "l40s")
    ]
    assert all(seconds[i : i + 5] == sorted(seconds[i : i + 5]) for i in (0, 5, 10))


def test_models_with_indivisible_sizes_have_costs() -> None:
    for placement in (place(1, 4, 3), place(2, 5), place(1, 1, 5)):
        assert cost("actor.train", placement, shape=GROUPED).seconds > 0


def test_fewer_sequences_than_ranks_raise_a_user_error() -> None:
    with pytest.raises(UserError, match="dp=32"):
        cost("actor.train", place(32), step=replace(STEP, items=64))


def test_compute_time_scales_with_parameters() -> None:
    model = CostModel(BARE_NODES)
    ratio = cost("ref.inference", place(4, 8), shape=LARGE, model=model).terms["compute"]
    ratio /= cost("ref.inference", place(4, 8), model=model).terms["compute"]
    assert ratio == pytest.approx(69 / 6.7, rel=0.15)


def test_profiles_do_not_apply_to_host_copies_of_other_devices() -> None:
    profile = Profile(
        device="h100",
        software={},
        collectives=(CollectiveTime(kind="host", ranks=1, bytes=1 << 30, seconds=9.0),),
    )
    spec = ClusterSpec.parse("h100:1x8+a100-80g:1x8")
    plain, measured = CostModel(spec), CostModel(spec, profile)
    assert measured.offload(1e9, rank=0) > 2 * plain.offload(1e9, rank=0)
    assert measured.offload(1e9, rank=8) == plain.offload(1e9, rank=8)


def test_offloading_is_bound_by_the_host_link() -> None:
    assert MODEL.offload(32e9) == pytest.approx(1 / 0.8)


def exchanged(target: Placement, items: int = 64000) -> float:
    """Seconds that training waits for what has been generated on the first node."""
    exchange = CostModel(ClusterSpec.parse("rtx-4090:2x8")).exchange(GRAPH, replace(STEP, items=items))
    pair = (Layouts.of([placement]) for placement in (place(8), target))
    return float(exchange.seconds("actor.generate", "actor.train", *pair)[0])


def test_exchange_time_grows_with_bytes_and_distance() -> None:
    elsewhere = Placement(Mesh(8, 8), place(8).strategy)
    assert 0 < exchanged(elsewhere, 64) < exchanged(elsewhere)
    assert exchanged(place(8)) < exchanged(elsewhere)


def test_every_stage_and_tp_rank_receives_a_copy_of_its_rows() -> None:
    assert exchanged(place(1, 8)) > 7 * exchanged(place(8))


def test_only_calls_that_make_experience_are_charged_for_it() -> None:
    """Other algorithms may train on generated samples without what PPO prepares."""
    times = Measurement(kind="prepare", sequences=256, context=384, seconds=5.0)
    layers = LayerTimes(shape=ShapeKey.of(SMALL), dtype="bfloat16", measurements=(times,))
    profile = Profile(device="a100-80g", software={}, layers=(layers,))
    measured = CostModel(NODES, profile)
    ppo = replace(STEP, experience_calls=("actor.train",))
    plain = cost("actor.train", place(1)).seconds
    assert cost("actor.train", place(1), model=measured).seconds == pytest.approx(plain)
    assert cost("actor.train", place(1), model=measured, step=ppo).seconds == pytest.approx(plain + 5)
    assert cost("critic.train", place(1), model=measured, step=ppo).seconds == pytest.approx(
        cost("critic.train", place(1)).seconds
    )
