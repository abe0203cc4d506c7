"""Other homes of what a plan trains, from which runs go on sooner after failures."""

from collections.abc import Mapping

import numpy as np

from realrl.plan.plan import Plan
from realrl.planner.reliability.goodput import predict_plan_goodput
from realrl.planner.search.many_plans import Timeline
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.space.problem import Assignment, Problem

_NEAREST = 8
"""Number of other candidates of a train call whose expected steps are computed: those with the shortest steps."""


def find_better_homes(scenario: Scenario, problem: Problem, assignment: Assignment) -> list[Plan]:
    """Find the plan that differs in the placement of one train call and has the shortest expected step.

    A search minimises the step without failures. How long checkpoints are written, and restarts take, depends on
    where the trained roles live. Nothing where the assignment's own expected step is the shortest, or no failures
    are expected.
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
    """List the assignments with other candidates of a call that fit, those with the shortest steps first."""
    names = [other.name for other in timeline.tables.calls]
    count = len(problem.candidates[call])
    plans = np.repeat([[assignment[name]] for name in names], count, axis=1)
    plans[names.index(call)] = np.arange(count)
    seconds, fill = timeline(plans)
    seconds[fill > 1] = np.inf
    seconds[assignment[call]] = np.inf
    order = np.argsort(seconds, kind="stable")[:_NEAREST]
    return [{**assignment, call: int(i)} for i in order if np.isfinite(seconds[i])]
