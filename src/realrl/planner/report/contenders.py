"""Plans that the chosen one is compared with: presets, the fastest one found, and runners-up."""

from collections.abc import Mapping

from realrl.planner.report.report import CHOSEN, FASTEST, RUNNER_UP, Contender
from realrl.planner.search.plan_search import BestPlan
from realrl.planner.simulate.estimate import Estimate
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.uncertainty.preference import count_parts
from realrl.planner.uncertainty.ranking import StepSampler

_RUNNERS_UP = 2
_NEAR = 1.25
"""Step of a runner-up that is worth naming, relative to that of the chosen plan."""


def list_contenders(scenario: Scenario, best: BestPlan) -> dict[str, Contender]:
    """List the plans that fit, the fastest first, with interval and probability of being the fastest."""
    found = {CHOSEN: best.estimate}
    if best.fastest.plan != best.estimate.plan:
        found[FASTEST] = best.fastest
    found |= {name: e for name, e in best.presets.items() if isinstance(e, Estimate) and e.fits}
    for number, estimate in enumerate(_list_runners_up(best), 1):
        found[f"{RUNNER_UP} {number}"] = estimate
    return compare_contenders(scenario, found, best.sampler)


def compare_contenders(
    scenario: Scenario, found: Mapping[str, Estimate], sampler: StepSampler
) -> dict[str, Contender]:
    """Compare plans by name, the fastest first."""
    ordered = dict(sorted(found.items(), key=lambda item: item[1].step_seconds))
    return {
        name: Contender(
            name=name,
            estimate=ordered[name],
            outlook=outlook,
            parts=count_parts(scenario.graph, ordered[name].plan),
        )
        for name, outlook in sampler.compare(ordered).items()
    }


def _list_runners_up(best: BestPlan) -> list[Estimate]:
    """List the searched plans that are nearly as fast as the chosen one and have no other name."""
    named = (best.estimate.plan, best.fastest.plan)
    near = (e for e in best.searched if e.step_seconds <= _NEAR * best.estimate.step_seconds)
    others = [e for e in near if e.plan not in named]
    return sorted(others, key=lambda estimate: estimate.step_seconds)[:_RUNNERS_UP]
