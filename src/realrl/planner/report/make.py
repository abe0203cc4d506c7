"""Plan a step and report on the plan: what it takes, and what it was preferred to."""

from collections.abc import Sequence
from dataclasses import replace

from realrl.config.errors import UserError
from realrl.planner.report.alternatives import find_alternatives
from realrl.planner.report.report import Objective, PlanReport, Preset
from realrl.planner.report.sizes import compare_sizes, make_size_report
from realrl.planner.search.plan_search import (
    BestPlan,
    UserConstraints,
    default_search_seconds,
    find_best_plan,
)
from realrl.planner.simulate.estimate import Estimate
from realrl.planner.simulate.scenario import Scenario


def make_report(
    scenario: Scenario,
    *,
    seconds: float | None = None,
    seed: int = 0,
    constraints: UserConstraints | None = None,
    nodes: Sequence[int] = (),
    objective: Objective = "time",
) -> PlanReport:
    """Plan a step and compare the plan with presets, other ways to run its calls, and other numbers of nodes.

    `nodes`: numbers of nodes, the first ones of the scenario's cluster, of which that is planned which is best by
    `objective`; without them, `time` plans for the whole cluster, and `cost` for as many of the first
    nodes as make a step cheapest. `seconds`: for the search, and before it as much for each of `nodes`, or for
    all together that look for the cheapest number. DoesNotFit if no plan fits; UserError where a call cannot run
    on the cluster at all.
    """
    constraints = constraints or UserConstraints()
    if not nodes and objective == "time":
        return _report(
            scenario,
            find_best_plan(scenario, seconds=seconds, seed=seed, constraints=constraints),
            constraints,
        )
    counts = sorted(set(nodes)) or range(1, scenario.spec.nodes + 1)
    largest = scenario.spec.with_nodes(counts[-1])
    seconds = default_search_seconds(largest) if seconds is None else seconds
    each = seconds if nodes else seconds / len(counts)
    scenario = scenario.on(largest)
    sizes = compare_sizes(scenario, counts, seconds=each, seed=seed, constraints=constraints)
    best = min(sizes, key=lambda size: size.step_seconds if objective == "time" else size.cost)
    scenario = scenario.on(scenario.spec.with_nodes(best.nodes))
    found = find_best_plan(scenario, seconds=seconds, seed=seed, constraints=constraints, start=best.plan)
    report = _report(scenario, found, constraints)
    row = make_size_report(scenario, report.chosen, report.gap)
    sizes = tuple(row if size.nodes == row.nodes else size for size in sizes)
    return replace(report, sizes=sizes, objective=objective)


def _report(scenario: Scenario, best: BestPlan, constraints: UserConstraints) -> PlanReport:
    found, result, plan = best.found, best.found.result, best.estimate.plan
    # A preset that is better may have no place in the problem, so that nothing is known of its neighbours.
    assignment = result.assignment if plan == found.plan else found.problem.find_assignment(plan)
    step_seconds = best.estimate.step_seconds
    others = (
        ()
        if assignment is None
        else find_alternatives(
            scenario, found.problem, assignment, step_seconds, offload=constraints.search_space.offload
        )
    )
    return PlanReport(
        scenario,
        best.estimate,
        best.lower_bound,
        best.gap,
        best.seconds,
        result.evaluations,
        {name: len(candidates) for name, candidates in found.problem.candidates.items()},
        {name: _preset(preset, constraints) for name, preset in best.presets.items()},
        others,
    )


def _preset(found: Estimate | UserError, constraints: UserConstraints) -> Preset:
    if isinstance(found, UserError):
        return Preset(None, str(found))
    recomputes = any(placement.strategy.recompute for placement in found.plan.placements.values())
    return Preset(found, None, recompute=recomputes and not constraints.recompute)
