"""What `realrl plan` has to say: the plan that was found, how good it is, and what it was preferred to."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from realrl.config.errors import UserError
from realrl.config.units import format_bytes
from realrl.plan.plan import Plan
from realrl.plan.presets import PRESETS, make_plan
from realrl.planner.build import build_problem
from realrl.planner.estimate import Estimate
from realrl.planner.problem import Problem
from realrl.planner.report_alternatives import Alternative, alternatives, shortage_text
from realrl.planner.report_sizes import SizeReport
from realrl.planner.scenario import Scenario
from realrl.planner.search.search import SearchResult, search
from realrl.planner.search.shortage import DoesNotFit
from realrl.planner.simulate import estimate

Objective = Literal["time", "cost"]


@dataclass(frozen=True)
class Preset:
    """What a named preset would do."""

    estimate: Estimate | None
    refused: str | None
    """Why there is no such plan on this cluster, in one sentence; None where there is."""
    recompute: bool = False
    """Whether its training calls compute activations again, without which it would not fit; the recipe does not
    ask for it."""


@dataclass(frozen=True)
class PlanReport:
    """The result of planning."""

    scenario: Scenario
    chosen: Estimate
    lower_bound_seconds: float
    """No plan of the searched space has a shorter step."""
    gap: float
    """By which part of its seconds the plan can be from the best, at most."""
    search_seconds: float
    """With everything: candidates costed, search and proof."""
    evaluations: int
    """Plans costed."""
    options: Mapping[str, int]
    """Call -> ways to run it that were considered."""
    presets: Mapping[str, Preset]
    alternatives: tuple[Alternative, ...]
    """The nearest of those not chosen, a few for each call."""
    sizes: tuple[SizeReport, ...] = ()
    """The best plans on other numbers of nodes, and on this one, where they were asked for."""
    objective: Objective = "time"
    """By what the number of nodes was chosen."""
