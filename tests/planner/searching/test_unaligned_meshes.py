"""Meshes that are no aligned slices of a node, where they make the step shorter than all that are."""

from dataclasses import replace

from realrl.families.sizes import SHAPES
from realrl.plan.placement import Mesh
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.memory.call_memory import MemoryModel
from realrl.planner.search.search import search_plans
from realrl.planner.simulate.estimator import estimate_plan
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.space.build import SearchSpace, build_problem
from realrl.planner.workload.workload import Workload
from tests.planner.problems import GRAPH, SMALL, stored


def test_five_devices_train_the_larger_model_beside_three_for_the_smaller_one() -> None:
    spec = ClusterSpec.parse("b200:1x8")
    models = {role: stored(SMALL, "scalar" if role in ("critic", "reward") else "lm") for role in GRAPH.roles}
    models["actor"] = stored(SHAPES["llama-2-13b"])
    of = Scenario(
        graph=GRAPH,
        models=models,
        spec=spec,
        workload=Workload(512, (256,), (512,), 512),
        cost=CostModel(spec),
        memory=MemoryModel(spec),
    )
    everything = build_problem(
        of, search_space=SearchSpace(recompute=(False,), zero=(1,), virtual=(1,), zero_bubble=(False,))
    )
    aligned = replace(
        everything,
        candidates={
            name: tuple(o for o in options if is_aligned(o.placement.mesh))
            for name, options in everything.candidates.items()
        },
    )
    best, within = (search_plans(of_meshes, tolerance=1e-3) for of_meshes in (everything, aligned))
    assert best.evaluation.seconds < within.lower_bound
    plan = everything.plan(best.assignment)
    meshes = {plan[name].mesh for name in ("actor.train", "critic.train")}
    assert meshes == {Mesh(0, 5), Mesh(5, 3)} or meshes == {Mesh(0, 3), Mesh(3, 5)}
    assert plan["actor.train"].mesh.size == 5
    assert abs(estimate_plan(of, plan).step_seconds / best.evaluation.seconds - 1) < 1e-9


def is_aligned(mesh: Mesh) -> bool:
    return 8 % mesh.size == 0 and mesh.first % mesh.size == 0
