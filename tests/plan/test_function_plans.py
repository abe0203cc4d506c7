"""Where functions are placed, and what a plan cannot say of them."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from realrl.algorithms.policy import make_eval_graph
from realrl.algorithms.ppo import train_graph
from realrl.config.errors import UserError
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, function_placement
from realrl.plan.plan import Plan
from realrl.plan.presets import make_plan
from tests.rewards import function_reward

GRAPH = train_graph(minibatches=2, reward=function_reward("reward.py:score"))
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
    plan = make_plan("separate", GRAPH, Cluster(2, 4), 100)
    plan.save(tmp_path / "plan.yaml", GRAPH)
    assert yaml.safe_load((tmp_path / "plan.yaml").read_text())["calls"][NAME] == {"mesh": "4-7", "dp": 4}
    assert make_plan(str(tmp_path / "plan.yaml"), GRAPH, Cluster(2, 4), 999) == plan


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tp", 1),
        ("pp", 2),
        ("micro_batch_tokens", 8192),
        ("dtype", "bfloat16"),
        ("recompute", False),
        ("sequence_parallel", True),
    ],
)
def test_what_is_for_models_is_refused_for_a_function(tmp_path: Path, field: str, value: object) -> None:
    """Also what would change nothing, such as tp=1, which earlier versions wrote."""
    make_plan("symmetric", GRAPH, Cluster(1, 2), 1024).save(tmp_path / "plan.yaml", GRAPH)
    content = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    content["calls"][NAME][field] = value
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(UserError) as caught:
        Plan.load(tmp_path / "plan.yaml", GRAPH)
    assert str(caught.value) == (
        f"plan file {tmp_path}/plan.yaml: {NAME}: {field} is for calls of models; {NAME} is a function"
        " and has only mesh and dp; leave it out"
    )


@pytest.mark.parametrize("key", ["offload", "keep"])
def test_a_function_has_nothing_to_keep_or_offload(key: str) -> None:
    plan = make_plan("symmetric", GRAPH, Cluster(1, 2), 1024)
    with pytest.raises(UserError, match="reward is not one of actor, ref, critic"):
        replace(plan, **{key: ("reward",)}).check(GRAPH)


def test_evaluation_calls_a_function_where_training_does() -> None:
    plan = make_plan("separate", GRAPH, Cluster(1, 2), 1024)
    found = plan.evaluation(make_eval_graph(reward=function_reward("reward.py:score")), GRAPH)
    assert found[NAME] == plan[NAME]
    own = plan.evaluation(
        make_eval_graph(reward=function_reward("reward.py:score")), train_graph(minibatches=2)
    )
    assert own[NAME] == function_placement(Mesh(0, 2))
    assert isinstance(own, Plan)
