from dataclasses import replace

import pytest

from realrl.algorithms.ppo.spec import ALGORITHM as PPO_SPEC
from realrl.families.published import SHAPES
from realrl.families.shape import Head, ModelShape
from realrl.layout.layout import build_layout
from realrl.plan.placement import Placement
from realrl.planner.cluster.spec import ClusterSpec
from realrl.planner.memory.model import MemoryModel, MemoryNeed
from realrl.planner.workload.sizes import LocalSizes
from tests.planner.problems import GROUPED, KINDS, LARGE, NODES, SMALL, STEP, call, place, recomputing, stored

MODEL = MemoryModel(NODES)
GIB = 1 << 30
TOTALS = {
    "llama-2-7b": 6738415616,
    "llama-2-13b": 13015864320,
    "llama-2-70b": 68976648192,
    "codellama-34b": 33743970304,
    "llama-3-8b": 8030261248,
    "llama-3-70b": 70553706496,
    "llama-3.2-1b": 1235814400,
    "qwen2.5-0.5b": 494032768,
    "qwen2.5-1.5b": 1543714304,
    "qwen2.5-3b": 3085938688,
    "qwen2.5-7b": 7615616512,
    "qwen2.5-14b": 14770033664,
    "qwen2.5-32b": 32763876352,
    "qwen2.5-72b": 72706203648,
}
"""Elements of the published checkpoints, as their safetensors indices and model cards have them."""


@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes_have_the_published_number_of_parameters(name: str) -> None:
    shape = SHAPES[name]
    biases = 0
    if name.startswith("qwen"):
        biases = shape.layers * (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    assert sum(LocalSizes(shape, "lm", 1).stage_elements(1)) + biases == TOTALS[name]


@pytest.mark.parametrize("placement", [place(1), place(2, 4), place(1, 5, 3), place(1, 1, 5), place(2, 6, 2)])
@pytest.mark.parametrize("shape", [GROUPED, GROUPED.model_copy(update={"tied_embeddings": True})])
@pytest.mark.parametrize("head", sorted(set(PPO_SPEC.heads.values())))
def test_parameter_bytes_match_those_of_the_layout(
    shape: ModelShape, head: Head, placement: Placement
) -> None:
    whole = build_layout(shape, head, placement)
    elements = [
        max(
            sum(tensor.stored.numel for tensor in whole.tensors(placement.rank(dp=0, tp=t, pp=stage)))
            for t in range(placement.strategy.tp)
        )
        for stage in range(placement.strategy.pp)
    ]
    assert (
        list(LocalSizes(shape, head, placement.strategy.tp).stage_elements(placement.strategy.pp)) == elements
    )
    needs = MODEL.stages(call("ref.inference"), stored(shape, head), placement, STEP)
    dp = placement.strategy.dp
    assert [need.static["parameters"] for need in needs] == [2 * -(-n // dp) * dp for n in elements]


def need(name: str, placement: Placement, *, shape=SMALL, step=STEP, element_bytes=2) -> MemoryNeed:
    return MODEL.call(call(name), stored(shape, "lm", element_bytes), placement, step)


@pytest.mark.parametrize(("element_bytes", "per_parameter"), [(2, 2 + 4 + 16), (4, 4 + 4 + 12)])
def test_one_rank_that_trains_holds_everything(element_bytes: int, per_parameter: int) -> None:
    found = need("actor.train", place(1), element_bytes=element_bytes)
    assert found.static_bytes == pytest.approx(per_parameter * TOTALS["llama-2-7b"], rel=1e-5)
    assert (
        MODEL.state(stored(SMALL, "lm", element_bytes), place(1))
        == found.static_bytes - found.static["parameters"]
    )


def test_data_parallel_ranks_share_the_optimizer_but_not_the_gradients() -> None:
    one, eight = need("actor.train", place(1)).static, need("actor.train", place(8)).static
    assert eight["optimizer"] == pytest.approx(one["optimizer"] / 8, rel=1e-5)
    assert eight["gradients"] == pytest.approx(one["gradients"], rel=1e-5)


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
    assert found == 32 * 512 * 2 * SMALL.layers * SMALL.kv_heads * SMALL.head_dim * 2


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
