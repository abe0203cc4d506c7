"""Report of `realrl plan`: the plan, its optimality gap, presets and alternatives."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from realrl.plan.placement import Dtype, Placement
from realrl.plan.plan import Plan
from realrl.planner.simulate.estimate import Estimate, Outlook
from realrl.recipe.training import AsynchronyConfig

if TYPE_CHECKING:  # rendering a report needs no cost model and must not import numpy
    from realrl.planner.reliability.goodput import Goodput
    from realrl.planner.simulate.scenario import Scenario


_BEST = "proven to be the best by these times"


def format_gap(gap: float) -> str:
    """Format a gap as a percentage. It is rounded up, so that it claims no more than is proven."""
    return f"{math.ceil(1000 * gap) / 10:.1f} %"


def describe_gap(gap: float) -> str:
    """Describe how near to the best a plan is proven to be, as in `proven within 0.4 % of the best by these times`.

    The proof holds for predicted times, which measured times may contradict.
    """
    return f"proven within {format_gap(gap)} of the best by these times" if gap > 1e-9 else _BEST


Objective = Literal["time", "cost", "step", "budget"]
"""Objective of the choice of a number of nodes. `time`: the shortest step. `cost`: the cheapest step. `step`: the
cheapest cluster with a step that is short enough. `budget`: the shortest step within a budget."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Target for the choice of a cluster. Exactly one of the two fields is set."""

    step_seconds: float | None = None
    """Longest step that is short enough. The cluster with the least price per hour is chosen."""
    price_per_hour: float | None = None
    """Highest price per hour. The cluster with the shortest step is chosen."""


@dataclass(frozen=True)
class Preset:
    """Estimate of a preset, tuned in micro-batch size and recomputation."""

    estimate: Estimate | None
    refused: str | None
    """Error message if the preset is not possible on this cluster."""
    recompute: bool = False
    """Whether tuning added recomputation that the recipe does not ask for."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Plan that fits, with its interval and its probability of being the fastest."""

    name: str
    """`CHOSEN`, `FASTEST`, a preset or plan file, or `RUNNER_UP` with a number."""
    estimate: Estimate
    outlook: Outlook
    parts: int
    """Number of parts that make the plan complex (`count_parts`)."""


CHOSEN, FASTEST, RUNNER_UP = "this one", "fastest found", "runner-up"
"""Names of plans that are neither presets nor plan files."""


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Alternative placement of one call. All other calls are placed as in the chosen plan."""

    call: str
    placement: Placement
    offload: tuple[str, ...]
    """State offloaded to host memory, unlike in the chosen plan: `parameters`, `optimizer`."""
    step_seconds: float
    fits: bool
    reason: str
    """Reason against it, for example `3.1 s slower: generation 2.0 s, reallocation 1.1 s` or `device 0 needs
    93 GiB of 79 GiB during actor.train, 51 GiB of it activations`."""
    on_device: tuple[str, ...] = ()
    """State kept on devices that the chosen plan offloads: `parameters`, `optimizer`."""
    dtype: Dtype | None = None
    """Type of the call's parameters. None if the chosen plan has the same type."""
    keep: bool | None = None
    """Whether copies of the role's parameters in other layouts are kept between uses. None if this is as in the
    chosen plan."""
    function: bool = False
    """Whether the call is a function, which has no degree except dp, and no micro-batches."""


@dataclass(frozen=True, kw_only=True)
class SizeReport:
    """Best plan on a number of nodes."""

    cluster: str
    """Name of the cluster of these nodes."""
    kind: str
    """Device kind of the cluster's first node."""
    nodes: int
    devices: int
    estimate: Estimate | None
    gap: float | None
    """Relative optimality gap on these nodes. None if there is no plan."""
    refused: str | None
    """Error message if there is no plan, for example `needs 93 GiB of 79 GiB during actor.train, ...`."""
    price_per_hour: float | None
    """Price of these nodes per hour. None if prices are not given."""
    goodput: "Goodput | None" = None
    """Prediction of the run with its failures. None if there is no rate of failures, or no plan."""

    @property
    def plan(self) -> Plan | None:
        """Plan, if there is one."""
        return self.estimate.plan if self.estimate else None

    @property
    def step_seconds(self) -> float:
        """Seconds of one step, or expected seconds if there are failures. Infinite if there is no plan."""
        if self.goodput is not None:
            return self.goodput.step_seconds
        return self.estimate.step_seconds if self.estimate else math.inf

    @property
    def repeated_seconds(self) -> float:
        """Steady-state seconds per step, including the time that failures cost. Infinite if there is no plan."""
        if self.estimate is None:
            return math.inf
        return self.estimate.repeated_seconds / (self.goodput.share if self.goodput else 1.0)

    @property
    def device_hours(self) -> float:
        """Device-hours per step in steady state. Infinite if there is no plan."""
        return self.repeated_seconds * self.devices / 3600

    @property
    def price(self) -> float | None:
        """Price per step in steady state. None if there are no prices, and infinite if there is no plan."""
        if self.price_per_hour is None:
            return None
        return self.repeated_seconds / 3600 * self.price_per_hour if self.estimate else math.inf

    @property
    def cost(self) -> float:
        """Value of the objective `cost`: the price, or device-hours if prices are not given."""
        return self.device_hours if self.price is None else self.price


@dataclass(frozen=True, kw_only=True)
class StalenessReport:
    """Best plan under some settings of asynchrony."""

    settings: AsynchronyConfig
    estimate: Estimate | None
    """None if no plan fits."""
    gap: float
    """Relative optimality gap of the plan; infinite if there is none."""
    refused: str | None = None
    """Why no plan fits."""


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """Report of a planned step."""

    scenario: "Scenario"
    chosen: Estimate
    lower_bound_seconds: float
    """Lower bound on the step seconds of every plan of the search space."""
    gap: float
    """Relative optimality gap: upper bound on the avoidable fraction of the plan's seconds."""
    search_seconds: float
    """Seconds spent on presets, candidates, search and proof."""
    evaluations: int
    """Number of plans scored."""
    candidates: Mapping[str, int]
    """Number of candidates, by call."""
    presets: Mapping[str, Preset]
    contenders: Mapping[str, Contender]
    """The chosen plan and the plans that it was compared with, by name, the fastest first."""
    alternatives: tuple[Alternative, ...]
    """Nearest alternatives, a few for each call."""
    sizes: tuple[SizeReport, ...] = ()
    """Best plans on the requested numbers of nodes, including the number that this plan uses."""
    objective: Objective = "time"
    """Objective of the choice of the number of nodes."""
    staleness: tuple["StalenessReport", ...] = ()
    """Best plans under different settings of asynchrony, including those of this plan."""
    goodput: "Goodput | None" = None
    """Prediction of the run with its failures. None if there is no rate of failures."""
    expected_bound_seconds: float | None = None
    """Lower bound on the expected step seconds of every plan of the search space."""

    @property
    def expected_gap(self) -> float:
        """Relative optimality gap of the expected step. If there is no rate of failures, this is the gap of the
        step."""
        if self.goodput is None or self.expected_bound_seconds is None:
            return self.gap
        return max(0.0, 1 - self.expected_bound_seconds / self.goodput.step_seconds)

    @property
    def outlook(self) -> Outlook:
        """Outlook of the chosen plan."""
        return self.contenders[CHOSEN].outlook

    @property
    def given_up(self) -> Contender | None:
        """The plan with the fastest predicted step, if a simpler one was preferred."""
        return self.contenders.get(FASTEST)
