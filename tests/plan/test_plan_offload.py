"""What a plan file says about host memory."""

from pathlib import Path

import pytest

from realrl.algorithms.policy import make_eval_graph
from realrl.algorithms.ppo import train_graph
from realrl.config.errors import UserError
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan

GRAPH = train_graph(minibatches=1)


def plan(offload: tuple[str, ...] = (), offload_optimizer: tuple[str, ...] = ()) -> Plan:
    place = Placement(Mesh(0, 1), Strategy())
    return Plan(Cluster(1, 1), {call.name: place for call in GRAPH.calls}, offload, offload_optimizer)


@pytest.mark.parametrize(
    "chosen", [plan(), plan(("ref", "reward")), plan((), ("actor",)), plan(("actor",), ("actor", "critic"))]
)
def test_offload_settings_round_trip_through_a_plan_file(tmp_path: Path, chosen: Plan) -> None:
    chosen.save(tmp_path / "plan.yaml", GRAPH)
    assert Plan.load(tmp_path / "plan.yaml", GRAPH) == chosen


def test_evaluation_offloads_only_roles_it_has() -> None:
    evaluation = plan(("critic", "ref"), ("actor", "critic")).evaluation(make_eval_graph(), GRAPH)
    assert (evaluation.offload, evaluation.offload_optimizer) == (("ref",), ("actor",))


@pytest.mark.parametrize(
    ("chosen", "sentence"),
    [
        (plan(("judge",)), "plan: offload: judge is not one of actor, reward, ref, critic"),
        (plan((), ("ref",)), "plan: offload_optimizer: ref is not one of actor, critic"),
    ],
)
def test_offloading_state_that_a_role_lacks_is_refused(chosen: Plan, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        chosen.check(GRAPH)
    assert str(caught.value) == sentence
