"""Samples of a step's seconds, from simulations of its programs with sampled errors of every duration."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from math import hypot
from typing import Literal

import numpy as np

from realrl.dataflow.call import Call
from realrl.plan.placement import Placement, Strategy
from realrl.plan.plan import Plan
from realrl.planner.operators.tables import TABULATED, read_tables
from realrl.planner.profile.corrections import find_nearest
from realrl.planner.profile.profile import SweepSpread
from realrl.planner.simulate.durations import Durations
from realrl.planner.simulate.estimator import list_steps
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.simulate.simulator import SETTLED, Samples, simulate_samples
from realrl.program.instructions import Instruction, Load, Offload, Reallocate, Receive, Run

SAMPLES = 1000
"""Number of samples of a step. Their 5 % and 95 % quantiles scatter by about 1/15 of a standard deviation."""


class Draws:
    """Samples of independent errors. Each error has a name, and equal names give equal samples."""

    def __init__(self, seed: int = 0, count: int = SAMPLES) -> None:
        self.seed = seed
        self.count = count
        self._known: dict[tuple[object, ...], Samples] = {}

    def sample_factor(self, spread: float, *about: object) -> Samples:
        """Sample the ratio of measured to predicted seconds, [samples]. It is log-normal with median 1.

        `spread`: standard deviation of the logarithm. `about`: name of the error. Samples do not depend on which
        errors were sampled before.
        """
        if about not in self._known:
            digest = sha256(repr((self.seed, *about)).encode()).digest()
            generator = np.random.default_rng(int.from_bytes(digest[:8]))
            self._known[about] = generator.standard_normal(self.count)
        return np.exp(spread * self._known[about])


TimeSource = Literal["run", "profile", "tables", "data sheet"]
"""Source of a call's time. `run`: a run measured the call itself under the same strategy. `profile`: a profile.
`tables`: tables of measured operators. `data sheet`: formulas with figures of data sheets."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Sizes of the errors of calls (standard deviations of logarithms), by their common cause."""

    machine: float
    """Error of all work on one kind of device. It scales steps, but hardly changes the order of plans."""
    call: float
    """Error of one call under one strategy."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """Error of a term in all calls on devices of a kind."""
    other_terms: float = 0.0
    """Error of each term that `terms` does not name. Bubbles have no error of their own, because they scale with
    the other terms."""

    def term(self, name: str) -> float:
        return self.terms.get(name, self.other_terms)


SPREADS: Mapping[TimeSource, Spread] = {
    # A later run on another day differs by the error of the machine. A measured call has only the error of its
    # median.
    "run": Spread(machine=0.06, call=0.04),
    # On CPUs, ranks share cores and memory, which slows collectives most. On GPUs, nothing has been compared.
    "profile": Spread(
        machine=0.10,
        call=0.06,
        terms={"tensor": 0.25, "context": 0.25, "experts": 0.3, "data": 0.2, "pipeline": 0.2, "launch": 0.2},
        other_terms=0.04,
    ),
    # An engine may be slower than the operators in a table. It has other attention kernels than vLLM, clocks drop
    # under sustained load, and work is spread unevenly. Published training on H100 takes 11 to 32 % longer than
    # predicted. Published decoding on A100 takes between 5 % less and 10 % more (`bench/published_rows.py`). Times
    # of streaming kernels, host and network come from data sheets. Residuals of the tables on held-out rows, of 3
    # to 7 %, are added for each call.
    "tables": Spread(
        machine=0.18,
        call=0.08,
        terms={
            "compute": 0.08,
            "decode": 0.12,
            "tensor": 0.15,
            "context": 0.15,
            "experts": 0.3,
            "launch": 0.4,
        },
        other_terms=0.2,
    ),
    # The sources of `Efficiency` allow 0.65 to 0.8 of the peak for products, 0.3 to 0.6 for attention, and 0.77 to
    # 0.88 of a link. Only a measurement shows how long a host takes to launch kernels, or how long ranks wait for
    # each other.
    "data sheet": Spread(
        machine=0.2,
        call=0.1,
        terms={"compute": 0.15, "launch": 0.4, "tensor": 0.3, "context": 0.3, "experts": 0.3},
        other_terms=0.2,
    ),
}
"""Errors by source. The errors of tables and data sheets are judgements."""

FUNCTION = Spread(machine=0.0, call=0.15)
"""Errors of functions on the host, whose times runs have measured."""

MOVES: Mapping[str, float] = {"reallocation": 0.4, "exchange": 0.4, "copies": 0.2}
"""Errors of moves between calls, whose times come from the bandwidths of links. These errors are judgements. Copies
between device and host use PCIe, which varies less."""

_KINDS = {Reallocate: "reallocation", Receive: "exchange", Load: "copies", Offload: "copies"}

TABLES_OF_TERMS: Mapping[str, str] = {
    "compute": "product",
    "decode": "decode",
    "tensor": "all_reduce",
    "context": "all_gather",
    "data": "reduce_scatter",
}
"""Term -> table of operators whose residual is the error of this term in each call."""


_TRANSFERS = ("tensor", "context", "experts", "data", "pipeline")
"""Terms of communication."""


@dataclass(frozen=True)
class CallErrors:
    """Source of a call's time, and the sizes of its errors."""

    source: TimeSource
    spread: Spread
    residuals: Mapping[str, float] = field(default_factory=dict)
    """Error of each term in this call alone, which is the residual of the term's table."""


def find_call_errors(scenario: Scenario, call: Call, placement: Placement) -> CallErrors:
    """Find the source of a call's time, and the sizes of its errors."""
    device = scenario.spec.device(placement.mesh.first)
    profile = scenario.cost.profile
    profile = profile if profile is not None and profile.device == device.name else None
    model = scenario.model(call)
    if model is None:
        return CallErrors("run", FUNCTION)
    nearest = None
    if profile is not None:
        nearest = find_nearest(profile.corrections, call, model, placement.strategy)
        if nearest is not None and nearest.distance == 0:
            return CallErrors("run", SPREADS["run"])
    dtype = model.dtype_under(placement.strategy)
    if profile is not None and placement.strategy.tp in profile.degrees(model.shape, dtype):
        found = CallErrors("profile", widen(SPREADS["profile"], profile.sweeps))
    elif device.measured is not None and dtype == TABULATED:
        found = CallErrors("tables", SPREADS["tables"], read_residuals(device.measured))
    else:
        found = CallErrors("data sheet", SPREADS["data sheet"])
    if nearest is None:
        return found
    # The run measured other strategies, so only its error of the machine replaces an error of the other source.
    return replace(found, spread=replace(found.spread, machine=SPREADS["run"].machine))


def widen(spread: Spread, sweeps: SweepSpread | None) -> Spread:
    """Add the differences between the sweeps of a profile to the errors, because runs will differ as much as
    sweeps."""
    if sweeps is None:
        return spread
    terms = {name: hypot(spread.term(name), sweeps.transfers) for name in _TRANSFERS}
    return replace(spread, machine=hypot(spread.machine, sweeps.layers), terms={**spread.terms, **terms})


@lru_cache
def read_residuals(tables: str) -> Mapping[str, float]:
    """Read the residuals of tables of operators on held-out rows, by term."""
    spread = read_tables(tables)["spread"]
    return {term: float(spread[table]) for term, table in TABLES_OF_TERMS.items()}


_BUBBLE = "bubble"
_OF_LAYOUT = 0.8
"""Share of the variance of a call's own error that strategies with equal degrees have in common."""


@dataclass(frozen=True)
class StepSamples:
    """Samples of a step's seconds, [samples]."""

    step: Samples
    """Seconds of one isolated step."""
    repeated: Samples
    """Seconds per step in steady state."""


def sample_step(scenario: Scenario, plan: Plan, draws: Draws) -> StepSamples:
    """Sample the seconds of a step under a plan. Without errors, they equal the times of `estimate_plan`."""
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

    Instructions share an error if it has one cause: a kind of device, a term of all calls, or one call under one
    strategy. Plans that use the same draws have the same errors. Overlap inside a call is assumed to be as
    predicted.
    """

    def __init__(self, scenario: Scenario, plan: Plan, draws: Draws) -> None:
        self._scenario = scenario
        self._plan = plan
        self._draws = draws
        self._predicted = Durations(scenario, plan)

    def __call__(self, instruction: Instruction) -> Samples:
        if isinstance(instruction, Run):
            return self._call(instruction)
        seconds = np.full(self._draws.count, self._predicted(instruction))
        kind = _KINDS.get(type(instruction))
        return seconds if kind is None else seconds * self._draws.sample_factor(MOVES[kind], kind)

    @property
    def reporting(self) -> float:
        """Seconds that the writing rank needs between two steps to receive the times of all ranks."""
        return self._predicted.reporting

    def _call(self, run: Run) -> Samples:
        call, placement = self._scenario.graph.call(run.call), self._plan[run.call]
        errors = find_call_errors(self._scenario, call, placement)
        device = self._scenario.spec.device(placement.mesh.first).name
        terms = self._predicted.terms(run.call, run.portion)
        return sample_call(self._draws, terms, errors, call.name, device, placement.strategy)


def sample_call(
    draws: Draws, terms: Mapping[str, float], errors: CallErrors, call: str, device: str, strategy: Strategy
) -> Samples:
    """Sample the seconds of a call, [samples]. `terms`: its predicted seconds by term."""
    spread = errors.spread
    layout = (call, device, strategy.all_degrees)
    seconds = np.zeros(draws.count)
    for name, predicted in terms.items():
        if name != _BUBBLE:
            residual = errors.residuals.get(name, 0.0)
            factor = draws.sample_factor(spread.term(name), "term", name, device, errors.source)
            seconds += predicted * factor * draws.sample_factor(residual, "residual", name, *layout)
    bubble = terms.get(_BUBBLE, 0.0)
    if bubble:
        # Stages wait for each other's work, so the bubble keeps its ratio to the other terms.
        seconds *= 1 + bubble / (sum(terms.values()) - bubble)
    common, own = (spread.call * math.sqrt(share) for share in (_OF_LAYOUT, 1 - _OF_LAYOUT))
    seconds *= draws.sample_factor(common, "call", *layout)
    seconds *= draws.sample_factor(own, "strategy", call, device, strategy)
    return seconds * draws.sample_factor(spread.machine, "machine", device)
