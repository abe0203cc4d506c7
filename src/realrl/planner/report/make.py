"""Planning of a step, with a report on the plan and its alternatives."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from realrl.config.errors import UserError
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.reliability.goodput import bound_expected_seconds, predict_goodput
from realrl.planner.report.alternatives import find_alternatives
from realrl.planner.report.report import (
    CHOSEN,
    FASTEST,
    RUNNER_UP,
    Contender,
    Objective,
    PlanReport,
    Preset,
    SizeReport,
    StalenessReport,
    Wanted,
)
from realrl.planner.report.shortage_text import describe_shortage
from realrl.planner.search.plan_search import (
    BestPlan,
    FoundPlan,
    UserConstraints,
    estimate_found,
    find_best_plan,
    find_plan,
)
from realrl.planner.search.search import DEFAULT_EFFORT, search_plans
from realrl.planner.search.shortage import DoesNotFit
from realrl.planner.simulate.estimate import Estimate
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.space.build import build_problem
from realrl.planner.space.candidate import Candidate
from realrl.planner.space.problem import Assignment, Problem
from realrl.planner.uncertainty.ranking import StepSampler, count_parts
from realrl.recipe.training import AsynchronyConfig

_RUNNERS_UP = 2
_NEAR = 1.25
"""Longest step of a runner-up that is worth naming, relative to the step of the chosen plan."""


def list_contenders(scenario: Scenario, best: BestPlan) -> dict[str, Contender]:
    """List the plans that fit, the fastest first. Each has an interval and a probability of being the fastest."""
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
    """Compare several plans. Returns contenders by name, the fastest first."""
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
    """List the searched plans that are nearly as fast as the chosen plan, without those that are listed under
    another name."""
    named = (best.estimate.plan, best.fastest.plan)
    near = (e for e in best.searched if e.step_seconds <= _NEAR * best.estimate.step_seconds)
    others = [e for e in near if e.plan not in named]
    return sorted(others, key=lambda estimate: estimate.step_seconds)[:_RUNNERS_UP]


_PART = 0.25
"""Effort of a search that only decides between clusters, relative to the search on the chosen cluster."""


def choose_cluster(
    scenario: Scenario,
    wanted: Wanted,
    constraints: UserConstraints,
    *,
    effort: float = DEFAULT_EFFORT,
    seed: int = 0,
) -> tuple[ClusterSpec, tuple[SizeReport, ...]]:
    """Choose among the first nodes of each group of a cluster. Also returns reports on all plans made on the way.

    More nodes never make a step longer, because a plan may leave some nodes idle. Bisection finds the smallest
    number of nodes that meets a target. Within a budget, all affordable nodes are used. If nodes may fail, more
    nodes can make a step longer. The number of nodes is then halved as long as this makes the step shorter. Groups
    are not combined. Raises UserError if prices are missing, or if no step is short or cheap enough.
    """
    _check_prices(scenario.spec, wanted)
    offers = [ClusterSpec(str(group), (group,)) for group in scenario.spec.groups]
    found: list[SizeReport] = []
    for offer in offers:
        nodes = offer.nodes
        each = offer.with_nodes(1).price_per_hour or 0.0
        if wanted.price_per_hour is not None and each:
            nodes = min(nodes, int(wanted.price_per_hour / each + 1e-9))
        if not nodes:
            refused = f"costs {each:,.4g} an hour"
            found.append(make_size_report(scenario.on(offer.with_nodes(1)), None, None, refused))
            continue

        def plan(nodes: int, offer: ClusterSpec = offer) -> SizeReport:
            part = scenario.on(offer.with_nodes(nodes))
            return _plan(part, constraints, effort, seed, wanted.step_seconds)

        rows = [plan(nodes)]
        while scenario.failures is not None and nodes > 1:
            nodes //= 2
            half = plan(nodes)
            if half.step_seconds >= rows[-1].step_seconds:
                break
            rows.append(half)
        found += rows if wanted.step_seconds is None else _bisect(rows, wanted.step_seconds, plan)
    best = _choose(found, wanted)
    spec = next(offer.with_nodes(best.nodes) for offer in offers if offer.groups[0].device.name == best.kind)
    return spec, tuple(found)


def _bisect(
    rows: Sequence[SizeReport], seconds: float, plan: Callable[[int], SizeReport]
) -> list[SizeReport]:
    """Find the fewest nodes whose step is short enough. Returns all plans in ascending order of nodes.

    The last of `rows` is the plan with the shortest step.
    """
    found = [*rows]
    low, high, enough = 0, found[-1].nodes, found[-1].step_seconds <= seconds
    while high - low > 1 and enough:
        middle = (low + high) // 2
        found.append(plan(middle))
        if found[-1].step_seconds <= seconds:
            high = middle
        else:
            low = middle
    return sorted(found, key=lambda row: row.nodes)


def _choose(rows: Sequence[SizeReport], wanted: Wanted) -> SizeReport:
    """Choose the best row. Raises UserError if no row meets the target."""
    fastest = min(rows, key=lambda row: row.step_seconds)
    if fastest.estimate is None:
        refused = "; ".join(f"{row.cluster} {row.refused}" for row in rows)
        price = wanted.price_per_hour
        target = f"--target-step {wanted.step_seconds:g}" if price is None else f"--budget {price:g}"
        raise UserError(f"{target}: no cluster will do: {refused}")
    if wanted.step_seconds is None:
        return fastest
    enough = [row for row in rows if row.step_seconds <= wanted.step_seconds]
    if not enough:
        raise UserError(
            f"--target-step: no step of {wanted.step_seconds:g} s: the fastest, on {fastest.cluster}, takes"
            f" {fastest.step_seconds:.3g} s"
        )
    return min(enough, key=lambda row: (row.price_per_hour or 0.0, row.devices, row.step_seconds))


def _check_prices(spec: ClusterSpec, wanted: Wanted) -> None:
    """Raise UserError if prices are needed but missing, or if two groups have the same kind of device. With one
    group, `--target-step` needs no prices, because the fewest nodes are the cheapest."""
    if spec.price_per_hour is None and (wanted.price_per_hour is not None or len(spec.groups) > 1):
        option = "--target-step" if wanted.price_per_hour is None else "--budget"
        raise UserError(
            f"{option}: cluster {spec.name} has no prices; give price_per_device_hour for each group of a cluster"
            " file"
        )
    names = [group.device.name for group in spec.groups]
    if len(set(names)) < len(names):
        raise UserError(f"cluster {spec.name}: groups to choose from must be of different kinds of devices")


def _plan(
    scenario: Scenario, constraints: UserConstraints, effort: float, seed: int, target: float | None
) -> SizeReport:
    """Plan a step. If it takes longer than `target` seconds, but the bound does not exclude this target, search
    longer."""
    search = partial(find_plan, scenario, seed=seed, constraints=constraints)
    try:
        found = search(effort=_PART * effort)
        row = _make_report(scenario, found)
        if target is not None and found.result.lower_bound <= target < row.step_seconds:
            found = search(effort=effort, tolerance=max(0.0, 1 - target / found.result.evaluation.seconds))
            row = min(row, _make_report(scenario, found), key=lambda row: row.step_seconds)
    except DoesNotFit as error:
        return make_size_report(scenario, None, None, describe_shortage(scenario, error.shortage))
    except UserError as error:
        return make_size_report(scenario, None, None, str(error))
    return row


def _make_report(scenario: Scenario, found: FoundPlan) -> SizeReport:
    return make_size_report(scenario, *estimate_found(scenario, found))


def compare_sizes(
    scenario: Scenario, nodes: Sequence[int], *, effort: float, seed: int, constraints: UserConstraints
) -> tuple[SizeReport, ...]:
    """Find the best plan on the first nodes of the cluster, for each number in `nodes`.

    `nodes` are ascending, up to the scenario's number of nodes. `effort` limits each search. Each search also
    starts from the previous plan, which leaves the added nodes idle. Raises DoesNotFit if no plan fits even on all
    nodes.
    """
    problem = build_problem(scenario, search_space=constraints.search_space)
    before: Mapping[str, Candidate] = {}
    rows = []
    for number in nodes:
        part, restricted = scenario.on(scenario.spec.with_nodes(number)), problem.restricted(number)
        try:
            if restricted is None or restricted.apart is not None:
                # Candidates for a large cluster leave out small meshes, so these few nodes need a new search.
                found = find_plan(part, effort=effort, constraints=constraints)
            else:
                starts = _find_assignments(restricted, before)
                result = search_plans(restricted, effort=effort, seed=seed, starts=starts)
                before = restricted.chosen_candidates(result.assignment)
                found = FoundPlan(restricted.plan(result.assignment), restricted, result)
            rows.append(make_size_report(part, *estimate_found(part, found)))
        except DoesNotFit as error:
            if number == nodes[-1]:
                raise
            unsure = "; this is the plan nearest to fitting of those that were tried"
            shortage = describe_shortage(part, error.shortage)
            rows.append(make_size_report(part, None, None, shortage + unsure * (not error.shortage.proven)))
        except UserError as error:
            rows.append(make_size_report(part, None, None, str(error)))
    return tuple(rows)


_WORTH = 0.01
"""Gain in step time for which older samples are accepted."""


def compare_staleness(
    scenarios: Sequence[tuple[AsynchronyConfig, Scenario]],
    *,
    effort: float,
    seed: int,
    constraints: UserConstraints,
) -> tuple[StalenessReport, ...]:
    """Find the best plan under different settings of asynchrony.

    `scenarios`: one for each of the settings. `effort` limits all searches together. Raises DoesNotFit if no plan
    fits under any of the settings.
    """
    rows, misfit = [], None
    for settings, scenario in scenarios:
        try:
            found = find_plan(scenario, effort=effort / len(scenarios), seed=seed, constraints=constraints)
        except DoesNotFit as error:
            misfit, refused = error, describe_shortage(scenario, error.shortage)
            rows.append(StalenessReport(settings=settings, estimate=None, gap=math.inf, refused=refused))
            continue
        except UserError as error:
            if settings.portions == 1:
                raise
            rows.append(StalenessReport(settings=settings, estimate=None, gap=math.inf, refused=str(error)))
            continue
        estimate, gap = estimate_found(scenario, found)
        rows.append(StalenessReport(settings=settings, estimate=estimate, gap=gap))
    if misfit is not None and not any(row.estimate for row in rows):
        raise misfit
    return tuple(rows)


def choose_staleness(rows: Sequence[StalenessReport]) -> int:
    """Choose the first settings whose step is nearly as short as the shortest one, of the smallest staleness.

    Returns the index of the row.
    """
    seconds = [math.inf if row.estimate is None else row.estimate.step_seconds for row in rows]
    near = [i for i, one in enumerate(seconds) if one <= min(seconds) * (1 + _WORTH)]
    return min(near, key=lambda i: rows[i].settings.staleness)


def _find_assignments(problem: Problem, candidates: Mapping[str, Candidate]) -> list[Assignment]:
    """Find the assignment of some candidates. Returns an empty list if the problem lacks one of them."""
    if not candidates or any(one not in problem.candidates[name] for name, one in candidates.items()):
        return []
    return [{name: problem.candidates[name].index(one) for name, one in candidates.items()}]


def make_size_report(
    scenario: Scenario, found: Estimate | None, gap: float | None, refused: str | None = None
) -> SizeReport:
    """Build the report on a scenario's number of nodes."""
    spec = scenario.spec
    return SizeReport(
        cluster=spec.name,
        kind=spec.groups[0].device.name,
        nodes=spec.nodes,
        devices=spec.size,
        estimate=found,
        gap=gap,
        refused=refused,
        price_per_hour=spec.price_per_hour,
        goodput=None if found is None else predict_goodput(scenario, found),
    )


def make_report(
    scenario: Scenario,
    *,
    effort: float | None = None,
    seed: int = 0,
    constraints: UserConstraints | None = None,
    nodes: Sequence[int] = (),
    objective: Objective = "time",
    wanted: Wanted | None = None,
    ahead: Sequence[tuple[AsynchronyConfig, Scenario]] = (),
) -> PlanReport:
    """Plan a step and compare the plan with presets, alternatives, and other numbers of nodes.

    `nodes`: numbers of nodes to choose from by `objective`. Each number means the first nodes of the cluster.
    Without `nodes`, `time` plans for the whole cluster, and `cost` plans for the number of nodes with the cheapest
    step. `effort` limits the search on the chosen nodes. The earlier search on each of `nodes` has the same limit.
    Under `cost` without `nodes`, the searches on all numbers of nodes share this limit. With `wanted`,
    `choose_cluster` chooses the cluster. `ahead` has scenarios of different settings of asynchrony; the one
    that `choose_staleness` chooses replaces `scenario`. Raises DoesNotFit if no plan fits, and UserError if a call
    cannot run on the cluster at all.
    """
    constraints = constraints or UserConstraints()
    effort = DEFAULT_EFFORT if effort is None else effort
    rows: tuple[SizeReport, ...] = ()
    start, longest = None, math.inf
    stale: tuple[StalenessReport, ...] = ()
    if ahead:
        stale = compare_staleness(ahead, effort=effort, seed=seed, constraints=constraints)
        best_row = choose_staleness(stale)
        scenario, estimate = ahead[best_row][1], stale[best_row].estimate
        start = None if estimate is None else estimate.plan
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
    if stale:
        # The final search may have found a better plan than the comparison.
        found = replace(stale[best_row], estimate=report.chosen, gap=report.gap)
        stale = (*stale[:best_row], found, *stale[best_row + 1 :])
    # The chosen plan replaces the first plan for the same number of nodes.
    own = make_size_report(scenario, report.chosen, report.gap) if rows else None
    rows = tuple(own if own is not None and row.cluster == own.cluster else row for row in rows)
    return replace(report, sizes=rows, objective=objective, staleness=stale)


def _report(scenario: Scenario, best: BestPlan, constraints: UserConstraints) -> PlanReport:
    found = best.found
    result = best.found.result
    plan = best.estimate.plan
    # A better preset may not be expressible in the problem. Then no alternatives to it can be evaluated.
    assignment = result.assignment if plan == found.plan else found.problem.find_assignment(plan)
    step_seconds = best.estimate.step_seconds
    alternatives = (
        ()
        if assignment is None or found.problem.apart is not None  # the problem does not describe portions
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
