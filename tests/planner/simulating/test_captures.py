"""Graphs of decode steps are captured in each step only if parameters have moved since the one before."""

from dataclasses import replace

import pytest

from realrl.algorithms.policy import make_eval_graph
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.planner.simulate.durations import Durations
from tests.planner.simulating.test_estimate import scenario

HOME = Placement(Mesh(0, 2), Strategy(dp=2))
STAGES = Placement(Mesh(0, 2), Strategy(pp=2))
TENSOR = Placement(Mesh(0, 2), Strategy(tp=2))


@pytest.mark.parametrize(
    ("generates", "offload", "keep", "captures"),
    [
        (HOME, (), (), False),
        (HOME, ("critic",), (), False),
        (HOME, ("actor",), (), True),
        (STAGES, (), (), True),
        (STAGES, (), ("actor",), False),
        (STAGES, ("actor",), ("actor",), False),
        (TENSOR, (), ("actor",), True),
    ],
)
def test_graphs_are_captured_again_if_parameters_move(
    generates: Placement, offload: tuple[str, ...], keep: tuple[str, ...], captures: bool
) -> None:
    of = scenario("h100:1x2")
    places = {call.name: HOME for call in of.graph.calls} | {"actor.generate": generates}
    plan = Plan(of.spec.cluster, places, offload=offload, keep=keep)
    cost = of.call_cost(of.graph.call("actor.generate"), generates)
    spared = 0.0 if captures else cost.captures
    found = Durations(of, plan).terms("actor.generate")
    assert found == {**cost.terms, "launch": cost.terms["launch"] - spared}
    assert spared > 0 or captures
    assert found["launch"] >= 0


def test_evaluations_capture_graphs_again() -> None:
    trained = scenario("h100:1x2")
    of = replace(trained, graph=make_eval_graph())
    plan = Plan(of.spec.cluster, {call.name: HOME for call in of.graph.calls})
    (call,) = [call for call in of.graph.calls if call.name.endswith("generate")]
    assert of.call_cost(call, HOME).captures > 0
    assert Durations(of, plan).terms(call.name) == of.call_cost(call, HOME).terms
