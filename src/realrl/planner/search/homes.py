"""Other homes of trained roles, with which a run loses less time to checkpoints and failures."""

from collections.abc import Mapping

import numpy as np

from realrl.plan.plan import Plan
from realrl.planner.reliability.goodput import predict_plan_goodput
from realrl.planner.search.many_plans import Timeline
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.space.problem import Assignment, Problem

_NEAREST = 8
"""Number of other candidates per train call whose expected step is computed; they have the shortest steps."""


def find_better_homes(scenario: Scenario, problem: Problem, assignment: Assignment) -> list[Plan]:
    """Find the plan with the shortest expected step among plans that differ in one train call.

    A search minimises the step without failures. The placement of the trained roles also decides how long writing
    checkpoints and restarting takes. The list is empty if the assignment itself has the shortest expected step, or
    if the scenario has no failures.
    """
    failures = scenario.failures
    if failures is None:
        return []
    timeline = Timeline(problem)

    def expect(choice: Assignment) -> float:
        found = timeline.evaluate(choice)
        return predict_plan_goodput(
            scenario, failures, problem.plan(choice), found.seconds, found.start
        ).step_seconds

    others = [
        choice
        for role in problem.graph.roles
        if problem.graph.trained(role)
        for choice in _list_nearest(problem, timeline, assignment, problem.home(role).name)
    ]
    best = min([assignment, *others], key=expect)
    return [] if best is assignment else [problem.plan(best)]


def _list_nearest(
    problem: Problem, timeline: Timeline, assignment: Assignment, call: str
) -> list[Mapping[str, int]]:
    """List assignments that fit and differ only in the candidate of `call`, the shortest steps first."""
    names = [other.name for other in timeline.tables.calls]
    count = len(problem.candidates[call])
    plans = np.repeat([[assignment[name]] for name in names], count, axis=1)
    plans[names.index(call)] = np.arange(count)
    seconds, fill = timeline(plans)
    seconds[fill > 1] = np.inf
    seconds[assignment[call]] = np.inf
    order = np.argsort(seconds, kind="stable")[:_NEAREST]
    return [{**assignment, call: int(i)} for i in order if np.isfinite(seconds[i])]
