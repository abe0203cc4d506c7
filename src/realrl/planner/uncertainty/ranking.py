"""Intervals of predicted steps, and the probability of each of several plans that it is the fastest."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from realrl.dataflow.graph import DataflowGraph
from realrl.plan.plan import Plan
from realrl.planner.simulate.estimate import CONVINCING, LEVEL, Estimate, Interval, Outlook
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.simulate.simulator import Samples
from realrl.planner.uncertainty.sampled_steps import Draws, StepSamples, sample_step
from realrl.program.lower import home_placements, kept_copies

_TIE = 1e-3
"""Relative difference in seconds that no measurement shows. Plans that differ only off the critical path differ by
so little."""


class StepSampler:
    """Samples of steps under several plans of a scenario, with the same errors for all of them."""

    def __init__(self, scenario: Scenario, seed: int = 0) -> None:
        self._scenario = scenario
        self._draws = Draws(seed)
        self._known: list[tuple[Plan, StepSamples]] = []

    def __call__(self, plan: Plan) -> StepSamples:
        for other, samples in self._known:
            if other == plan:
                return samples
        samples = sample_step(self._scenario, plan, self._draws)
        self._known.append((plan, samples))
        return samples

    def probability_of(self, plan: Plan, other: Plan) -> float:
        """Estimate the probability that a step under `plan` is shorter than under `other`."""
        return float(np.mean(self(plan).step < self(other).step))

    def compare(self, estimates: Mapping[str, Estimate]) -> dict[str, Outlook]:
        """Find the interval of each plan's step, and its probability of being the fastest, by name. Equal plans
        count as one."""
        distinct: list[Plan] = []
        for estimate in estimates.values():
            if estimate.plan not in distinct:
                distinct.append(estimate.plan)
        shares = _share_first_places([self(plan).step for plan in distinct])
        return {
            name: Outlook(
                find_interval(self(estimate.plan).step),
                find_interval(self(estimate.plan).repeated),
                shares[distinct.index(estimate.plan)],
            )
            for name, estimate in estimates.items()
        }


def find_interval(samples: Samples) -> Interval:
    """Find the central interval that contains the fraction `LEVEL` of the samples."""
    low, high = np.quantile(samples, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high))


def _share_first_places(steps: Sequence[Samples]) -> list[float]:
    """Find the share of samples in which each plan is the fastest. Plans within `_TIE` of the fastest share the
    first place."""
    seconds = np.array(steps)
    first: NDArray[np.bool_] = seconds <= (1 + _TIE) * seconds.min(axis=0)
    return [float(share) for share in (first / first.sum(axis=0)).mean(axis=1)]


MOST_LONGER = 0.02
"""A simpler plan may be preferred if its predicted step is at most this fraction longer."""


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
    """Choose the best plan by an objective in seconds, unless a simpler plan may well be as fast.

    A rival is at most `MOST_LONGER` slower than the best plan, takes at most `longest` seconds, and is slower with
    a probability below `CONVINCING`. Among the best plan and its rivals, the simplest by `count_parts` is chosen,
    and among equally simple plans the fastest.
    """
    best = min(estimates, key=objective)
    most = min(longest, objective(best) * (1 + MOST_LONGER))
    near = (e for e in estimates if objective(e) <= most)
    rivals = [e for e in near if sampler.probability_of(best.plan, e.plan) < CONVINCING]
    return min((best, *rivals), key=lambda estimate: (count_parts(graph, estimate.plan), objective(estimate)))
