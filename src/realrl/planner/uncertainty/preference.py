"""Preference for simpler plans where predicted times cannot tell plans apart."""

from collections.abc import Iterable, Sequence

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


def choose_plan(graph: DataflowGraph, sampler: StepSampler, estimates: Sequence[Estimate]) -> Estimate:
    """Choose the plan with the shortest predicted step, unless a simpler one may well be as fast.

    That is the simplest one, by `count_parts`, whose predicted step is at most `MOST_LONGER` longer, and which is
    slower than the fastest plan with a probability below `CONVINCING`; of equally simple ones the fastest.
    """
    fastest = min(estimates, key=lambda estimate: estimate.step_seconds)
    return min(
        (fastest, *_list_rivals(sampler, fastest, estimates)),
        key=lambda estimate: (count_parts(graph, estimate.plan), estimate.step_seconds),
    )


def _list_rivals(sampler: StepSampler, fastest: Estimate, estimates: Iterable[Estimate]) -> list[Estimate]:
    """List plans that may well be as fast as the one that is predicted to be the fastest."""
    near = (e for e in estimates if e.step_seconds <= fastest.step_seconds * (1 + MOST_LONGER))
    return [e for e in near if sampler.probability_of(fastest.plan, e.plan) < CONVINCING]
