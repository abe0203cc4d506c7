"""Steps in which devices are slower than they should be: one that always is, or all of them by chance."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from realrl.plan.plan import Plan
from realrl.planner.simulate.durations import Durations
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.simulate.simulator import Simulation, simulate
from realrl.program.instructions import Instruction, Run
from realrl.program.lower import home_placements, kept_copies, lower

_DEVICE = frozenset({"compute", "decode", "optimizer", "bubble", "launch"})
"""Terms of a call that last as long as its slowest device makes them."""


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """Devices that are slower than predicted."""

    slow: Mapping[int, float] = field(default_factory=dict)
    """Factor on what a rank computes, by rank."""
    jitter: float = 0.0
    """Standard deviation of the logarithm of such a factor with mean 1, of each rank in each call."""

    def factor(self, call: Run) -> float:
        """Compute the factor on what the devices of a call compute: all wait for the slowest of them."""
        ranks = call.placement.ranks
        slowest = max((self.slow.get(rank, 1.0) for rank in ranks), default=1.0) if self.slow else 1.0
        return slowest * expect_largest(self.jitter, len(ranks))


def expect_largest(jitter: float, count: int) -> float:
    """Compute the mean of the largest of `count` log-normal factors with mean 1 each.

    By quadrature over the largest of as many normal variables, which is about sqrt(2 ln count) where they are many.
    """
    if jitter == 0 or count == 1:
        return 1.0
    z = np.linspace(-9.0, 12.0, 42_001)
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    step = z[1] - z[0]
    below = np.clip(np.cumsum(density) * step - density * step / 2, 0.0, 1.0)
    return float((count * density * below ** (count - 1) * np.exp(jitter * z - jitter**2 / 2)).sum() * step)


def simulate_stragglers(scenario: Scenario, plan: Plan, stragglers: Stragglers) -> Simulation:
    """Simulate steps of a plan with slow devices: what they compute, not what they send, takes longer."""
    graph = scenario.graph
    homes = home_placements(graph, plan)
    durations = Durations(scenario, plan)
    programs = lower(graph, plan, homes, kept_copies(graph, plan, homes), scenario.parts)
    return simulate(programs, _slow_down(durations, stragglers), reporting=durations.reporting)


def _slow_down(durations: Durations, stragglers: Stragglers) -> Callable[[Instruction], float]:
    def seconds(instruction: Instruction) -> float:
        if not isinstance(instruction, Run):
            return durations(instruction)
        terms = durations.terms(instruction.call)
        factor = stragglers.factor(instruction)
        return sum(factor * s if name in _DEVICE else s for name, s in terms.items())

    return seconds
