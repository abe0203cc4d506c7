"""Comparison of plans on different numbers of nodes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from realrl.config.errors import UserError
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.reliability.goodput import predict_goodput
from realrl.planner.report.report import SizeReport
from realrl.planner.report.shortage_text import describe_shortage
from realrl.planner.search.plan_search import FoundPlan, UserConstraints, find_plan
from realrl.planner.search.search import DEFAULT_EFFORT, SearchBudget, SearchResult, search_plans
from realrl.planner.search.shortage import DoesNotFit, Shortage
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
    offers = [ClusterSpec(str(group), (group,)) for group in scenario.spec.groups]
    _check_prices(scenario.spec, wanted)

    def plan(offer: ClusterSpec, nodes: int) -> SizeReport:
        part = scenario.on(offer.with_nodes(nodes))
        return _plan(part, constraints, effort, seed, wanted.step_seconds)

    if wanted.price_per_hour is not None:
        found = [row for offer in offers for row in _buy(scenario, offer, wanted.price_per_hour, plan)]
    else:
        assert wanted.step_seconds is not None, "one of the two is wanted"
        found = [row for offer in offers for row in _bisect(scenario, offer, wanted.step_seconds, plan)]
    best = _choose(found, wanted)
    spec = next(offer.with_nodes(best.nodes) for offer in offers if offer.groups[0].device.name == best.kind)
    return spec, tuple(found)


def _buy(
    scenario: Scenario,
    offer: ClusterSpec,
    price_per_hour: float,
    plan: Callable[[ClusterSpec, int], SizeReport],
) -> list[SizeReport]:
    """Plan for the largest number of nodes that a budget pays for."""
    one = offer.with_nodes(1)
    each = one.price_per_hour or 0.0
    affordable = offer.nodes if not each else min(offer.nodes, int(price_per_hour / each + 1e-9))
    if affordable:
        return _halve(scenario, offer, affordable, plan)
    return [make_size_report(scenario.on(one), None, None, f"costs {each:,.4g} an hour")]


def _halve(
    scenario: Scenario, offer: ClusterSpec, nodes: int, plan: Callable[[ClusterSpec, int], SizeReport]
) -> list[SizeReport]:
    """Plan for a number of nodes; if they may fail, also for half of it while steps get shorter. The best is
    last."""
    found = [plan(offer, nodes)]
    while scenario.failures is not None and nodes > 1:
        nodes //= 2
        half = plan(offer, nodes)
        if half.step_seconds >= found[-1].step_seconds:
            break
        found.append(half)
    return found


def _bisect(
    scenario: Scenario, offer: ClusterSpec, seconds: float, plan: Callable[[ClusterSpec, int], SizeReport]
) -> list[SizeReport]:
    """Plan for the fewest nodes whose step is short enough, and those tried before, in ascending order."""
    found = _halve(scenario, offer, offer.nodes, plan)
    low, high, enough = 0, found[-1].nodes, found[-1].step_seconds <= seconds
    while high - low > 1 and enough:
        middle = (low + high) // 2
        found.append(plan(offer, middle))
        if found[-1].step_seconds <= seconds:
            high = middle
        else:
            low = middle
    return sorted(found, key=lambda row: row.nodes)


def _choose(rows: Sequence[SizeReport], wanted: Wanted) -> SizeReport:
    """Choose the best row; UserError where none will do."""
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
    """UserError where prices decide and there are none; of one kind of device, the fewest are cheapest."""
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


@dataclass(frozen=True)
class ClusterSize:
    """Search result on the first nodes of a cluster."""

    nodes: int
    problem: Problem | None
    """Problem on these nodes, whose candidates `result.assignment` indexes; None if some call has no candidate."""
    result: SearchResult | None
    """Result of the search; None if nothing fits."""
    shortage: Shortage | None


def search_node_counts(
    problem: Problem,
    counts: Iterable[int],
    *,
    effort: float = DEFAULT_EFFORT,
    seed: int = 0,
    budget: SearchBudget | None = None,
) -> list[ClusterSize]:
    """Find the fastest plan on the first nodes of a cluster, for each number of nodes in `counts`.

    Each search starts, among others, from the previous plan, which leaves additional nodes idle. `effort`:
    that of each search.
    """
    sizes: list[ClusterSize] = []
    previous: Mapping[str, Candidate] | None = None
    for nodes in counts:
        restricted = problem.restricted(nodes)
        result = None
        shortage = None
        if restricted is not None:
            starts = _find_assignments(restricted, previous) if previous else []
            try:
                result = search_plans(restricted, effort=effort, seed=seed, starts=starts, budget=budget)
                previous = restricted.chosen_candidates(result.assignment)
            except DoesNotFit as error:
                shortage = error.shortage
        sizes.append(ClusterSize(nodes, restricted, result, shortage))
    return sizes


def _find_assignments(problem: Problem, candidates: Mapping[str, Candidate]) -> list[Assignment]:
    """The assignment of these candidates; empty if the problem lacks one of them."""
    if any(candidate not in problem.candidates[name] for name, candidate in candidates.items()):
        return []
    return [{name: problem.candidates[name].index(candidate) for name, candidate in candidates.items()}]


def compare_sizes(
    scenario: Scenario, nodes: Sequence[int], *, effort: float, seed: int, constraints: UserConstraints
) -> tuple[SizeReport, ...]:
    """Find the best plan on the first nodes of the cluster, for each number in `nodes`.

    `nodes` are ascending, up to all of the scenario's. `effort`: that of each search. DoesNotFit if no plan
    fits even on all nodes.
    """
    spec = scenario.spec
    problem = build_problem(scenario, search_space=constraints.search_space)
    sizes = search_node_counts(problem, nodes, effort=effort, seed=seed)
    if sizes[-1].shortage is not None:
        raise DoesNotFit(sizes[-1].shortage)
    return tuple(
        _part_report(scenario.on(spec.with_nodes(size.nodes)), size, constraints=constraints, effort=effort)
        for size in sizes
    )


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


def _part_report(
    scenario: Scenario, size: ClusterSize, *, constraints: UserConstraints, effort: float
) -> SizeReport:
    if size.problem is not None and size.result is not None:
        plan = size.problem.plan(size.result.assignment)
        return make_size_report(scenario, estimate_plan(scenario, plan), size.result.gap)
    shortage = size.shortage
    if shortage is None:
        # Candidates for a large cluster leave out small meshes: search anew on these few nodes.
        try:
            found = find_plan(scenario, effort=effort, constraints=constraints)
        except DoesNotFit as error:
            shortage = error.shortage
        except UserError as error:
            return make_size_report(scenario, None, None, str(error))
        else:
            return make_size_report(scenario, estimate_plan(scenario, found.plan), found.result.gap)
    unsure = "" if shortage.proven else "; this is the plan nearest to fitting of those that were tried"
    return make_size_report(scenario, None, None, describe_shortage(scenario, shortage) + unsure)
