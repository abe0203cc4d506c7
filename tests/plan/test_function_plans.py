"""Where functions are placed, and what a plan cannot say of them."""

from dataclasses import replace
from pathlib import Path

import pytest

from realrl.algorithms.policy.graph import make_eval_graph
from realrl.algorithms.ppo.graph import train_graph
from realrl.config.errors import UserError
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy, function_placement
from realrl.plan.plan import Plan
from realrl.plan.presets import make_plan

GRAPH = train_graph(minibatches=2, reward="reward.py:score")
NAME = "reward.function"


@pytest.mark.parametrize(
    ("preset", "mesh"),
    [
        ("symmetric", "0-7"),
        ("heuristic", "0-7"),
        ("interleave", "0-7"),
        ("separate", "4-7"),
        ("disjoint", "0-1"),
    ],
)
def test_presets_call_functions_on_every_rank_of_a_mesh(preset: str, mesh: str) -> None:
    plan = make_plan(preset, GRAPH, Cluster(2, 4), 1024)
    assert plan[NAME] == function_placement(Mesh.parse(mesh))


def test_disjoint_calls_a_function_where_its_inputs_come_from() -> None:
    plan = make_plan("disjoint", GRAPH, Cluster(2, 4), 1024)
    assert plan[NAME].mesh == plan["actor.generate"].mesh


def test_a_plan_file_with_a_function_round_trips(tmp_path: Path) -> None:
    plan = make_plan("separate", GRAPH, Cluster(2, 4), 8192)
    plan.save(tmp_path / "plan.yaml")
    assert make_plan(str(tmp_path / "plan.yaml"), GRAPH, Cluster(2, 4), 8192) == plan


@pytest.mark.parametrize(
    ("placement", "field"),
    [
        (Placement(Mesh(0, 2), Strategy(1, 2)), "tp"),
        (Placement(Mesh(0, 2), Strategy(1, 1, 2)), "pp"),
        (Placement(Mesh(0, 1), Strategy(1, dtype="bfloat16")), "dtype"),
        (Placement(Mesh(0, 1), Strategy(1, recompute=True)), "recompute"),
        (Placement(Mesh(0, 1), Strategy(1, sequence_parallel=True)), "sequence_parallel"),
    ],
)
def test_what_is_for_models_is_refused_for_a_function(placement: Placement, field: str) -> None:
    plan = make_plan("symmetric", GRAPH, Cluster(1, 2), 1024)
    plan = replace(plan, placements={**plan.placements, NAME: placement})
    with pytest.raises(UserError, match=rf"plan: reward.function: {field} is for calls of models"):
        plan.check(GRAPH)


@pytest.mark.parametrize("key", ["offload", "keep"])
def test_a_function_has_nothing_to_keep_or_offload(key: str) -> None:
    plan = make_plan("symmetric", GRAPH, Cluster(1, 2), 1024)
    with pytest.raises(UserError, match="reward is none of actor, ref, critic"):
        replace(plan, **{key: ("reward",)}).check(GRAPH)


def test_evaluation_calls_a_function_where_training_does() -> None:
    plan = make_plan("separate", GRAPH, Cluster(1, 2), 1024)
    found = plan.evaluation(make_eval_graph(reward="reward.py:score"), GRAPH)
    assert found[NAME] == plan[NAME]
    own = plan.evaluation(make_eval_graph(reward="reward.py:score"), train_graph(minibatches=2))
    assert own[NAME] == function_placement(Mesh(0, 2))
    assert isinstance(own, Plan)
