"""Searches on many nodes start from the plan of few nodes with more data-parallel ranks."""

import pytest

from realrl.algorithms.ppo import ALGORITHM as PPO_SPEC
from realrl.algorithms.ppo import train_graph
from realrl.families.sizes import SHAPES
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.memory.call_memory import MemoryModel
from realrl.planner.search import plan_search
from realrl.planner.search.plan_search import find_plan, shrink_scenario, widen_plan
from realrl.planner.simulate.estimator import estimate_plan
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.workload.workload import Workload
from realrl.program.memory import StoredModel

GRAPH = train_graph(minibatches=4)
MODELS = {
    role: StoredModel(SHAPES["llama-2-7b"], PPO_SPEC.heads[role], "bfloat16", GRAPH.trained(role))
    for role in GRAPH.roles
}


def make_scenario(cluster: str, items: int) -> Scenario:
    spec = ClusterSpec.parse(cluster)
    return Scenario(
        graph=GRAPH,
        models=MODELS,
        spec=spec,
        workload=Workload(items, (512,), (512,), 512, samples=2),
        cost=CostModel(spec),
        memory=MemoryModel(spec),
    )


@pytest.mark.parametrize(
    ("nodes", "few", "by"), [(1250, 10, 125), (512, 16, 32), (257, 16, 16), (37, 12, 3), (34, 11, 3)]
)
def test_few_nodes_leave_few_of_many_idle(nodes: int, few: int, by: int) -> None:
    found = shrink_scenario(make_scenario(f"h100:{nodes}x8", 16 * nodes))
    assert found is not None
    small, times = found
    assert (small.spec.nodes, times) == (few, by)
    assert small.workload.items == 2 * (16 * nodes // 2 // by)
    assert small.cost.spec is small.spec and small.memory.spec is small.spec


@pytest.mark.parametrize(
    ("cluster", "items"), [("h100:31x8", 4096), ("h100:32x8+a100-80g:32x8", 4096), ("h100:64x8", 6)]
)
def test_clusters_of_few_nodes_or_several_kinds_and_small_batches_are_not_shrunk(
    cluster: str, items: int
) -> None:
    assert shrink_scenario(make_scenario(cluster, items)) is None


def test_a_widened_plan_has_more_data_parallel_ranks_on_as_many_devices() -> None:
    many = ClusterSpec.parse("h100:32x8").cluster
    place = Placement(
        Mesh(8, 16), Strategy(dp=2, tp=4, pp=2, micro_batch_tokens=4096, sequence_parallel=True)
    )
    few = Plan(
        ClusterSpec.parse("h100:16x8").cluster,
        dict.fromkeys((c.name for c in GRAPH.calls), place),
        keep=("actor",),
    )
    wide = widen_plan(few, 2, many)
    wide.check(GRAPH, {role: stored.shape for role, stored in MODELS.items()})
    assert wide.cluster == many and wide.keep == ("actor",)
    assert {*wide.placements.values()} == {Placement(Mesh(16, 32), place.strategy.with_degrees(dp=4))}


@pytest.mark.exhaustive
def test_a_search_on_very_many_devices_is_no_slower_than_the_widened_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenario = make_scenario("h100:40x8", 4096)
    tried = []

    def keep(plan: Plan, *arguments: object) -> Plan:
        tried.append(widen_plan(plan, *arguments))  # type: ignore[arg-type]
        return tried[-1]

    monkeypatch.setattr(plan_search, "widen_plan", keep)
    find_plan(scenario, effort=2000, presets={})
    assert not tried, "every size of mesh is enumerated"
    monkeypatch.setattr(plan_search, "MANY_DEVICES", 256)
    found = find_plan(scenario, effort=2000, presets={})
    (wide,) = tried
    assert found.problem.find_assignment(wide) is not None
    assert found.result.evaluation.seconds <= estimate_plan(scenario, wide).step_seconds * (1 + 1e-9)
    assert {place.strategy.zero for place in wide.placements.values()} == {1}
