"""Plan a step and report on the plan: what it takes, and what it was preferred to."""

from collections.abc import Sequence
from dataclasses import replace

from realrl.config.errors import UserError
from realrl.plan.plan import Plan
from realrl.planner.plan_search import FoundPlan, Wanted, find_plan, preset_plans
from realrl.planner.predict import estimate
from realrl.planner.report import Objective, PlanReport, Preset
from realrl.planner.report_alternatives import alternatives
from realrl.planner.report_sizes import compare_sizes, on_cluster, size_report
from realrl.planner.scenario import Scenario


def make_report(
    scenario: Scenario,
    *,
    seconds: float = 10.0,
    seed: int = 0,
    wanted: Wanted | None = None,
    nodes: Sequence[int] = (),
    objective: Objective = "time",
) -> PlanReport:
    """Plan a step and compare the plan with presets, other ways to run its calls, and other numbers of nodes.

    `nodes`: numbers of nodes, the first ones of the scenario's cluster, of which that is planned which is best by
    `objective`; without them, `time` plans for the whole cluster, and `cost` for as many nodes as make a step
    cheapest. `seconds`: for the search, and before it as much for each of `nodes`, or for all together that look
    for the cheapest number. DoesNotFit if no plan fits; UserError where a call cannot run on the cluster at all.
    """
    wanted = wanted or Wanted()
    if not nodes and objective == "time":
        return _report(scenario, find_plan(scenario, seconds=seconds, seed=seed, wanted=wanted), wanted)
    counts = sorted(set(nodes)) or range(1, scenario.spec.nodes + 1)
    each = seconds if nodes else seconds / len(counts)
    scenario = on_cluster(scenario, scenario.spec.with_nodes(counts[-1]))
    sizes = compare_sizes(scenario, counts, seconds=each, seed=seed, wanted=wanted)
    best = min(sizes, key=lambda size: size.step_seconds if objective == "time" else size.cost)
    scenario = on_cluster(scenario, scenario.spec.with_nodes(best.nodes))
    starts = preset_plans(scenario, wanted) | ({"": best.plan} if best.plan else {})
    found = find_plan(scenario, seconds=seconds, seed=seed, wanted=wanted, presets=starts)
    report = _report(scenario, found, wanted)
    row = size_report(scenario, report.chosen, report.gap)
    sizes = tuple(row if size.nodes == row.nodes else size for size in sizes)
    return replace(report, sizes=sizes, objective=objective)


def _report(scenario: Scenario, found: FoundPlan, wanted: Wanted) -> PlanReport:
    """The plan that was found, or the preset that is better: presets may keep copies, which searches do not."""
    result = found.result
    presets = {name: _preset(scenario, plan, wanted) for name, plan in preset_plans(scenario, wanted).items()}
    fitting = [p.estimate for p in presets.values() if p.estimate is not None and p.estimate.fits]
    chosen = min([estimate(scenario, found.plan), *fitting], key=lambda e: e.step_seconds)
    bound = min(result.lower_bound, chosen.step_seconds)
    return PlanReport(
        scenario,
        chosen,
        bound,
        result.gap if chosen.plan == found.plan else 1 - bound / chosen.step_seconds,
        found.seconds,
        result.evaluations,
        {name: len(options) for name, options in found.problem.options.items()},
        presets,
        alternatives(scenario, found.problem, result.choice, chosen.step_seconds),
    )


def _preset(scenario: Scenario, plan: Plan | UserError, wanted: Wanted) -> Preset:
    if isinstance(plan, UserError):
        return Preset(None, str(plan))
    recomputes = any(placement.strategy.recompute for placement in plan.placements.values())
    return Preset(estimate(scenario, plan), None, recompute=recomputes and not wanted.recompute)
