"""What `realrl plan` has to say: the plan that was found, how good it is, and what it was preferred to."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from realrl.plan.placement import Placement
from realrl.plan.plan import Plan
from realrl.planner.simulate.estimate import Estimate

if TYPE_CHECKING:  # what people see is made without the arrays of cost models
    from realrl.planner.simulate.scenario import Scenario

Objective = Literal["time", "cost"]


@dataclass(frozen=True)
class Preset:
    """What a named preset would do, with the micro-batches and recomputation that suit it best."""

    estimate: Estimate | None
    refused: str | None
    """Why there is no such plan on this cluster, in one sentence; None where there is."""
    recompute: bool = False
    """Whether training calls compute activations again, which the recipe does not ask for."""


@dataclass(frozen=True)
class Alternative:
    """Another way to run one call, everything else as in the chosen plan."""

    call: str
    placement: Placement
    offload: tuple[str, ...]
    """What it would keep in host memory besides what the chosen plan does: `parameters`, `optimizer`."""
    step_seconds: float
    fits: bool
    reason: str
    """Why it was not chosen, for example `3.1 s slower: generation 2.0 s, reallocation 1.1 s` or `needs 93 GiB of
    79 GiB in actor.train, most of it activations`."""
    on_device: tuple[str, ...] = ()
    """What it would keep on devices, that the chosen plan keeps in host memory; the same words."""
    function: bool = False
    """Whether the call is a function, which has neither degrees but dp, nor micro-batches."""


@dataclass(frozen=True)
class SizeReport:
    """The best plan that was found on some number of nodes."""

    nodes: int
    devices: int
    estimate: Estimate | None
    gap: float | None
    """By which part of its seconds the plan can be from the best on these nodes, at most."""
    refused: str | None
    """Why there is no plan, for example `needs 93 GiB of 79 GiB during actor.train, ...`; None where there is."""
    price_per_hour: float | None
    """Of these nodes; None where prices are not given."""

    @property
    def plan(self) -> Plan | None:
        """The plan, if there is one."""
        return self.estimate.plan if self.estimate else None

    @property
    def step_seconds(self) -> float:
        """Of one step; infinite if there is no plan."""
        return self.estimate.step_seconds if self.estimate else math.inf

    @property
    def device_hours(self) -> float:
        """Of one step among many; infinite if there is no plan."""
        return self.estimate.repeated_seconds * self.devices / 3600 if self.estimate else math.inf

    @property
    def price(self) -> float | None:
        """Of one step among many; None where prices are not given, infinite if there is no plan."""
        if self.price_per_hour is None:
            return None
        return self.estimate.repeated_seconds / 3600 * self.price_per_hour if self.estimate else math.inf

    @property
    def cost(self) -> float:
        """What the objective `cost` is about: the price, or device-hours where prices are not given."""
        return self.device_hours if self.price is None else self.price


@dataclass(frozen=True)
class PlanReport:
    """The result of planning."""

    scenario: "Scenario"
    chosen: Estimate
    lower_bound_seconds: float
    """No plan of the searched space has a shorter step."""
    gap: float
    """By which part of its seconds the plan can be from the best, at most."""
    search_seconds: float
    """With everything: candidates costed, search and proof."""
    evaluations: int
    """Plans costed."""
    candidates: Mapping[str, int]
    """Call -> ways to run it that were considered."""
    presets: Mapping[str, Preset]
    alternatives: tuple[Alternative, ...]
    """The nearest of those not chosen, a few for each call."""
    sizes: tuple[SizeReport, ...] = ()
    """The best plans on other numbers of nodes, and on this one, where they were asked for."""
    objective: Objective = "time"
    """By what the number of nodes was chosen."""
