"""Communication and launches that calls are charged for: at one byte, one hop or one launch per second."""

from dataclasses import replace

import pytest

from realrl.dataflow.call import Candidates, Kind
from realrl.families.adapters import LowRank
from realrl.families.shape import Mixture
from realrl.layout.limits import BUCKET_ELEMENTS
from realrl.layout.sets import TrainablePart
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.workload.workload import Sampling, Workload
from tests.planner.unit_device import (
    NOTHING,
    SHAPE,
    cost,
    make_call,
    make_cluster,
    make_efficiency,
    place,
    store,
)

WIRE = make_cluster(link_bytes_per_s=1.0)
HOPS = make_cluster(link_latency_s=1.0)
STEP = Workload(6, (8,), (24,), 24)
TOKENS, LAYERS, HIDDEN = 6 * 32, 4, 64
STATES = 2 * TOKENS * HIDDEN
"""Bytes of hidden states."""
SMALL = 64
"""Bytes of what metrics and norms take."""
LAYER = 256 * 64 + 64 * 128 + 320 * 64 + 64 * 160 + 2 * 64
PARAMETERS = LAYERS * LAYER + 64 + 2 * 960 * 64


def reduce(ranks: int, number_bytes: float) -> float:
    """Bytes that a rank of a ring sends for an all-reduce: all parts but one, twice."""
    return 2 * gather(ranks, number_bytes)


def gather(ranks: int, number_bytes: float) -> float:
    """The same for an all-gather or a reduce-scatter."""
    return number_bytes * (ranks - 1) / ranks


@pytest.mark.parametrize("tp", [2, 4])
def test_tp_ranks_sum_hidden_states_twice_a_layer_and_sums_of_logits(tp: int) -> None:
    """Once more for the embedding, and of each row its maximum, its sum of exponentials, and what was chosen."""
    layers = (2 * LAYERS + 1) * reduce(tp, STATES)
    head = 3 * reduce(tp, 4 * TOKENS)
    assert cost(Kind.INFERENCE, STEP, place(tp=tp), WIRE)["tensor"] == layers + head
    backward = 2 * LAYERS * reduce(tp, STATES) + reduce(tp, STATES)
    assert cost(Kind.TRAIN, STEP, place(tp=tp), WIRE)["tensor"] == layers + head + backward
    again = cost(Kind.TRAIN, STEP, place(tp=tp, recompute=True), WIRE)["tensor"]
    assert again == layers + head + backward + 2 * LAYERS * reduce(tp, STATES)
    scalar = cost(Kind.INFERENCE, STEP, place(tp=tp), WIRE, model=store(head="scalar"))
    assert scalar["tensor"] == layers


def test_hops_of_a_ring_are_those_of_its_other_ranks() -> None:
    for tp in (2, 4):
        assert cost(Kind.INFERENCE, STEP, place(tp=tp), HOPS)["tensor"] == (2 * LAYERS + 1 + 3) * 2 * (tp - 1)


def test_sequence_parallelism_gathers_and_scatters_what_it_sums_otherwise() -> None:
    plain, split = (cost(Kind.TRAIN, STEP, place(tp=4, sp=sp), WIRE)["tensor"] for sp in (False, True))
    assert split == plain
    generated = [cost(Kind.GENERATE, STEP, place(tp=4, sp=sp), WIRE)["tensor"] for sp in (False, True)]
    assert generated[0] == generated[1]


def test_logits_are_reduced_chunk_by_chunk() -> None:
    """2^28 logits at a time, of 480 of each row: 559,240 rows, of which 559,232 are a multiple of 128."""
    step = replace(STEP, items=3 * 559_232 // 32)
    rows = step.items * 32
    terms = cost(Kind.INFERENCE, step, place(tp=2, tokens=1 << 30), WIRE, model=store(SHAPE))
    layers = (2 * LAYERS + 1) * reduce(2, 2 * rows * HIDDEN)
    assert terms["tensor"] == layers + 2 * 3 * reduce(2, 4 * 559_232) + reduce(2, 4 * rows)
    # Backward of logits that are not kept, maxima and sums come once more.
    trained = cost(Kind.TRAIN, step, place(tp=2, tokens=1 << 30), WIRE)["tensor"]
    backward = (2 * LAYERS + 1) * reduce(2, 2 * rows * HIDDEN) + 2 * 3 * reduce(2, 4 * 559_232)
    assert trained == terms["tensor"] + backward


def test_candidates_are_reduced_or_gathered_beside_chosen_tokens() -> None:
    plain, given, found = (
        cost(Kind.INFERENCE, STEP, place(tp=2), WIRE, candidates=candidates)["tensor"]
        for candidates in (None, Candidates(5, "teacher_ids"), Candidates(5))
    )
    assert given - plain == reduce(2, 4 * TOKENS * 5)
    # Of both ranks, five ids in int64 and five float32 numbers of every token.
    assert found - plain == gather(2, 2 * 5 * TOKENS * 8) + gather(2, 2 * 5 * TOKENS * 4)


def test_generation_sums_hidden_states_and_gathers_logits_of_every_token() -> None:
    # Graphs are of eight rows, and tokens are looked at every 16 steps.
    tp, rows, steps, prefilled = 2, 8, 32, 6 * 7
    states = reduce(tp, 2 * rows * HIDDEN)
    decoded = steps * ((2 * LAYERS + 1) * states + gather(tp, 4 * rows * 960))
    # The last layer of a prefill ends with keys and values.
    prefill = (2 * LAYERS - 1) * reduce(tp, 2 * prefilled * HIDDEN)
    assert cost(Kind.GENERATE, STEP, place(tp=tp), WIRE)["tensor"] == pytest.approx(decoded + prefill)


def test_collectives_between_nodes_share_a_nodes_network() -> None:
    """Four TP groups of two go through the network of both nodes at once."""
    nodes = make_cluster(2, 4, node_bytes_per_s=1.0)
    terms = cost(Kind.INFERENCE, STEP, place(tp=8), nodes)
    assert terms["tensor"] == (2 * LAYERS + 1) * reduce(8, STATES) + 3 * reduce(8, 4 * TOKENS)
    data = cost(Kind.TRAIN, STEP, place(2, 4), nodes)["data"]
    inside = cost(Kind.TRAIN, STEP, place(2, 2), WIRE)["data"]
    small = 3 * reduce(2, SMALL)
    halves = ((PARAMETERS - LAYERS * 2 * 64 - 64) / tp + LAYERS * 2 * 64 + 64 for tp in (4, 2))
    across, within = (gather(2, 6 * elements) for elements in halves)
    assert data == pytest.approx(4 * (across + small)) and inside == pytest.approx(within + small)
    late = make_cluster(2, 4, link_latency_s=1.0, node_latency_s=5.0)
    # Of the eight links of the ring, two cross the network.
    link = (2 * 5.0 + 6 * 1.0) / 8
    assert cost(Kind.INFERENCE, STEP, place(tp=8), late)["tensor"] == (2 * LAYERS + 1 + 3) * 2 * 7 * link


def test_achieved_fractions_divide_the_bandwidth() -> None:
    whole, half = (cost(Kind.TRAIN, STEP, place(2, 2, 2), WIRE, link=f) for f in (1.0, 0.5))
    for term in ("tensor", "data", "pipeline"):
        assert half[term] == pytest.approx(2 * whole[term])


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 2), ("float32", 4)])
def test_gradients_are_scattered_in_float32_and_parameters_gathered_in_their_type(
    dtype: str, width: int
) -> None:
    """And three small sums of metrics and the norm."""
    model = store(dtype=dtype)  # type: ignore[arg-type]
    for dp in (2, 3):
        terms = cost(Kind.TRAIN, replace(STEP, epochs=2), place(dp), WIRE, model=model, minibatches=2)
        each = gather(dp, (4 + width) * PARAMETERS) + 3 * reduce(dp, SMALL)
        assert terms["data"] == pytest.approx(2 * 2 * each)
        assert terms["optimizer"] == 2 * 2 * reduce(dp, SMALL)


def test_communication_is_hidden_behind_the_last_backward_pass_and_the_update() -> None:
    """All but the last of several buckets, as far as computation lasts."""
    shape = SHAPE.model_copy(update={"vocab_size": 3 * BUCKET_ELEMENTS // 128})
    model, elements = store(shape), PARAMETERS + 3 * BUCKET_ELEMENTS - 2 * 960 * 64
    small = 3 * reduce(2, SMALL)
    exposed = cost(Kind.TRAIN, STEP, place(2), WIRE, model=model)["data"]
    assert exposed == pytest.approx(gather(2, 6 * elements) + small)
    hidden = cost(
        Kind.TRAIN,
        STEP,
        place(2),
        make_cluster(link_bytes_per_s=1.0, bf16_flops=1e-6),
        model=model,
        overlap=1.0,
    )
    assert hidden["data"] == pytest.approx(gather(2, (4 / 3 + 2) * elements) + small)
    slow = make_cluster(link_bytes_per_s=1.0, memory_bytes_per_s=1e-6)
    updating = cost(Kind.TRAIN, STEP, place(2), slow, model=model, overlap=1.0, update_bytes=1.0)
    assert updating["data"] == pytest.approx(gather(2, (4 + 2) / 3 * elements) + small)
    half = make_cluster(link_bytes_per_s=1.0, bf16_flops=1e-3)
    backward = 2 * 2 * TOKENS / 2 * (LAYER - 128) * LAYERS + 2.5 * 2 * 32**2 * 128 * 3 * LAYERS
    partly = cost(Kind.TRAIN, STEP, place(2), half, model=model, overlap=5e-4)["data"]
    assert exposed - partly == pytest.approx(backward / 2)
    assert cost(
        Kind.TRAIN,
        STEP,
        place(2),
        make_cluster(link_bytes_per_s=1.0, bf16_flops=1e-6, cpu=True),
        model=model,
        overlap=1.0,
    )["data"] == pytest.approx(exposed)


def test_gradients_of_shared_tensors_are_summed_apart() -> None:
    """With sequence parallelism those of norms, over TP and DP ranks; of shared keys and values those of all heads;
    of a table tied to the head of another stage the whole table."""
    norms = 4 * LAYERS * 2 * 64
    plain, split = (cost(Kind.TRAIN, STEP, place(2, 2, sp=sp), WIRE)["data"] for sp in (False, True))
    assert split - plain == pytest.approx(2 * reduce(2, norms))
    alone = cost(Kind.TRAIN, STEP, place(1, 8), WIRE)["data"]
    assert alone == 2 * LAYERS * reduce(8, 4 * 64 * 64)
    tied = store(SHAPE.model_copy(update={"tied_embeddings": True}))
    assert cost(Kind.TRAIN, STEP, place(pp=2), WIRE, model=tied)["data"] == reduce(2, 4 * 960 * 64)
    assert cost(Kind.TRAIN, STEP, place(tp=2), WIRE, model=tied)["data"] == 0
    lora = SHAPE.model_copy(update={"lora": LowRank(rank=4, targets=("k_proj",))})
    adapted = cost(Kind.TRAIN, STEP, place(1, 8), WIRE, model=store(lora, part=TrainablePart(adapters=True)))
    # A is on every rank, whose gradients are summed; of B's rows ranks share some.
    assert adapted["data"] == pytest.approx(
        2 * LAYERS * reduce(8, 4 * 64 * 4) + LAYERS * reduce(8, 4 * 4 * 64)
    )


def test_late_gradients_are_not_hidden() -> None:
    fast = make_cluster(link_bytes_per_s=1.0, bf16_flops=1e-9)
    shared = cost(
        Kind.TRAIN, STEP, place(2, 8), make_cluster(1, 16, link_bytes_per_s=1.0, bf16_flops=1e-9), overlap=1.0
    )
    elements = (PARAMETERS - LAYERS * (2 * 64 + 64 * 128) - 64) / 8 + LAYERS * (2 * 64 + 64 * 2 * 16) + 64
    sums = 3 * reduce(2, SMALL) + 2 * LAYERS * reduce(8, 4 * 64 * 64)
    assert shared["data"] == pytest.approx(gather(2, 6 * elements) + sums)
    tied = store(SHAPE.model_copy(update={"tied_embeddings": True, "vocab_size": 2 * BUCKET_ELEMENTS // 64}))
    terms = cost(Kind.TRAIN, STEP, place(2, 1, 2), fast, model=tied, overlap=1.0)
    table, last = 2 * BUCKET_ELEMENTS, 2 * LAYER + 64
    # Two buckets, of which that of the stage's own layers is hidden but for its last part.
    early = gather(2, 4 * (table + last)) * last / (table + last)
    late = gather(2, 4 * table)
    expected = max(early - 1e18, gather(2, 4 * (table + last)) / 2) + late
    sums = 3 * reduce(2, SMALL) + reduce(2, 4 * table)
    assert terms["data"] == pytest.approx(expected + sums + gather(2, 2 * (table + last)))


def test_stages_send_hidden_states_of_every_chunk() -> None:
    """Chunks of a sequence each. Without gradients a pipeline waits for one message per boundary; under 1F1B
    each of both directions is waited for, and metrics and the norm go round, too."""
    states = 2 * 32 * HIDDEN
    inferred = cost(Kind.INFERENCE, STEP, place(pp=4, tokens=32), WIRE)
    assert inferred["pipeline"] == 3 * states
    trained = cost(Kind.TRAIN, STEP, place(pp=4, tokens=32), WIRE)
    assert trained["pipeline"] == 2 * (6 + 3) * states + 2 * SMALL
    split = cost(Kind.INFERENCE, STEP, place(1, 2, 2, tokens=32, sp=True), WIRE)
    assert split["pipeline"] == states / 2
    generated = cost(Kind.GENERATE, STEP, place(pp=2), WIRE)
    # Four rows of each of two batches, every step; and a pass of the prompts of each.
    assert generated["pipeline"] == pytest.approx(32 * 2 * 2 * 4 * HIDDEN + 2 * 3 * 7 * HIDDEN)


def test_stages_of_different_nodes_share_the_network() -> None:
    states = 2 * 32 * HIDDEN
    nodes = make_cluster(2, 4, node_bytes_per_s=1.0, node_latency_s=1000.0)
    assert cost(Kind.INFERENCE, STEP, place(2, 2, 2), nodes)["pipeline"] == 1000 + 4 * states
    narrow = make_cluster(2, 4, link_bytes_per_s=0.125)
    assert cost(Kind.INFERENCE, STEP, place(2, 2, 2), narrow)["pipeline"] == 8 * states


HOST = make_cluster(kernel_s=1.0)


def test_a_layer_waits_for_its_launches_and_collectives() -> None:
    launches = {"forward_operations": 7, "backward_operations": 14}
    assert cost(Kind.INFERENCE, STEP, place(tokens=64), HOST, **launches)["launch"] == 3 * LAYERS * 7
    assert cost(Kind.TRAIN, STEP, place(), HOST, **launches)["launch"] == LAYERS * (7 + 14)
    assert cost(Kind.TRAIN, STEP, place(recompute=True), HOST, **launches)["launch"] == LAYERS * (7 + 7 + 14)
    posting = {"collective_host_s": 100.0}
    assert cost(Kind.INFERENCE, STEP, place(tp=2), HOST, **posting)["launch"] == LAYERS * 2 * 100
    assert cost(Kind.TRAIN, STEP, place(tp=2, sp=True), HOST, **posting)["launch"] == LAYERS * 2 * 2 * 100
    assert cost(Kind.INFERENCE, STEP, place(pp=2, tokens=32), HOST, **posting)["pipeline"] == 100


def test_only_what_the_device_does_not_do_meanwhile_is_waited_for() -> None:
    """A layer takes the device 10 seconds, and the host 7."""
    layer = 2 * TOKENS * (LAYER - 128) + 2 * 32**2 * 128 * 6
    half = make_cluster(kernel_s=1.0, bf16_flops=layer / 5)
    terms = cost(Kind.INFERENCE, STEP, place(), half, forward_operations=7)
    assert terms["launch"] == pytest.approx(LAYERS * 2)
    busy = make_cluster(kernel_s=1.0, bf16_flops=layer / 10)
    assert cost(Kind.INFERENCE, STEP, place(), busy, forward_operations=7)["launch"] == 0
    # Communication of the layer is on the device, too.
    ring = make_cluster(kernel_s=1.0, link_bytes_per_s=2 * reduce(2, STATES) / 5)
    assert cost(Kind.INFERENCE, STEP, place(tp=2), ring, forward_operations=7)["launch"] == pytest.approx(8)


@pytest.mark.parametrize(("dora", "forward", "backward"), [(False, 22, 44), (True, 22 + 4 * 8, 44 + 4 * 16)])
def test_adapters_launch_two_operations_for_each_matrix_and_block(
    dora: bool, forward: int, backward: int
) -> None:
    """Four matrices of seven blocks; backward twice as many, and for norms of rows (DoRA) 8 and 16 more."""
    model = store(SHAPE.model_copy(update={"lora": LowRank(dora=dora)}), part=TrainablePart(adapters=True))
    assert cost(Kind.INFERENCE, STEP, place(), HOST, model=model)["launch"] == LAYERS * forward
    assert cost(Kind.TRAIN, STEP, place(), HOST, model=model)["launch"] == LAYERS * (forward + backward)


@pytest.mark.parametrize(
    ("zero", "kind", "rounds"),
    [
        (1, Kind.INFERENCE, 0),
        (1, Kind.TRAIN, 0),
        (2, Kind.TRAIN, 1),
        (3, Kind.INFERENCE, 1),
        (3, Kind.TRAIN, 3),
    ],
)
def test_zero_posts_a_collective_for_each_parameter_of_a_layer(zero: int, kind: Kind, rounds: int) -> None:
    """Gathered forward and backward, and its gradient reduced; of two norms and four matrices."""
    placed = Placement(Mesh(0, 2), Strategy(dp=2, micro_batch_tokens=1 << 20, zero=zero))
    assert cost(kind, STEP, placed, HOST, collective_host_s=100.0)["launch"] == LAYERS * 6 * rounds * 100


def test_a_cpu_launches_and_computes_on_the_same_cores() -> None:
    cpu = make_cluster(kernel_s=1.0, cpu=True)
    terms = cost(Kind.INFERENCE, STEP, place(tp=2), cpu, forward_operations=7, collective_host_s=100.0)
    assert terms["compute"] == LAYERS * 7 and terms["launch"] == 0


def test_decode_steps_are_launched_one_by_one_or_as_a_graph() -> None:
    numbers = {"decode_operations": 9, "sampling_operations": 5}
    each = LAYERS * 9 + 5
    eager = cost(Kind.GENERATE, STEP, place(), HOST, decode_graphs=False, **numbers)
    assert eager["launch"] == pytest.approx(32 * each) and eager["decode"] == 0
    graphs = cost(Kind.GENERATE, STEP, place(), HOST, graph_kernel_s=0.5, **numbers)
    # A graph's step is launched once kernel by kernel, and once to be captured.
    assert graphs["decode"] == pytest.approx(32 * each / 2) and graphs["launch"] == 2 * each
    posted = cost(
        Kind.GENERATE, STEP, place(tp=2), HOST, decode_graphs=False, collective_host_s=100.0, **numbers
    )
    prefill = LAYERS * 2 * 100
    assert posted["launch"] == pytest.approx(32 * (LAYERS * (9 + 200) + 5) + prefill)
    captured = cost(Kind.GENERATE, STEP, place(tp=2), HOST, collective_host_s=100.0, **numbers)
    assert captured["launch"] == pytest.approx(2 * (each + LAYERS * 2) + prefill)


def test_rows_that_end_apart_take_a_graph_for_each_of_few_numbers() -> None:
    """Of 1, 2, 4 and 8 rows."""
    step = replace(STEP, answers=(8, 24))
    found = cost(Kind.GENERATE, step, place(), HOST, sampling_operations=5)
    assert found["launch"] == 4 * 2 * 5


def count_kept_captures(kind: Kind, placement: Placement, dora: bool | None = None) -> float:
    model = store()
    if dora is not None:
        adapted = SHAPE.model_copy(update={"lora": LowRank(rank=4, dora=dora)})
        model = store(adapted, part=TrainablePart(adapters=True))
    numbers = {"decode_operations": 9, "sampling_operations": 5}
    costs = CostModel(HOST, efficiency=make_efficiency(**numbers))
    return costs.call(make_call(kind), model, placement, STEP).captures


def test_captures_that_the_next_step_finds_are_those_without_collectives() -> None:
    assert count_kept_captures(Kind.GENERATE, place()) == 2 * (LAYERS * 9 + 5)
    assert count_kept_captures(Kind.GENERATE, place(pp=2)) == 2 * 2 * (LAYERS // 2 * 9 + 5)
    assert count_kept_captures(Kind.GENERATE, place(tp=2)) == 0
    assert count_kept_captures(Kind.GENERATE, place(), dora=False) > 0
    assert count_kept_captures(Kind.GENERATE, place(), dora=True) == 0, "factors are computed for each call"
    assert count_kept_captures(Kind.INFERENCE, place()) == 0


def test_the_host_looks_at_tokens_every_sixteen_steps() -> None:
    found = cost(Kind.GENERATE, STEP, place(), HOST, look_operations=7, look_row_s=3.0)
    assert found["launch"] == 2 * (7 + 3 * 6)
    assert cost(Kind.GENERATE, STEP, place(), make_cluster(cpu=True), look_row_s=3.0)["launch"] == 0


def test_restricted_sampling_launches_more() -> None:
    numbers = {"minimum_operations": 3, "top_k_operations": 10, "top_p_operations": 100}
    for sampling, each in (
        (Sampling(), 0), (Sampling(minimum=True), 3), (Sampling(top_k=True), 10), (Sampling(top_p=True), 100)
    ):  # fmt: skip
        step = replace(STEP, sampling=sampling)
        found = cost(Kind.GENERATE, step, place(), HOST, decode_graphs=False, **numbers)
        assert found["launch"] == 32 * each


def test_experts_without_a_grouped_kernel_are_launched_one_by_one_and_decoded_without_graphs() -> None:
    shape = SHAPE.model_copy(update={"family": "qwen3_moe", "mixture": Mixture(experts=16, per_token=2)})
    older = make_cluster(kernel_s=1.0, groups_products=False)
    for dtype, exact, cluster, loops in (
        ("bfloat16", False, HOST, 0), ("float32", False, HOST, 32), ("bfloat16", True, HOST, 32),
        ("bfloat16", False, older, 32),
    ):  # fmt: skip
        model = replace(store(shape, dtype=dtype), exact=exact)  # type: ignore[arg-type]
        launched = cost(Kind.INFERENCE, STEP, place(), cluster, model=model)["launch"]
        assert launched == LAYERS * loops, (dtype, exact)
        decoded = cost(Kind.GENERATE, STEP, place(), cluster, model=model, sampling_operations=5)["launch"]
        # Layers of a prefill and of each step; or once for a graph, and once to capture it.
        assert decoded == ((LAYERS + 32 * LAYERS) * loops + 32 * 5 if loops else 2 * 5), (dtype, exact)


def test_adapters_experts_and_wide_matrices_launch_more() -> None:
    def count(**changes: object) -> float:
        shape = SHAPE.model_copy(update=changes)
        part = TrainablePart(adapters=True) if "lora" in changes else TrainablePart()
        model = store(shape, part=part)
        return cost(Kind.INFERENCE, STEP, place(), HOST, model=model, expert_operations=3)["launch"] / LAYERS

    # A and its scaling, and for each of three blocks a product with B and an addition; 8 more with DoRA.
    assert count(lora=LowRank(rank=4, targets=("q_proj", "k_proj", "v_proj"))) == 2 + 3 * 2
    assert count(lora=LowRank(rank=4, targets=("o_proj",), dora=True)) == 2 + 2 + 8
    assert count(quantised="int8") == 4 * 2
    assert count(family="qwen3_moe", mixture=Mixture(experts=16, per_token=2)) == 3
    shared = Mixture(experts=16, per_token=1, scores="sigmoid", normalised=False, weighed="inputs", shared=1)
    assert count(family="llama4_text", mixture=shared) == 3 + 4


def test_a_cpu_loops_over_experts() -> None:
    shape = SHAPE.model_copy(update={"family": "qwen3_moe", "mixture": Mixture(experts=16, per_token=2)})
    cpu = make_cluster(kernel_s=1.0, cpu=True)
    terms = cost(Kind.INFERENCE, STEP, place(), cpu, model=store(shape), expert_operations=3)
    assert terms["compute"] == LAYERS * (3 + 2 * 16)


def test_nothing_else_is_charged() -> None:
    for kind in (Kind.TRAIN, Kind.INFERENCE, Kind.GENERATE):
        for placement in (place(), place(2, 2, 2), place(1, 4, 2, sp=True)):
            terms = cost(kind, STEP, placement, make_cluster(2, 4))
            assert sum(terms.values()) < 1e9 * NOTHING


EXPERTS, COPIES = 8, 2
SHARED = store(
    SHAPE.model_copy(
        update={
            "family": "glm4_moe",
            "mixture": Mixture(
                experts=EXPERTS, per_token=COPIES, scores="sigmoid", correction=True, shared=1
            ),
        }
    )
)
RETURNED = gather(2, TOKENS // 2 * COPIES * 2 * HIDDEN)
SENT = RETURNED + gather(2, TOKENS // 2 * COPIES * 4)
NUMBERS = gather(2, 8 * EXPERTS)
"""Bytes that one of two ranks sends in a layer: outputs, rows with weights, and numbers of rows."""
HALF = 2 * TOKENS // 2 * 160 * HIDDEN
"""Operations of the second half of a shared block; the first half has twice as many."""


OVERLAP = 1 / 3


def charge_experts(kind: Kind, strategy: Strategy, *, flops: float = 1e30, cpu: bool = False) -> float:
    """Seconds for experts, at a byte per second. Fast blocks hide nothing."""
    cluster = make_cluster(link_bytes_per_s=1.0, bf16_flops=flops, fp32_flops=flops, cpu=cpu)
    placement = Placement(Mesh(0, strategy.size), strategy)
    return cost(kind, STEP, placement, cluster, model=SHARED, overlap=OVERLAP, expert_spread=0.0)["experts"]


@pytest.mark.parametrize("share", [0.1, 0.4, 0.9, 2])
@pytest.mark.parametrize("zero_bubble", [False, True])
def test_a_shared_block_hides_the_exchange_of_tokens_with_experts(share: float, zero_bubble: bool) -> None:
    """The second half of the block takes the given share of the time that returning rows takes, forward."""
    flops = HALF / (share * RETURNED / OVERLAP)
    pp = 2 if zero_bubble else 1
    plain = Strategy(dp=2, pp=pp, ep=2, micro_batch_tokens=1 << 20, zero_bubble=zero_bubble)

    def find_hidden(kind: Kind, strategy: Strategy = plain) -> float:
        """Seconds that a layer hides."""
        seconds = charge_experts(kind, strategy) - charge_experts(kind, strategy, flops=flops)
        return seconds / (LAYERS / pp)

    forward = min(SENT, 2 * share * RETURNED) + min(RETURNED, share * RETURNED)
    # Gradients of weights that are computed after the pass hide nothing.
    both = share if zero_bubble else 2 * share
    backward = min(SENT, 2 * both * RETURNED) + min(RETURNED, both * RETURNED)
    assert find_hidden(Kind.INFERENCE) == pytest.approx(forward)
    assert find_hidden(Kind.TRAIN) == pytest.approx(forward + backward)
    again = replace(plain, recompute=True)
    assert find_hidden(Kind.TRAIN, again) == pytest.approx(2 * forward + backward)


def test_on_a_cpu_nothing_hides_the_exchange_of_tokens_with_experts() -> None:
    strategy = Strategy(dp=2, ep=2, micro_batch_tokens=1 << 20)
    found = charge_experts(Kind.TRAIN, strategy, flops=1e-6, cpu=True)
    assert found == 2 * LAYERS * (SENT + RETURNED + NUMBERS)


def test_a_shared_block_hides_the_exchange_of_prompts_with_experts() -> None:
    """In decode steps, ranks gather tokens, and nothing hides that. Nor does a prefill compute the last layer, or
    the last tokens of its prompts."""
    strategy = Strategy(dp=2, ep=2, micro_batch_tokens=1 << 20)
    hidden = charge_experts(Kind.GENERATE, strategy) - charge_experts(Kind.GENERATE, strategy, flops=1e-9)
    assert hidden == pytest.approx((LAYERS - 1) * (SENT + RETURNED) * (3 * 7) / (TOKENS / 2))
