"""Plan search of a scenario: make presets, build the search problem, search, and choose among the best plans."""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from realrl.config.errors import UserError
from realrl.dataflow.call import Call, Kind
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement
from realrl.plan.plan import Plan
from realrl.plan.presets import PRESETS, make_plan
from realrl.planner.reliability.goodput import compute_expected_seconds
from realrl.planner.search.search import DEFAULT_EFFORT, TOLERANCE, SearchBudget, SearchResult, search_plans
from realrl.planner.search.shortage import DoesNotFit
from realrl.planner.search.variants import Variants
from realrl.planner.simulate.estimate import Estimate
from realrl.planner.simulate.estimator import estimate_plan
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.space.build import MANY_DEVICES, SearchSpace, build_problem, list_micro_batches
from realrl.planner.space.problem import Assignment, Problem
from realrl.planner.uncertainty.ranking import MOST_LONGER, StepSampler, choose_plan
from realrl.planner.workload.workload import Workload
from realrl.program.lower import home_placements, offloaded
from realrl.program.memory import check_offloading, find_holders, list_sharers
from realrl.program.portions import check_portions

_FEW_NODES = range(8, 17)
"""Numbers of nodes of a small scenario (`shrink_scenario`). On clusters this small, nearly every plan is
enumerated."""


def shrink_scenario(scenario: Scenario) -> tuple[Scenario, int] | None:
    """Return a scenario with fewer nodes and the same number of records per node, and the ratio of node counts.

    The new number of nodes is the one in `_FEW_NODES` that leaves the fewest nodes of the given scenario idle.
    Returns None if nodes differ, if there are few nodes already, or if the small scenario would have no prompt.
    """
    spec, workload = scenario.spec, scenario.workload
    if len(spec.groups) > 1 or spec.nodes < 2 * max(_FEW_NODES):
        return None
    few = min(reversed(_FEW_NODES), key=lambda nodes: spec.nodes % nodes)
    by = spec.nodes // few
    prompts = workload.items // workload.samples // by
    if prompts == 0:
        return None
    small = replace(workload, items=prompts * workload.samples)
    return replace(scenario.on(spec.with_nodes(few)), workload=small), by


def widen_plan(plan: Plan, by: int, cluster: Cluster) -> Plan:
    """Return a plan for a larger cluster: every mesh and every data-parallel degree is multiplied by `by`."""
    placements = {
        name: Placement(
            Mesh(by * place.mesh.first, by * place.mesh.size),
            place.strategy.with_degrees(dp=by * place.strategy.dp),
        )
        for name, place in plan.placements.items()
    }
    return replace(plan, cluster=cluster, placements=placements)


_LITTLE = SearchBudget(plans=10_000, chains=32, rounds=20, nodes=20_000)
"""Search budget for tuning a preset. Only micro-batch sizes and recomputation vary."""
_SMALL = 0.25
"""Additional share of the effort for a plan on few nodes. The search on very many nodes starts from this plan,
widened."""
_DIVISIONS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)
"""Shares of the cluster for all calls except the one that must be apart, at which searches start."""
_RUNNERS_UP = 3
"""Number of runners-up that are compared with the plan of a search."""


@dataclass(frozen=True)
class UserConstraints:
    """Constraints of a recipe on plans, if it does not name a plan."""

    micro_batch_tokens: int = 8192
    """Micro-batch size of presets, in tokens."""
    recompute: bool = False
    """Whether presets use activation checkpointing (recomputation)."""
    search_space: SearchSpace = field(default_factory=SearchSpace)
    """Dimensions that a search may vary."""
    own: Mapping[str, Plan] = field(default_factory=dict)
    """User plans by file name. They are compared with presets and never tuned."""


@dataclass(frozen=True)
class FoundPlan:
    """Best plan of a search, with its problem."""

    plan: Plan
    problem: Problem
    """Search problem, whose candidates include those of the feasible presets."""
    result: SearchResult
    apart: tuple[Assignment, ...] = ()
    """If steps have portions: the best plans for several divisions of the cluster."""


@dataclass(frozen=True)
class BestPlan:
    """Best plan of search and presets."""

    estimate: Estimate
    """Estimate of the best plan."""
    fastest: Estimate
    """Estimate of the plan with the shortest predicted step. `estimate` may instead be of a simpler plan that may
    well be as fast (`choose_plan`)."""
    searched: tuple[Estimate, ...]
    """Estimate of the search's plan, then of plans near it: simpler plans, runners-up, and plans that lose less
    time at failures."""
    found: FoundPlan
    presets: Mapping[str, Estimate | UserError]
    """Preset name -> its estimate, or the error that says why the preset is not possible."""
    sampler: StepSampler
    """Samples of steps under these plans."""
    seconds: float
    """Seconds spent on presets, candidates, search and proof."""

    @property
    def lower_bound(self) -> float:
        """Lower bound on the step seconds of every searched plan and of the best plan."""
        return min(self.found.result.lower_bound, self.estimate.step_seconds)

    @property
    def gap(self) -> float:
        """Relative optimality gap: upper bound on the avoidable fraction of the plan's seconds."""
        return 1 - self.lower_bound / self.estimate.step_seconds


def find_best_plan(
    scenario: Scenario,
    *,
    effort: float = DEFAULT_EFFORT,
    seed: int = 0,
    constraints: UserConstraints | None = None,
    start: Plan | None = None,
    longest: float = math.inf,
) -> BestPlan:
    """Find the best plan among presets, the plan of a search that starts from presets and `start`, and plans near
    it.

    Simpler plans that may well be as fast are preferred (`choose_plan`), unless they take more than `longest`
    seconds. `effort`: limit of the search (see `search_plans`). Raises the errors of `find_plan`.
    """
    begin = time.monotonic()
    presets = make_preset_plans(scenario, constraints)
    starts = presets | ({} if start is None else {"": start})
    found = find_plan(scenario, effort=effort, seed=seed, constraints=constraints, presets=starts)
    estimates = {
        name: estimate_plan(scenario, plan) if isinstance(plan, Plan) else plan
        for name, plan in presets.items()
    }
    fitting = [e for e in estimates.values() if isinstance(e, Estimate) and e.fits]
    searched = _estimate_searched(scenario, found)
    everything = [*searched, *fitting]
    sampler = StepSampler(scenario, seed)
    objective = partial(compute_expected_seconds, scenario)
    return BestPlan(
        estimate=choose_plan(scenario.graph, sampler, everything, objective, longest),
        fastest=min(everything, key=objective),
        searched=searched,
        found=found,
        presets=estimates,
        sampler=sampler,
        seconds=time.monotonic() - begin,
    )


def estimate_found(scenario: Scenario, found: FoundPlan) -> tuple[Estimate, float]:
    """Estimate the plan of a search, and its optimality gap.

    If steps have portions, this is the fastest of the plan and plans near it, because the search does not simulate
    portions. The gap is then the distance to the bound of steps whose calls all overlap.
    """
    if scenario.graph.streaming is None:
        return estimate_plan(scenario, found.plan), found.result.gap
    best = min(_estimate_searched(scenario, found), key=lambda estimate: estimate.step_seconds)
    return best, max(0.0, 1 - found.result.lower_bound / best.step_seconds)


def _estimate_searched(scenario: Scenario, found: FoundPlan) -> tuple[Estimate, ...]:
    """Estimate the plan that was found, and plans near it that fit.

    These are a simpler plan that is nearly as fast, runners-up, and a plan that loses less time when nodes fail.
    """
    variants, problem, result = Variants(found.problem), found.problem, found.result
    simple = variants.simplify(result.assignment, result.evaluation.seconds * (1 + MOST_LONGER))
    near = [simple, *variants.find_runners_up(result.assignment, _RUNNERS_UP), *found.apart]
    if scenario.failures is not None:
        near.append(variants.find_better_home(scenario, scenario.failures, result.assignment))
    plans = [plan for plan in map(problem.plan, near) if plan != found.plan]
    estimates = [estimate_plan(scenario, plan) for i, plan in enumerate(plans) if plan not in plans[:i]]
    return estimate_plan(scenario, found.plan), *(estimate for estimate in estimates if estimate.fits)


def find_plan(
    scenario: Scenario,
    *,
    effort: float = DEFAULT_EFFORT,
    seed: int = 0,
    tolerance: float = TOLERANCE,
    constraints: UserConstraints | None = None,
    presets: Mapping[str, Plan | UserError] | None = None,
    budget: SearchBudget | None = None,
) -> FoundPlan:
    """Search for the plan with the shortest step, starting from the presets.

    `tolerance`: optimality gap that ends the search. `presets`: the result of `make_preset_plans`, if the caller
    already has it. Raises DoesNotFit if no plan fits into device memory, and UserError if a call cannot run on the
    cluster at all.
    """
    constraints = constraints or UserConstraints()
    if presets is None:
        presets = make_preset_plans(scenario, constraints)
    plans = [_as_candidates(plan) for plan in presets.values() if isinstance(plan, Plan)]
    plans += _find_widened(scenario, effort, seed, constraints)
    problem = build_problem(scenario, search_space=constraints.search_space, include=plans)
    starts = [assignment for plan in plans if (assignment := problem.find_assignment(plan)) is not None]
    apart: list[Assignment] = []
    if problem.apart is not None:
        apart = _search_apart(problem, problem.apart, effort=_SMALL * effort, seed=seed)
        starts += apart
    result = search_plans(
        problem, effort=effort, seed=seed, tolerance=tolerance, starts=starts, budget=budget
    )
    if problem.apart is not None:
        # In a step with portions, more calls overlap than in the problem, so its bound need not hold.
        relaxed = build_problem(scenario, search_space=constraints.search_space, include=plans, relaxed=True)
        bound = search_plans(relaxed, effort=_SMALL * effort, seed=seed).lower_bound
        result = replace(result, lower_bound=min(bound, result.evaluation.seconds))
    return FoundPlan(problem.plan(result.assignment), problem, result, tuple(apart))


def _search_apart(problem: Problem, name: str, *, effort: float, seed: int) -> list[Assignment]:
    """Search for plans that run a call on the last devices, and all other calls on the first devices, for several
    divisions of the cluster. `effort` limits each of these searches.

    Few plans of the whole problem keep the call apart, so its search needs such plans to start from.
    """
    size = problem.cluster.size
    found: list[Assignment] = []
    borders = sorted({round(size * share) for share in _DIVISIONS} - {0, size})
    for border in borders:
        numbers = {}
        for call in problem.graph.calls:
            layouts = problem.table(call).layouts
            first, end = layouts.first, layouts.first + layouts.size
            fits = first >= border if call.name == name else end <= border
            if call.is_function:
                fits &= layouts.size == max(layouts.size[fits], default=0)
            numbers[call.name] = np.flatnonzero(fits)
        if not all(map(len, numbers.values())):
            continue
        try:
            result = search_plans(problem.select(numbers), effort=effort, seed=seed)
        except DoesNotFit:
            continue
        found.append({call: int(numbers[call][chosen]) for call, chosen in result.assignment.items()})
    if not found:
        raise UserError(f"asynchrony.portions: no plan fits that gives {name} devices of its own")
    return found


def _find_widened(scenario: Scenario, effort: float, seed: int, constraints: UserConstraints) -> list[Plan]:
    """Find the best plan on few nodes and widen it, if the cluster has very many devices.

    On such a cluster, few mesh sizes are enumerated, so its own search might miss a good plan. For other clusters,
    the result is empty.
    """
    small = shrink_scenario(scenario) if scenario.spec.size > MANY_DEVICES else None
    if small is None:
        return []
    few, by = small
    # ZeRO stages 2 and 3 communicate in every micro-batch. The widened plan would do so among many more ranks.
    unsharded = replace(constraints, search_space=replace(constraints.search_space, zero=(1,)))
    try:
        found = find_plan(few, effort=_SMALL * effort, seed=seed, constraints=unsharded, presets={})
    except (DoesNotFit, UserError):  # for example, a call may have too few records there
        return []
    return [widen_plan(found.plan, by, scenario.spec.cluster)]


def make_preset_plans(
    scenario: Scenario, constraints: UserConstraints | None = None
) -> dict[str, Plan | UserError]:
    """Build every preset and tune it, and add user plans unchanged. Returns plans by name.

    If a plan is not possible, for example because it needs more devices, its value is the error.
    """
    constraints = constraints or UserConstraints()
    graph = scenario.graph
    models = scenario.models
    shapes = {role: stored.shape for role, stored in models.items()}
    plans: dict[str, Plan | UserError] = {}
    for name in PRESETS:
        try:
            plan = make_plan(
                name,
                graph,
                scenario.spec.cluster,
                constraints.micro_batch_tokens,
                shapes,
                recompute=constraints.recompute,
            )
            _check_calls(scenario, plan)
            plans[name] = tune_plan(scenario, plan)
        except UserError as error:
            plans[name] = error
    for name, own in constraints.own.items():
        try:
            plans[name] = _checked(scenario, own, constraints)
        except UserError as error:
            plans[name] = error
    return plans


def _checked(scenario: Scenario, plan: Plan, constraints: UserConstraints) -> Plan:
    """Check a plan and return it. Raises UserError if it does not suit the scenario."""
    if plan.cluster != scenario.spec.cluster:
        raise UserError(f"it is for cluster {plan.cluster}; this is {scenario.spec.cluster}")
    if offloaded(plan) and not constraints.search_space.offload:
        raise UserError("it offloads, which frees nothing because host and devices share their memory")
    plan.check(scenario.graph, {role: stored.shape for role, stored in scenario.models.items()})
    homes = home_placements(scenario.graph, plan)
    check_offloading(plan, find_holders(list_sharers(scenario.models), homes))
    _check_calls(scenario, plan)
    return plan


def _check_calls(scenario: Scenario, plan: Plan) -> None:
    """Raise UserError if a call cannot run as planned.

    A call cannot run if a rank has no record, or if its mesh has several kinds of devices. Calls of an exact model
    must also agree bit for bit.
    """
    if any(model.exact for model in scenario.models.values()):
        plan.check_exact(scenario.graph)
    check_portions(scenario.graph, plan)
    for call in scenario.graph.calls:
        place = plan[call.name]
        prompts = scenario.workload.items // scenario.workload.samples // place.strategy.dp
        if call.portions > 1 and prompts < call.portions:
            raise UserError(
                f"{call.name} has {prompts} prompts on each rank, which are less than {call.portions} portions"
            )
        scenario.spec.site(place.mesh)
        scenario.call_cost(call, place)


def tune_plan(scenario: Scenario, plan: Plan) -> Plan:
    """Tune micro-batch sizes and recomputation of a plan for the shortest step.

    Returns the plan itself if no variant fits into device memory.
    """
    variants = [plan]
    candidates = {
        call.name: tuple(_variants(call, plan[call.name], scenario.workload)) for call in scenario.graph.calls
    }
    for i in range(max(map(len, candidates.values()))):
        placements = {name: found[min(i, len(found) - 1)] for name, found in candidates.items()}
        variants.append(replace(plan, placements=placements))
    space = SearchSpace(micro_batch_tokens=(), offload=False, keep=bool(plan.keep))
    problem = _keeping(build_problem(scenario, search_space=space, include=variants), plan)
    try:
        result = search_plans(problem, budget=_LITTLE)
    except DoesNotFit:
        return plan
    best = problem.plan(result.assignment)
    placements = {
        name: replace(
            place,
            strategy=replace(
                place.strategy,
                micro_batch_tokens=best[name].strategy.micro_batch_tokens,
                recompute=best[name].strategy.recompute,
            ),
        )
        for name, place in plan.placements.items()
    }
    return replace(plan, placements=placements)


def _keeping(problem: Problem, plan: Plan) -> Problem:
    """Restrict a problem to candidates that keep the same copies as the plan."""
    same = {}
    for call in problem.graph.calls:
        keeps = problem.table(call).costs.keep
        wanted = problem.is_home(call) and call.role in plan.keep and bool(keeps.any())
        same[call.name] = np.flatnonzero(keeps == wanted)
    return problem.select(same)


def _variants(call: Call, place: Placement, workload: Workload) -> Iterator[Placement]:
    """Yield variants of a placement in micro-batch size and recomputation. A function has only the placement
    itself."""
    if call.is_function:
        yield place
        return
    for tokens in list_micro_batches(call.kind, workload.work(call)):
        for recompute in (False, True) if call.kind is Kind.TRAIN else (False,):
            strategy = replace(place.strategy, micro_batch_tokens=tokens, recompute=recompute)
            yield replace(place, strategy=strategy)


def _as_candidates(plan: Plan) -> Plan:
    """Return a plan with sequence parallelism in every call with TP > 1, as in all enumerated candidates.

    A search may combine initial plans, and calls that share parameters must agree on sequence parallelism.
    """
    placements = {
        name: replace(place, strategy=replace(place.strategy, sequence_parallel=place.strategy.tp > 1))
        for name, place in plan.placements.items()
    }
    return replace(plan, placements=placements)
