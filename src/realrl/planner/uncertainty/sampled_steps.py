"""Samples of a step's seconds: its programs simulated with sampled errors of every duration."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from realrl.dataflow.call import Call
from realrl.plan.placement import Placement, Strategy
from realrl.plan.plan import Plan
from realrl.planner.simulate.durations import Durations
from realrl.planner.simulate.estimator import list_steps
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.simulate.simulator import SETTLED, Samples, simulate_samples
from realrl.planner.uncertainty.draws import Draws
from realrl.planner.uncertainty.sources import CallErrors, find_call_errors
from realrl.planner.uncertainty.spreads import MOVES
from realrl.program.instructions import Instruction, Load, Offload, Reallocate, Receive, Run

_BUBBLE = "bubble"
_OF_LAYOUT = 0.8
"""Share of the variance of a call's own error that strategies with equal degrees have in common."""


@dataclass(frozen=True)
class StepSamples:
    """Samples of a step's seconds, [samples]."""

    step: Samples
    """Of one isolated step."""
    repeated: Samples
    """Per step in steady state."""


def sample_step(scenario: Scenario, plan: Plan, draws: Draws) -> StepSamples:
    """Sample the seconds of a step under a plan; without errors they are those of `estimate_plan`."""
    durations = SampledDurations(scenario, plan, draws)
    step, repeated = np.zeros(draws.count), np.zeros(draws.count)
    for number, kind in enumerate(list_steps(scenario, plan)):
        ends = simulate_samples(kind.programs, durations, draws.count, reporting=durations.reporting)
        if number == 0:
            step = ends[0]
        repeated += kind.share * (ends[-1] - ends[SETTLED - 1]) / (len(ends) - SETTLED)
    return StepSamples(step, repeated)


class SampledDurations:
    """Samples of the duration of each instruction.

    Errors are shared as far as they have one cause: by all that a kind of device does, by a term of all calls, by
    one call under one strategy; the same draws for several plans give each of them the same errors. What overlaps
    inside a call is taken to be as long as predicted.
    """

    def __init__(self, scenario: Scenario, plan: Plan, draws: Draws) -> None:
        self._scenario = scenario
        self._plan = plan
        self._draws = draws
        self._predicted = Durations(scenario, plan)

    def __call__(self, instruction: Instruction) -> Samples:
        """Sample the seconds of an instruction."""
        match instruction:
            case Run(name):
                return self._call(self._scenario.graph.call(name), self._plan[name])
            case Reallocate():
                return self._move("reallocation", instruction)
            case Load() | Offload():
                return self._move("copies", instruction)
            case Receive():
                return self._move("exchange", instruction)
            case _:
                return np.full(self._draws.count, self._predicted(instruction))

    @property
    def reporting(self) -> float:
        """Seconds between two steps in which the writer takes the times of all ranks."""
        return self._predicted.reporting

    def _move(self, kind: str, instruction: Instruction) -> Samples:
        return self._predicted(instruction) * self._draws.sample_factor(MOVES[kind], kind)

    def _call(self, call: Call, placement: Placement) -> Samples:
        """Sample the seconds of a call."""
        errors = find_call_errors(self._scenario, call, placement)
        device = self._scenario.spec.device(placement.mesh.first).name
        terms = self._predicted.terms(call.name)
        return sample_call(self._draws, terms, errors, call.name, device, placement.strategy)


def sample_call(
    draws: Draws, terms: Mapping[str, float], errors: CallErrors, call: str, device: str, strategy: Strategy
) -> Samples:
    """Sample the seconds of a call, of which the `terms` are predicted."""
    spread = errors.spread
    layout = (call, device, strategy.degrees)
    seconds = np.zeros(draws.count)
    for name, predicted in terms.items():
        if name != _BUBBLE:
            residual = errors.residuals.get(name, 0.0)
            factor = draws.sample_factor(spread.term(name), "term", name, device, errors.source)
            seconds += predicted * factor * draws.sample_factor(residual, "residual", name, *layout)
    bubble = terms.get(_BUBBLE, 0.0)
    if bubble:
        # Stages wait for what the other terms take.
        seconds *= 1 + bubble / (sum(terms.values()) - bubble)
    common, own = (spread.call * math.sqrt(share) for share in (_OF_LAYOUT, 1 - _OF_LAYOUT))
    seconds *= draws.sample_factor(common, "call", *layout)
    seconds *= draws.sample_factor(own, "strategy", call, device, strategy)
    return seconds * draws.sample_factor(spread.machine, "machine", device)
