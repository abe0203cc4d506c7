"""Planning of a step, with a report on the plan and its alternatives."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from realrl.config.errors import UserError
from realrl.planner.reliability.goodput import bound_expected_seconds, predict_goodput
from realrl.planner.report.alternatives import find_alternatives
from realrl.planner.report.node_counts import Wanted, choose_cluster, compare_sizes, make_size_report
from realrl.planner.report.report import (
    CHOSEN,
    FASTEST,
    RUNNER_UP,
    Contender,
    Objective,
    PlanReport,
    Preset,
    SizeReport,
)
from realrl.planner.search.plan_search import BestPlan, UserConstraints, find_best_plan
from realrl.planner.search.search import DEFAULT_EFFORT
from realrl.planner.simulate.estimate import Estimate
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.uncertainty.ranking import StepSampler, count_parts

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


def make_report(
    scenario: Scenario,
    *,
    effort: float | None = None,
    seed: int = 0,
    constraints: UserConstraints | None = None,
    nodes: Sequence[int] = (),
    objective: Objective = "time",
    wanted: Wanted | None = None,
) -> PlanReport:
    """Plan a step and compare the plan with presets, alternatives, and other numbers of nodes.

    `nodes` are numbers of nodes to choose from by `objective`; each means the first nodes of the cluster. Without
    `nodes`, `time` plans for the whole cluster, and `cost` for the number of nodes that makes a step cheapest.
    `effort` limits the search on the chosen nodes. A search on each of `nodes` before it has the same limit; under
    `cost` without `nodes`, the searches on all numbers of nodes share it. With `wanted`, `choose_cluster` chooses
    the cluster. Raises DoesNotFit if no plan fits, and UserError if a call cannot run on the cluster at all.
    """
    constraints = constraints or UserConstraints()
    effort = DEFAULT_EFFORT if effort is None else effort
    rows: tuple[SizeReport, ...] = ()
    start, longest = None, math.inf
    if wanted is not None:
        spec, rows = choose_cluster(scenario, wanted, constraints, effort=effort, seed=seed)
        scenario = scenario.on(spec)
        start = next(row.plan for row in rows if row.cluster == spec.name)
        longest = math.inf if wanted.step_seconds is None else wanted.step_seconds
        objective = "step" if wanted.price_per_hour is None else "budget"
    elif nodes or objective != "time":
        counts = sorted(set(nodes)) or range(1, scenario.spec.nodes + 1)
        scenario = scenario.on(scenario.spec.with_nodes(counts[-1]))
        each = effort if nodes else effort / len(counts)
        rows = compare_sizes(scenario, counts, effort=each, seed=seed, constraints=constraints)
        chosen = min(rows, key=lambda row: row.step_seconds if objective == "time" else row.cost)
        scenario, start = scenario.on(scenario.spec.with_nodes(chosen.nodes)), chosen.plan
    best = find_best_plan(
        scenario, effort=effort, seed=seed, constraints=constraints, start=start, longest=longest
    )
    report = _report(scenario, best, constraints)
    # The report's own plan replaces the plan that was first made for its number of nodes.
    own = make_size_report(scenario, report.chosen, report.gap) if rows else None
    rows = tuple(own if own is not None and row.cluster == own.cluster else row for row in rows)
    return replace(report, sizes=rows, objective=objective)


def _report(scenario: Scenario, best: BestPlan, constraints: UserConstraints) -> PlanReport:
    found = best.found
    result = best.found.result
    plan = best.estimate.plan
    # A better preset may not be expressible in the problem; then no alternatives to it can be evaluated.
    assignment = result.assignment if plan == found.plan else found.problem.find_assignment(plan)
    step_seconds = best.estimate.step_seconds
    alternatives = (
        ()
        if assignment is None
        else find_alternatives(
            scenario, found.problem, assignment, step_seconds, offload=constraints.search_space.offload
        )
    )
    return PlanReport(
        scenario=scenario,
        chosen=best.estimate,
        lower_bound_seconds=best.lower_bound,
        gap=best.gap,
        search_seconds=best.seconds,
        evaluations=result.evaluations,
        candidates={name: len(candidates) for name, candidates in found.problem.candidates.items()},
        presets={name: _preset(preset, constraints) for name, preset in best.presets.items()},
        contenders=list_contenders(scenario, best),
        alternatives=alternatives,
        goodput=predict_goodput(scenario, best.estimate),
        expected_bound_seconds=bound_expected_seconds(scenario, best.lower_bound),
    )


def _preset(result: Estimate | UserError, constraints: UserConstraints) -> Preset:
    if isinstance(result, UserError):
        return Preset(None, str(result))
    recomputes = any(placement.strategy.recompute for placement in result.plan.placements.values())
    return Preset(result, None, recompute=recomputes and not constraints.recompute)
