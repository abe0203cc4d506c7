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

    `nodes`: numbers of nodes to choose from by `objective`, each meaning the first nodes of the cluster.
    Without them, `time` plans for the whole cluster, and `cost` for the number of nodes that makes a step
    cheapest. `effort`: limit of the search, and of a search before it for each of `nodes`, or for all
    numbers of nodes together under `cost`. `wanted`: choose the cluster, too, as `choose_cluster` does.
    DoesNotFit if no plan fits; UserError if a call cannot run on the cluster at all.
    """
    constraints = constraints or UserConstraints()
    effort = DEFAULT_EFFORT if effort is None else effort
    if wanted is not None:
        spec, rows = choose_cluster(scenario, wanted, constraints, effort=effort, seed=seed)
        scenario = scenario.on(spec)
        start = next(row.plan for row in rows if row.cluster == spec.name)
        best_plan = find_best_plan(
            scenario,
            effort=effort,
            seed=seed,
            constraints=constraints,
            start=start,
            longest=math.inf if wanted.step_seconds is None else wanted.step_seconds,
        )
        goal: Objective = "step" if wanted.price_per_hour is None else "budget"
        return _with_sizes(_report(scenario, best_plan, constraints), rows, goal)
    if not nodes and objective == "time":
        return _report(
            scenario,
            find_best_plan(scenario, effort=effort, seed=seed, constraints=constraints),
            constraints,
        )
    counts = sorted(set(nodes)) or range(1, scenario.spec.nodes + 1)
    largest = scenario.spec.with_nodes(counts[-1])
    each = effort if nodes else effort / len(counts)
    scenario = scenario.on(largest)
    sizes = compare_sizes(scenario, counts, effort=each, seed=seed, constraints=constraints)
    best = min(sizes, key=lambda size: size.step_seconds if objective == "time" else size.cost)
    scenario = scenario.on(scenario.spec.with_nodes(best.nodes))
    best_plan = find_best_plan(scenario, effort=effort, seed=seed, constraints=constraints, start=best.plan)
    return _with_sizes(_report(scenario, best_plan, constraints), sizes, objective)


def _with_sizes(report: PlanReport, sizes: Sequence[SizeReport], objective: Objective) -> PlanReport:
    """Add the compared numbers of nodes to a report. The report's own plan replaces the one for its number."""
    row = make_size_report(report.scenario, report.chosen, report.gap)
    rows = tuple(row if size.cluster == row.cluster else size for size in sizes)
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
