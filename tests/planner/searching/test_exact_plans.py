"""`exact: true` in planning: it costs time, and no call is placed with tensor parallelism."""

from dataclasses import replace

import pytest

from realrl.algorithms.ppo import train_graph
from realrl.config.errors import UserError
from realrl.families.sizes import SHAPES
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.memory.call_memory import MemoryModel
from realrl.planner.search.plan_search import make_preset_plans
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.space.build import build_problem
from realrl.planner.workload.workload import Workload
from realrl.program.memory import StoredModel

GRAPH = train_graph(minibatches=2)
MODELS = {
    role: StoredModel(
        SHAPES["qwen2.5-0.5b"],
        "lm" if role in ("actor", "ref") else "scalar",
        "bfloat16",
        GRAPH.trained(role),
        exact=True,
    )
    for role in GRAPH.roles
}
SPEC = ClusterSpec.parse("a100-40g:2x2")
EXACT = Scenario(
    graph=GRAPH,
    models=MODELS,
    spec=SPEC,
    workload=Workload(64, (256,), (256,), 256),
    cost=CostModel(SPEC),
    memory=MemoryModel(SPEC),
)


def test_candidates_of_exact_models_have_no_tensor_parallelism() -> None:
    found = build_problem(EXACT).candidates.values()
    assert {candidate.placement.strategy.tp for candidates in found for candidate in candidates} == {1}


def test_presets_with_tensor_parallelism_are_refused_for_exact_models() -> None:
    plans = make_preset_plans(EXACT)
    assert isinstance(plans["heuristic"], UserError)
    assert "exact=true needs tp=1" in str(plans["heuristic"])
    assert not isinstance(plans["symmetric"], UserError)


@pytest.mark.parametrize("name", ["actor.generate", "ref.inference", "actor.train"])
def test_exact_calls_are_predicted_to_take_longer(name: str) -> None:
    call = GRAPH.call(name)
    placement = Placement(Mesh(0, 4), Strategy(dp=4))
    exact, fast = (
        EXACT.cost.call(call, model, placement, EXACT.workload).seconds
        for model in (MODELS[call.model_role], replace(MODELS[call.model_role], exact=False))
    )
    assert 1.01 * fast < exact < 1.15 * fast
