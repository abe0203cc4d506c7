from dataclasses import replace

import pytest

from realrl.algorithms.ppo import ALGORITHM as PPO_SPEC
from realrl.families.adapters import LowRank
from realrl.families.shape import Head, Mixture, ModelShape
from realrl.families.sizes import SHAPES as PUBLISHED
from realrl.layout.kv_blocks import BLOCK_TOKENS
from realrl.layout.layout import build_layout
from realrl.layout.sets import WHOLE, TrainablePart
from realrl.plan.placement import Dtype, Mesh, Placement, Strategy
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.memory.activations import kv_cache_bytes
from realrl.planner.memory.call_memory import MemoryModel, MemoryNeed
from realrl.planner.memory.gathered import GatheredMemory
from realrl.planner.memory.logits import Logits
from realrl.planner.workload.shard_sizes import LocalSizes
from realrl.planner.workload.strategies import Strategies
from realrl.program.memory import Memory, StoredModel
from tests.model.small_models import SHAPES as SMALL_MODELS
from tests.planner.problems import GROUPED, KINDS, LARGE, NODES, SMALL, STEP, call, place, recomputing, stored

MODEL = MemoryModel(NODES)
MIXED = SMALL_MODELS["glm4_moe"].model_copy(update={"layers": 5, "dense_layers": (0, 3)})
GIB = 1 << 30


@pytest.mark.parametrize(
    "placement",
    [
        place(1),
        place(2, 4),
        place(1, 5, 3),
        place(1, 1, 5),
        place(2, 6, 2),
        Placement(Mesh(0, 4), Strategy(dp=2, pp=2, vpp=2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [GROUPED, GROUPED.model_copy(update={"tied_embeddings": True}), MIXED])
@pytest.mark.parametrize("head", sorted(set(PPO_SPEC.heads.values())))
@pytest.mark.parametrize("part", [WHOLE, TrainablePart(last_layers=3), TrainablePart(freeze_embeddings=True)])
def test_parameter_sets_are_those_that_layouts_store(
    shape: ModelShape, head: Head, placement: Placement, part: TrainablePart
) -> None:
    model, strategy = replace(stored(shape, head), trained=True, part=part), placement.strategy
    padded: dict[str, list[int]] = {}
    for name, of in model.sets.items():
        held = build_layout(shape, head, placement, of.tensors)
        elements = [
            max(
                sum(tensor.stored.numel for tensor in held.tensors(placement.rank(dp=0, tp=t, pp=stage)))
                for t in range(strategy.tp)
            )
            for stage in range(strategy.pp)
        ]
        sizes = LocalSizes(shape, head, strategy.tp, part).sets[name]
        assert list(sizes.stage_elements(strategy.pp, strategy.vpp)) == elements
        padded[name] = [-(-n // strategy.dp) * strategy.dp for n in elements]
    needs = MODEL.stages(call("actor.train"), model, placement, STEP)
    assert [n.static["parameters"] for n in needs] == [
        2 * sum(sizes) for sizes in zip(*padded.values(), strict=True)
    ]
    trained = padded["base" if part == WHOLE else "tuned"]
    assert [n.static["gradients"] for n in needs] == [4 * n for n in trained]
    # Two moments and masters, and where there are other ranks the reduced gradient.
    width = 12 if strategy.dp == 1 else 16
    assert [n.static["optimizer"] for n in needs] == [width * n // strategy.dp for n in trained]


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(
    "degrees",
    [
        {"dp": 4, "ep": 2},
        {"dp": 2, "tp": 2, "ep": 4},
        {"dp": 2, "cp": 2, "tp": 2, "ep": 2},
        {"dp": 4, "pp": 2, "ep": 4},
        {"dp": 2, "tp": 4, "pp": 3, "ep": 2},
        {"dp": 2, "tp": 2, "pp": 2, "ep": 2, "vpp": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("dense", [(), (0,), (0, 1, 5)], ids=str)
def test_whole_experts_are_those_that_layouts_store(
    degrees: dict[str, int], zero: int, dense: tuple[int, ...]
) -> None:
    shape = GROUPED.model_copy(update={"family": "qwen3_moe", "mixture": Mixture(experts=8, per_token=2)})
    if dense:
        shape = shape.model_copy(update={"dense_layers": dense, "dense_size": 3 * shape.intermediate_size})
    if zero == 1 or "vpp" not in degrees:
        check_static_memory(replace(stored(shape), trained=True), Strategy(zero=zero, **degrees))


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("targets", [None, ("gate_proj",), ("q_proj", "down_proj")], ids=str)
def test_adapters_of_some_layers_are_those_that_layouts_store(
    targets: tuple[str, ...] | None, zero: int
) -> None:
    shape = SMALL_MODELS["qwen3_moe-dense"].model_copy(update={"lora": LowRank(rank=3, targets=targets)})
    model = replace(stored(shape), trained=True, part=TrainablePart(adapters=True))
    for degrees in ({"dp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 3}, {"dp": 2, "tp": 3, "pp": 2}):
        check_static_memory(model, Strategy(zero=zero, **degrees))


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("targets", [("experts.down_proj",), ("all-linear",)], ids=str)
def test_adapters_of_experts_are_those_that_layouts_store(targets: tuple[str, ...], zero: int) -> None:
    shape = GROUPED.model_copy(
        update={
            "family": "qwen3_moe",
            "mixture": Mixture(experts=8, per_token=2),
            "lora": LowRank(rank=3, targets=targets),
        }
    )
    model = replace(stored(shape), trained=True, part=TrainablePart(adapters=True))
    for degrees in (
        {"dp": 2, "tp": 2},
        {"dp": 4, "ep": 2},
        {"dp": 2, "tp": 2, "ep": 4},
        {"dp": 2, "pp": 2, "ep": 2},
    ):
        check_static_memory(model, Strategy(zero=zero, **degrees))


def check_static_memory(model: StoredModel, strategy: Strategy) -> None:
    """The planner counts the bytes that the ranks of each stage store."""
    placement = Placement(Mesh(0, strategy.size), strategy)
    homes = Memory({"actor": model}, {"actor": placement}, offloaded=(), kept={})
    planned = MODEL.stages(call("actor.train"), model, placement, STEP)
    for stage, need in enumerate(planned):
        ranks = [rank for rank in placement.ranks if placement.stage(rank) == stage]
        held = [homes.at_rest(rank) for rank in ranks]
        for kinds, state in ((("parameters",), "parameters"), (("gradients", "optimizer"), "optimizer")):
            most = max(sum(size for of, size in here.items() if of.state == state) for here in held)
            assert sum(need.static[kind] for kind in kinds) == most


def need(name: str, placement: Placement, *, shape=SMALL, step=STEP, dtype: Dtype = "bfloat16") -> MemoryNeed:
    return MODEL.call(call(name), stored(shape, "lm", dtype), placement, step)


@pytest.mark.parametrize(
    ("dtype", "per_parameter"), [("bfloat16", 2 + 4 + 12), ("float32", 4 + 4 + 8), ("mixed", 4 + 4 + 8)]
)
def test_one_rank_that_trains_holds_everything(dtype: Dtype, per_parameter: int) -> None:
    found = need("actor.train", place(1), dtype=dtype)
    assert found.static_bytes == pytest.approx(per_parameter * 6_738_415_616, rel=1e-5)
    freed, _ = MODEL.states(stored(SMALL, "lm", dtype), Strategies.of([place(1).strategy]))
    assert freed == found.static_bytes - found.static["parameters"]


def test_data_parallel_ranks_share_the_optimizer_but_not_the_gradients() -> None:
    two, eight = need("actor.train", place(2)).static, need("actor.train", place(8)).static
    assert eight["optimizer"] == pytest.approx(two["optimizer"] / 4, rel=1e-5)
    assert eight["gradients"] == pytest.approx(two["gradients"], rel=1e-5)


@pytest.mark.parametrize(
    "placement", [place(8), place(4, 2), place(2, 2, 2), place(1, 1, 8), place(1, 8, sp=True)]
)
def test_recomputation_saves_memory(placement: Placement) -> None:
    plain, again = (
        need("actor.train", p).dynamic["activations"] for p in (placement, recomputing(placement))
    )
    assert again < 0.4 * plain


def test_activations_of_training_are_of_the_published_order() -> None:
    """34 bytes per token, hidden unit and layer (arXiv 2205.05198, equation 2, with no attention scores)."""
    found = need("actor.train", place(1)).dynamic["activations"]
    assert found == pytest.approx(34 * 8192 * SMALL.hidden_size * SMALL.layers, rel=0.2)


def test_the_first_pipeline_stage_keeps_most_micro_batches() -> None:
    stages = MODEL.stages(call("actor.train"), stored(LARGE), place(1, 8, 4), STEP)
    activations = [stage.dynamic["activations"] for stage in stages]
    assert activations == sorted(activations, reverse=True)
    assert activations[0] == pytest.approx(4 * activations[3], rel=0.15)
    assert [stage.dynamic["logits"] > 0 for stage in stages] == [False, False, False, True]


def test_the_cache_has_room_for_every_token() -> None:
    found = need("actor.generate", place(8, tokens=1 << 20)).dynamic["cache"]
    # One block more takes what padded rows write.
    assert found == (32 * 512 + BLOCK_TOKENS) * 2 * SMALL.layers * SMALL.kv_heads * SMALL.head_dim * 2


def test_exact_calls_on_cpus_hold_the_largest_matrix_packed() -> None:
    on_cpus = MemoryModel(ClusterSpec.parse("cpu:1x2"))
    model = stored(SMALL, "lm", "float32")
    for name in ("actor.train", "actor.generate", "ref.inference"):
        plain, exact = (
            on_cpus.stages(call(name), of, place(1, 1, 1), STEP)[0].dynamic.get("packed weights", 0)
            for of in (model, replace(model, exact=True))
        )
        assert exact - plain == 4 * max(SMALL.vocab_size, 2 * SMALL.intermediate_size) * SMALL.hidden_size


@pytest.mark.parametrize(("dtype", "element_bytes"), [("float32", 4), ("mixed", 2), ("bfloat16", 2)])
def test_generation_on_cpus_holds_a_packed_copy_of_the_weights(dtype: Dtype, element_bytes: int) -> None:
    on_cpus = MemoryModel(ClusterSpec.parse("cpu:1x2"))
    placement, model = place(1, 1, 2), stored(SMALL, "lm", dtype)
    first, last = on_cpus.stages(call("actor.generate"), model, placement, STEP)
    layers = (
        SMALL.layers // 2 * sum(rows * columns for rows, columns in LocalSizes(SMALL, "lm", 1).matmul_shapes)
    )
    head = SMALL.vocab_size * SMALL.hidden_size
    assert first.dynamic["packed weights"] == element_bytes * layers
    assert last.dynamic["packed weights"] == element_bytes * (layers + head)
    assert "packed weights" not in need("actor.generate", placement).dynamic


def test_shared_key_heads_are_cached_once_per_rank() -> None:
    two, eight, sixteen = (
        need("actor.generate", place(1, tp, tokens=1 << 20), shape=LARGE).dynamic["cache"]
        for tp in (2, 8, 16)
    )
    assert two == 4 * eight == 4 * sixteen


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("change", [{"prompts": (300,)}, {"answers": (800,), "max_new_tokens": 800}])
def test_larger_workloads_never_need_less_memory(name: str, change: dict) -> None:
    placement = place(8, tokens=1 << 20)
    assert need(name, placement, step=replace(STEP, **change)).bytes >= need(name, placement).bytes


def test_a_7b_model_trains_on_eight_devices_and_not_on_one() -> None:
    for placement, fits in ((place(8), True), (place(1), False)):
        found = need("actor.train", recomputing(placement)).bytes
        assert (found <= MODEL.capacity(0)) == fits


def test_driver_memory_is_not_usable() -> None:
    assert 75 * GIB < MODEL.capacity(0) < NODES.device(0).memory_bytes
    cpu = MemoryModel(ClusterSpec.parse("cpu:1x2"))
    assert cpu.spec.device(0).memory_bytes - cpu.capacity(0) < GIB


@pytest.mark.parametrize(
    ("shape", "tp", "heads"),
    [(SMALL, 1, 32), (LARGE, 8, 1), (GROUPED, 4, 1), (GROUPED.model_copy(update={"kv_heads": 3}), 2, 3)],
)
def test_the_kv_cache_holds_the_heads_of_a_rank(shape: ModelShape, tp: int, heads: int) -> None:
    """Under uneven groups, keys and values are kept for every query head."""
    found = kv_cache_bytes(LocalSizes(shape, "lm", tp), tokens=100, layers=3, element_bytes=2)
    assert found == 100 * 3 * 2 * heads * shape.head_dim * 2


@pytest.mark.parametrize(("element_bytes", "cast"), [(2, 4), (4, 0)])
def test_a_scalar_head_casts_hidden_states_and_their_gradient(element_bytes: int, cast: int) -> None:
    logits = Logits(LocalSizes(SMALL, "scalar", 2), element_bytes, cpu=False)
    assert logits.scored(30) == cast * 30 * SMALL.hidden_size
    assert logits.backward(30) == 2 * cast * 30 * SMALL.hidden_size


@pytest.mark.parametrize("dp", [2, 4])
def test_gradients_of_the_embedding_and_the_first_layer_are_reduced_together(dp: int) -> None:
    """Of all rows and, summed, of a rank's: in float32."""
    strategies = Strategies.of([Strategy(dp=dp, zero=3)])
    gathered = GatheredMemory(LocalSizes(SMALL, "lm", 1), strategies, 2)
    hidden, inner = SMALL.hidden_size, SMALL.intermediate_size
    layer = 4 * hidden * hidden + 3 * hidden * inner + 2 * hidden
    elements = SMALL.vocab_size * hidden + layer
    assert gathered.embedding_backward() == [4 * elements * (dp + 1) // dp]


def test_decode_steps_of_experts_have_graphs_where_torch_has_the_grouped_kernel() -> None:
    memory = MemoryModel(ClusterSpec.parse("h100:1x1+a100-80g:1x1"))
    model = stored(PUBLISHED["qwen3-30b-a3b"], "lm")
    newer, older = (
        memory.call(call("actor.generate"), model, replace(place(1), mesh=Mesh(first, 1)), STEP)
        for first in (0, 1)
    )
    assert newer.dynamic["graphs"] > 0
    assert not older.dynamic.get("graphs", 0)
    dense = memory.call(call("actor.generate"), stored(SMALL, "lm"), replace(place(1), mesh=Mesh(1, 1)), STEP)
    assert dense.dynamic["graphs"] > 0
