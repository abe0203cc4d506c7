"""Predictions for generate calls whose context-parallel ranks have the same rows and divide their KV cache."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from realrl.dataflow.call import Call, Kind
from realrl.families.shape import Mixture
from realrl.layout.kv_blocks import BLOCK_TOKENS, CacheSize
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.memory.call_memory import MemoryModel
from realrl.planner.memory.layer import LayerMemory
from realrl.planner.workload.environment import EnvironmentTimes, EnvironmentWork
from realrl.planner.workload.generation import split_generation
from realrl.planner.workload.shard_sizes import LocalSizes
from realrl.planner.workload.strategies import Strategies
from realrl.planner.workload.workload import Workload
from tests.planner.problems import SMALL, stored
from tests.planner.unit_device import SHAPE, cost, make_call, make_cluster, place, store

GENERATE = make_call(Kind.GENERATE)
WIRE = make_cluster(link_bytes_per_s=1.0)
READ = make_cluster(memory_bytes_per_s=1.0)
COMPUTE = make_cluster(bf16_flops=1.0, fp32_flops=1.0)
ITEMS, PROMPT, ANSWER, LAYERS = 8, 16, 16, 4
STEP = Workload(ITEMS, (PROMPT,), (ANSWER,), ANSWER)
OUTPUT = 4 * (128 + 8)
"""Bytes of a row's attention output, with a log-sum-exp for each of eight heads, in float32."""
LONG = Workload(64, (4096,), (28672,), 28672)
DEVICES = ClusterSpec.parse("h100:2x8")


def need(strategy: Strategy, workload: Workload = LONG, call: Call = GENERATE) -> dict[str, int]:
    placement = Placement(Mesh(0, strategy.size), strategy)
    return dict(MemoryModel(DEVICES).call(call, stored(SMALL), placement, workload).dynamic)


def gather(ranks: int, number_bytes: float) -> float:
    """Bytes that a rank of a ring sends for an all-gather: all parts but one."""
    return number_bytes * (ranks - 1) / ranks


@pytest.mark.parametrize("cp", [2, 4])
def test_blocks_hold_more_tokens_and_each_rank_stores_its_part(cp: int) -> None:
    work = Workload(64, (1000,), (500,), 500).work(GENERATE)
    found = split_generation(work, Strategy(dp=2, cp=cp, micro_batch_tokens=1 << 20), cpu=False)
    size = cp * BLOCK_TOKENS
    prompt, own = -(-999 // size), -(-500 // size)
    assert found.rows == 32, "all CP ranks have the rows of their data-parallel rank"
    assert found.cache == CacheSize(32 * (prompt + own), 32, size)
    assert found.cache.tokens == (32 * (prompt + own) + 1) * BLOCK_TOKENS
    # The capacity counts the tokens of all CP ranks.
    few = split_generation(work, Strategy(dp=2, cp=cp, micro_batch_tokens=8192), cpu=False)
    assert few.cache.blocks == 8192 // size
    alone = split_generation(work, Strategy(dp=2, micro_batch_tokens=8192), cpu=False)
    assert few.cache.rows == pytest.approx(alone.cache.rows, abs=1)


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_the_cache_of_a_rank_shrinks_with_their_number(cp: int) -> None:
    one, many = (need(Strategy(cp=n, micro_batch_tokens=1 << 20)) for n in (1, cp))
    assert many["cache"] == pytest.approx(one["cache"] / cp, rel=0.01)


@pytest.mark.parametrize("samples", [1, 2])
def test_a_prefill_takes_the_memory_of_an_inference_pass(samples: int) -> None:
    """The keys and values of one layer are gathered, and everything else is divided. With several samples, the
    prompt of a row that is prefilled again may be in the cache. Then queries are gathered, too."""
    whole = Workload(2, (16384,), (16,), 16, samples=samples)
    activations = [need(Strategy(cp=cp, micro_batch_tokens=1 << 20), whole)["activations"] for cp in (1, 4)]
    heads = 2 * SMALL.kv_heads + (SMALL.heads if samples > 1 else 0)
    gathered = 2 * heads * SMALL.head_dim * 16383
    assert activations[0] / 4 < activations[1] < activations[0] / 4 + 2.5 * gathered
    assert activations[1] < (0.6 if samples == 1 else 0.8) * activations[0]


def test_a_prefill_of_the_last_layer_gathers_too() -> None:
    """This layer is the only one on the last stage, which then computes nothing but keys and values."""
    sizes = LocalSizes(SMALL, "lm", 1)
    one, four = (
        LayerMemory(
            sizes=sizes,
            strategies=Strategies.of([Strategy(cp=cp)]),
            element_bytes=2,
            cpu=False,
            lengths=[(9,)],
        ).projected
        for cp in (1, 4)
    )
    assert four - one == 2 * SMALL.kv_heads * SMALL.head_dim * (2 * 4 + 1)


@pytest.mark.parametrize("cp", [2, 4])
def test_decode_steps_hold_the_outputs_of_all_ranks(cp: int) -> None:
    """In float32: a copy of a rank's own outputs, those of all ranks, their scores and weights, and their sum. A
    rank's own output is float32, too."""
    narrow = LocalSizes(SHAPE.model_copy(update={"intermediate_size": 16}), "lm", 1)
    alone, together = (
        LayerMemory(
            sizes=narrow,
            strategies=Strategies.of([Strategy(cp=n)]),
            element_bytes=2,
            cpu=False,
            lengths=[(9,)],
            phase="decode",
        ).computed
        for n in (1, cp)
    )
    merging = cp * 2 * 4 * 8 + 2 * 4 * 128
    assert 2 * (together - alone) == (cp + 1) * OUTPUT + merging


@pytest.mark.parametrize("cp", [2, 4])
def test_ranks_gather_keys_of_prefills_and_outputs_of_decode_steps(cp: int) -> None:
    keys = LAYERS * gather(cp, 2 * 2 * 64 * ITEMS * (PROMPT - 1))
    steps = ANSWER * (LAYERS * gather(cp, cp * ITEMS * OUTPUT) + gather(cp, 16 * ITEMS))
    terms = cost(Kind.GENERATE, STEP, place(cp=cp), WIRE)
    assert terms["context"] == pytest.approx(keys + steps)
    assert cost(Kind.GENERATE, STEP, place(), WIRE)["context"] == 0
    # TP ranks have a part of the heads each, and sum the hidden states of their CP rank's tokens alone.
    whole, split = (cost(Kind.GENERATE, STEP, place(tp=2, cp=n), WIRE) for n in (1, cp))
    halves = keys / 2 + ANSWER * (LAYERS * gather(cp, cp * ITEMS * OUTPUT / 2) + gather(cp, 16 * ITEMS))
    assert split["context"] == pytest.approx(halves)
    prefilled = (2 * LAYERS - 1) * 2 * 64 * ITEMS * (PROMPT - 1)
    assert whole["tensor"] - split["tensor"] == pytest.approx(prefilled * (1 - 1 / cp))


def test_only_the_last_stage_broadcasts_tokens() -> None:
    """Two batches of four rows. The last stage has half of the layers, and the sampled tokens."""
    found = cost(Kind.GENERATE, STEP, place(cp=2, pp=2), WIRE)["context"]
    keys = LAYERS / 2 * gather(2, 2 * 2 * 64 * ITEMS * (PROMPT - 1))
    batch = LAYERS / 2 * gather(2, 2 * 4 * OUTPUT) + gather(2, 16 * 4)
    assert found == pytest.approx(keys + ANSWER * 2 * batch)


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("window", [None, 8])
def test_ranks_read_all_weights_and_their_part_of_the_keys(cp: int, window: int | None) -> None:
    shape = SHAPE
    if window is not None:
        shape = SHAPE.model_copy(update={"family": "mistral", "window": window, "windowed_layers": (1,)})
    alone, together = (cost(Kind.GENERATE, STEP, place(cp=n), READ, model=store(shape)) for n in (1, cp))
    contexts = [PROMPT + i for i in range(ANSWER)]
    seen = sum((LAYERS - 1) * context + min(context, window or context) for context in contexts)
    merged = ANSWER * LAYERS * ITEMS * (3 * cp + 5) * OUTPUT
    keys = 2 * 2 * 64 * ITEMS * seen
    assert alone["decode"] - together["decode"] == pytest.approx(keys * (1 - 1 / cp) - merged)


def test_prefills_are_divided() -> None:
    one, four = (cost(Kind.GENERATE, STEP, place(cp=cp), COMPUTE)["compute"] for cp in (1, 4))
    assert four == pytest.approx(one / 4)


def test_ranks_that_divide_experts_hand_on_the_same_rows() -> None:
    """As many rows arrive as from data-parallel ranks, but they choose fewer experts. Prefills are divided."""
    mixture = Mixture(experts=64, per_token=2)
    model = store(SHAPE.model_copy(update={"family": "mixtral", "mixture": mixture}))

    def predict(cluster: ClusterSpec, items: int, **degrees: int) -> Mapping[str, float]:
        strategy = Strategy(**degrees, ep=4, micro_batch_tokens=1 << 20)
        placement, step = Placement(Mesh(0, strategy.size), strategy), replace(STEP, items=items)
        return cost(Kind.GENERATE, step, placement, cluster, model=model, expert_spread=0.0)

    assert predict(READ, ITEMS, cp=4)["decode"] < predict(READ, 4 * ITEMS, dp=4)["decode"]
    apart, together = predict(WIRE, 4 * ITEMS, dp=4)["experts"], predict(WIRE, ITEMS, cp=4)["experts"]
    rows = 2 * ITEMS * (PROMPT - 1)
    prefilled = (LAYERS - 1) * gather(4, rows * (2 * 2 * 64 + 4))
    assert apart - together == pytest.approx(prefilled * 3 / 4)


@pytest.mark.parametrize(
    ("degrees", "together"),
    [({"dp": 8}, 8), ({"cp": 8}, 1), ({"dp": 4, "cp": 2}, 4), ({"dp": 2, "tp": 4}, 2)],
)
def test_ranks_with_the_same_rows_replace_them_together(degrees: dict[str, int], together: int) -> None:
    """So a data-parallel rank does not wait for prefills of its own CP ranks."""
    work = Workload(64, (100,), (100,), 100).work(GENERATE)
    assert split_generation(work, Strategy(**degrees, ep=8), cpu=False).together == together


def test_graphs_with_collectives_of_cp_ranks_are_captured_in_each_step() -> None:
    model = CostModel(DEVICES)
    one, two = (
        model.call(GENERATE, stored(SMALL), place(cp=cp, tokens=1 << 20), Workload(64, (100,), (100,), 100))
        for cp in (1, 2)
    )
    assert one.captures > 0 == two.captures
    assert two.terms["launch"] > one.terms["launch"]


def test_rows_that_return_from_an_environment_exchange_their_new_tokens() -> None:
    times = EnvironmentTimes((0.1,), (4,), (60,))
    step = Workload(32, (128,), (256,), 256, environment=EnvironmentWork(times, 64))
    quiet = replace(step, environment=EnvironmentWork(replace(times, given=(0,)), 64))
    given, nothing = (
        CostModel(DEVICES).call(GENERATE, stored(SMALL), place(cp=4, tokens=1 << 20), of).terms
        for of in (step, quiet)
    )
    assert given["context"] > nothing["context"] > 0


def test_divided_caches_pay_off_for_one_very_long_row() -> None:
    """A million tokens of one row, whose keys take longer to read than the weights."""
    million = Workload(1, (1024,), (1 << 20,), 1 << 20)
    model = CostModel(DEVICES)
    one, four = (
        model.call(GENERATE, stored(SMALL), place(tp=4, cp=cp, tokens=1 << 21), million) for cp in (1, 4)
    )
    assert four.seconds < 0.4 * one.seconds
    # Short rows only pay for the gathers.
    short = Workload(1, (128,), (128,), 128)
    one, four = (model.call(GENERATE, stored(SMALL), place(tp=4, cp=cp), short) for cp in (1, 4))
    assert four.seconds > one.seconds
