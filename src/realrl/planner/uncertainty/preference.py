"""Preference for simpler plans where predicted times cannot tell plans apart."""

import math
from collections.abc import Callable, Sequence

from realrl.dataflow.graph import DataflowGraph
from realrl.plan.plan import Plan
from realrl.planner.simulate.estimate import Estimate
from realrl.planner.uncertainty.outlook import CONVINCING
from realrl.planner.uncertainty.ranking import StepSampler
from realrl.program.lower import home_placements, kept_copies

MOST_LONGER = 0.02
"""Largest fraction by which the predicted step of a simpler plan that is preferred may be longer."""


def count_parts(graph: DataflowGraph, plan: Plan) -> int:
    """Count what makes a plan complex: layouts, calls away from the home of their role, copies and offloaded state.

    A plan that runs all calls under one strategy on the same devices, and moves nothing, has one part.
    """
    homes = home_placements(graph, plan)
    calls = [call for call in graph.calls if call.role is not None]
    layouts = {plan[call.name].layout for call in calls}
    away = sum(plan[call.name].layout != homes[call.model_role].layout for call in calls)
    copies = sum(map(len, kept_copies(graph, plan, homes).values()))
    return len(layouts) + away + copies + len(plan.offload) + len(plan.offload_optimizer)


def choose_plan(
    graph: DataflowGraph,
    sampler: StepSampler,
    estimates: Sequence[Estimate],
    objective: Callable[[Estimate], float],
    longest: float = math.inf,
) -> Estimate:
    """Choose the best plan by an objective in seconds, unless a simpler one may well be as fast.

    That is the simplest one, by `count_parts`, whose predicted seconds are at most `MOST_LONGER` longer, and whose
    step is longer than that of the best one with a probability below `CONVINCING`; of equally simple ones the best.
    One that takes more than `longest` seconds is not preferred.
    """
    best = min(estimates, key=objective)
    most = min(longest, objective(best) * (1 + MOST_LONGER))
    near = (e for e in estimates if objective(e) <= most)
    rivals = [e for e in near if sampler.probability_of(best.plan, e.plan) < CONVINCING]
    return min((best, *rivals), key=lambda estimate: (count_parts(graph, estimate.plan), objective(estimate)))
