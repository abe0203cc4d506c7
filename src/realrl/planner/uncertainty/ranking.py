"""Intervals of predicted steps, and the probability of each of several plans that it is the fastest."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from realrl.plan.plan import Plan
from realrl.planner.simulate.estimate import Estimate
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.simulate.simulator import Samples
from realrl.planner.uncertainty.draws import Draws
from realrl.planner.uncertainty.outlook import LEVEL, Interval, Outlook
from realrl.planner.uncertainty.sampled_steps import StepSamples, sample_step


class StepSampler:
    """Samples of steps under several plans of a scenario, with the same errors for all of them."""

    def __init__(self, scenario: Scenario, seed: int = 0) -> None:
        self._scenario = scenario
        self._draws = Draws(seed)
        self._known: list[tuple[Plan, StepSamples]] = []

    def __call__(self, plan: Plan) -> StepSamples:
        """Sample the seconds of a step."""
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
        """Find interval and probability of each of several plans, by name; equal plans count as one."""
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
    """Find the quantiles of samples between which `LEVEL` of them lie."""
    low, high = np.quantile(samples, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high))


def _share_first_places(steps: Sequence[Samples]) -> list[float]:
    seconds = np.array(steps)
    first: NDArray[np.bool_] = seconds == seconds.min(axis=0)
    return [float(share) for share in (first / first.sum(axis=0)).mean(axis=1)]
