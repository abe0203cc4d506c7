"""Costs of models with dense layers and layers with experts are sums over the layers of both kinds."""

from collections.abc import Mapping

import numpy as np
import pytest

from realrl.families.shape import ModelShape, split_kinds
from realrl.families.sizes import SHAPES, count_matrix_weights
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cluster.devices import DEVICES
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.profile.profile import ShapeKey
from realrl.planner.workload.flops import count_pass_flops
from realrl.planner.workload.shard_sizes import LocalSizes
from realrl.planner.workload.workload import Workload
from realrl.runtime.profiler.request import make_request
from tests.planner.executed_routes import time_routes
from tests.planner.problems import KINDS, call, stored

MODEL = CostModel(ClusterSpec.parse("h100:4x8"))
MIXED = SHAPES["glm-4.5-air"].model_copy(update={"layers": 8, "dense_layers": (0, 1, 6)})
EXPERTS, DENSE = (kind.shape for kind in split_kinds(MIXED))
STEP = Workload(64, (128,), (384,), 384)


def cost(name: str, shape: ModelShape, strategy: Strategy, model: CostModel = MODEL) -> Mapping[str, float]:
    placement = Placement(Mesh(0, strategy.size), strategy)
    return model.call(call(name), stored(shape), placement, STEP).terms


def mean(experts: float, dense: float, layers: tuple[int, int] = (5, 3)) -> float:
    """Combine costs of models that have layers of one kind only, with a number of layers of each kind."""
    return (layers[0] * experts + layers[1] * dense) / sum(layers)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(dp=4),
        Strategy(dp=2, tp=4, sequence_parallel=True),
        Strategy(dp=4, recompute=True),
        Strategy(dp=2, cp=2),
    ],
    ids=str,
)
def test_times_of_a_stage_are_sums_over_its_layers(name: str, strategy: Strategy) -> None:
    strategy = strategy.for_generation() if name == "actor.generate" else strategy
    mixed, experts, dense = (cost(name, shape, strategy) for shape in (MIXED, EXPERTS, DENSE))
    for term in ("compute", "decode", "tensor", "context", "launch"):
        # A prefill computes only keys and values of the last layer, which has experts.
        layers = (4, 3) if (name, term) == ("actor.generate", "compute") else (5, 3)
        if term in mixed:
            assert mixed[term] == pytest.approx(mean(experts[term], dense[term], layers)), term
    assert mixed["compute"] < max(experts["compute"], dense["compute"])


@pytest.mark.parametrize(
    ("name", "pp", "layers"),
    [("actor.train", 2, (3, 1)), ("ref.inference", 2, (3, 1)), ("ref.inference", 4, (1, 1))],
)
def test_the_slowest_stage_has_its_own_layers(name: str, pp: int, layers: tuple[int, int]) -> None:
    """The last stage, which also has the head, is the slowest. It has one dense layer."""
    strategy = Strategy(dp=4, pp=pp, micro_batch_tokens=1 << 20)
    mixed, *kinds = (cost(name, shape, strategy)["compute"] for shape in (MIXED, EXPERTS, DENSE))
    assert mixed == pytest.approx(mean(*kinds, layers))


@pytest.mark.parametrize(("name", "ahead"), [("h100", True), ("a100-80g", False)])
def test_decode_steps_are_graphs_of_all_layers_or_of_none(name: str, ahead: bool) -> None:
    """On an A100, no kernel computes all experts, so the host launches dense layers, too."""
    sizes = LocalSizes(MIXED, "lm", 1)
    found = {
        of.runs_ahead("bfloat16", exact=False, device=DEVICES[name])
        for of in (sizes, *(kind.sizes for kind in sizes.kinds))
    }
    assert found == {ahead}


@pytest.mark.parametrize("name", KINDS[1:])
def test_only_layers_with_experts_exchange_tokens(name: str) -> None:
    strategy = Strategy(dp=4, ep=2)
    mixed, experts = (cost(name, shape, strategy)["experts"] for shape in (MIXED, EXPERTS))
    assert mixed == pytest.approx(5 / 8 * experts) and mixed > 0


@pytest.mark.parametrize("zero", [2, 3])
def test_gathering_and_reducing_takes_a_time_between_those_of_the_kinds(zero: int) -> None:
    strategy = Strategy(dp=8, zero=zero)
    mixed, *kinds = (cost("actor.train", shape, strategy)["data"] for shape in (MIXED, EXPERTS, DENSE))
    assert min(kinds) < mixed < max(kinds)
    assert mixed == pytest.approx(mean(*kinds), rel=0.1)


def test_flops_are_sums_over_the_layers() -> None:
    mixed, experts, dense = (
        count_pass_flops(stored(shape), call(KINDS[2]).kind, tokens=100, scored=90, squares=10_000)
        for shape in (MIXED, EXPERTS, DENSE)
    )
    assert mixed == pytest.approx(mean(experts, dense))
    assert count_matrix_weights(MIXED, 2) == sum(count_matrix_weights(of, 1) for of in (EXPERTS, DENSE))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Strategy(tp=8, pp=4), Strategy(dp=4, tp=8)),
        (Strategy(dp=8, pp=4), Strategy(dp=4, tp=8)),
        (Strategy(dp=4, tp=4, pp=2), Strategy(tp=4, pp=8)),
    ],
    ids=str,
)
def test_the_estimate_of_a_reallocation_is_near_the_time_of_the_routes(
    source: Strategy, target: Strategy
) -> None:
    small = MIXED.mixture.model_copy(update={"experts": 8}) if MIXED.mixture else None
    model = stored(MIXED.model_copy(update={"mixture": small}))
    placements = [Placement(Mesh(0, 32), strategy) for strategy in (source, target)]
    exact = time_routes(MODEL, model, *placements)
    assert MODEL.reallocation(model, *placements) == pytest.approx(exact, rel=0.08, abs=1e-3)


def test_a_profile_measures_each_kind_of_layer() -> None:
    request = make_request(
        None, shapes=["glm-4.5-air"], dtypes=[], cluster=None, out="profile.json", quick=True, again=False
    )
    shapes = [shape for shape, _ in request.models]
    assert [shape.intermediate_size for shape in shapes] == [1408, 10944]
    assert [shape.mixture is None for shape in shapes] == [False, True]
    assert len({ShapeKey.of(shape) for shape in shapes}) == 2
    assert not np.any([shape.dense_layers for shape in shapes])
