"""Comparison of plans on different numbers of nodes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from realrl.config.errors import UserError
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.reliability.goodput import predict_goodput
from realrl.planner.report.report import SizeReport
from realrl.planner.report.shortage_text import describe_shortage
from realrl.planner.search.plan_search import FoundPlan, UserConstraints, find_plan
from realrl.planner.search.search import DEFAULT_EFFORT, search_plans
from realrl.planner.search.shortage import DoesNotFit
from realrl.planner.simulate.estimate import Estimate
from realrl.planner.simulate.estimator import estimate_plan
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.space.build import build_problem
from realrl.planner.space.candidate import Candidate
from realrl.planner.space.problem import Assignment, Problem

_PART = 0.25
"""Effort of a search that only decides between clusters, relative to that for the chosen one."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Target for the choice of a cluster: one of the two is set."""

    step_seconds: float | None = None
    """Longest step, for the least price per hour."""
    price_per_hour: float | None = None
    """Highest price per hour, for the shortest step."""


def choose_cluster(
    scenario: Scenario,
    wanted: Wanted,
    constraints: UserConstraints,
    *,
    effort: float = DEFAULT_EFFORT,
    seed: int = 0,
) -> tuple[ClusterSpec, tuple[SizeReport, ...]]:
    """Choose among the first nodes of each group of a cluster; also returns all plans that were made on the way.

    More nodes never take longer, because a plan may leave some idle. Bisection finds the smallest number that meets
    a target; within a budget, all affordable nodes are used. If nodes may fail, more nodes can take longer: then
    half the number is tried, again and again while that is better. Groups are not combined. Raises UserError if
    prices are missing, or if no step is short or cheap enough.
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
    """Choose the best row; Raises UserError if none will do."""
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
    """Raise UserError if prices decide but are missing. With one kind of device, the fewest nodes are cheapest."""
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
    """Plan a step. Search for one of `target` seconds if the bound does not exclude it."""
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
    return make_size_report(scenario, estimate_plan(scenario, found.plan), found.result.gap)


def compare_sizes(
    scenario: Scenario, nodes: Sequence[int], *, effort: float, seed: int, constraints: UserConstraints
) -> tuple[SizeReport, ...]:
    """Find the best plan on the first nodes of the cluster, for each number in `nodes`.

    `nodes` are ascending, up to the scenario's number of nodes. `effort` limits each search. Each search starts,
    among others, from the plan before, which leaves the added nodes idle. Raises DoesNotFit if no plan fits even on
    all nodes.
    """
    problem = build_problem(scenario, search_space=constraints.search_space)
    before: Mapping[str, Candidate] = {}
    rows = []
    for number in nodes:
        part, restricted = scenario.on(scenario.spec.with_nodes(number)), problem.restricted(number)
        try:
            if restricted is None:
                # Candidates for a large cluster leave out small meshes: search anew on these few nodes.
                found = find_plan(part, effort=effort, constraints=constraints)
                plan, result = found.plan, found.result
            else:
                starts = _find_assignments(restricted, before)
                result = search_plans(restricted, effort=effort, seed=seed, starts=starts)
                before = restricted.chosen_candidates(result.assignment)
                plan = restricted.plan(result.assignment)
            rows.append(make_size_report(part, estimate_plan(part, plan), result.gap))
        except DoesNotFit as error:
            if number == nodes[-1]:
                raise
            unsure = "; this is the plan nearest to fitting of those that were tried"
            shortage = describe_shortage(part, error.shortage)
            rows.append(make_size_report(part, None, None, shortage + unsure * (not error.shortage.proven)))
        except UserError as error:
            rows.append(make_size_report(part, None, None, str(error)))
    return tuple(rows)


def _find_assignments(problem: Problem, candidates: Mapping[str, Candidate]) -> list[Assignment]:
    """Find the assignment of some candidates; empty if the problem lacks one of them."""
    if not candidates or any(one not in problem.candidates[name] for name, one in candidates.items()):
        return []
    return [{name: problem.candidates[name].index(one) for name, one in candidates.items()}]


def make_size_report(
    scenario: Scenario, found: Estimate | None, gap: float | None, refused: str | None = None
) -> SizeReport:
    """Build the report of a scenario's number of nodes."""
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
