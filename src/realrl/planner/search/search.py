"""Search algorithm. It scores every plan if there are few plans. Otherwise, it uses annealing, local search, and
branch and bound."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from realrl.planner.moves.transfers import Layouts
from realrl.planner.search.bound import Bound
from realrl.planner.search.branch_and_bound import BranchAndBound, Proof
from realrl.planner.search.groups import KIND, SIZE, CandidateGroups
from realrl.planner.search.local import improve_locally
from realrl.planner.search.many_plans import PlanEvaluation, Timeline
from realrl.planner.search.mcmc import anneal
from realrl.planner.search.scorer import Improvement, Scorer
from realrl.planner.search.shortage import DoesNotFit, explain_call_shortage, explain_plan_shortage
from realrl.planner.space.candidate import Candidate, Costs, count_bytes_alone, find_undominated
from realrl.planner.space.problem import Assignment, Problem
from realrl.program.arrays import Bools, Ints


def prune_candidates(problem: Problem) -> tuple[Problem, dict[str, Ints]]:
    """Remove dominated candidates. Also returns the original indices of the remaining candidates, by call.

    A candidate is removed if it does not even fit alone into its devices, or if another candidate of equal layout
    is at least as good in every cost. For a role that is never reallocated, the other candidate only needs the same
    mesh and DP degree. The best plan keeps its step time: the order of the schedule depends only on meshes, so
    nothing ends later if an activity takes less time. Raises DoesNotFit if no candidate of a call remains.
    """
    kept: dict[str, Ints] = {}
    for call in problem.graph.calls:
        table = problem.table(call)
        needs = count_bytes_alone(table.costs, is_home=problem.is_home(call))
        limits = problem.limits(call)
        fits = np.flatnonzero(needs <= limits)
        if not len(fits):
            raise DoesNotFit(explain_call_shortage(problem, call, int((needs / limits).argmin())))
        follows = any(call.role in (a.role, a.source) for a in problem.graph.averages)
        stays = call.role is None or (len(problem.graph.role_calls(call.role)) == 1 and not follows)
        kept[call.name] = fits[_find_undominated(table.layouts[fits], table.costs[fits], by_mesh=stays)]
    return problem.select(kept), kept


def _find_undominated(layouts: Layouts, costs: Costs, *, by_mesh: bool) -> Ints:
    """Find the candidates that no other candidate dominates. Of several equal candidates, the first stays."""
    if by_mesh:
        # Candidates of a group exchange rows with the same ranks.
        key = [layouts.first, layouts.size, layouts.shares]
    else:
        # Candidates of a group can share the same replicas, and agree on keeping copies.
        key = [layouts.codes, costs.sequence_parallel.astype(np.int64), costs.keep.astype(np.int64)]
    _, group = np.unique(np.stack(key), axis=1, return_inverse=True)

    def hold_less(among: Ints) -> Bools:
        # In a plan, another call may already hold the communicators of the dominated candidate's layout, or another
        # role its frozen weights. Then these cost the dominated candidate nothing, but the better candidate may pay
        # for its own in full.
        code, resident = layouts.codes[among], costs.resident_bytes[among]
        own = (costs.communicator_bytes + costs.base_bytes)[among][:, :, None]
        own = np.where(code[:, :, None] == code[:, None], 0.0, own)
        return np.asarray(resident[:, :, None] <= resident[:, None] - own)

    columns = [
        costs.seconds,
        costs.capture_seconds,
        costs.working_bytes,
        costs.weights_bytes,
        costs.host_bytes,
        costs.weights_bytes * costs.offload,
        costs.load_seconds,
        costs.unload_seconds,
    ]
    return find_undominated(group.reshape(-1), columns, hold_less)


_MOST = 8
"""Kinds of candidates in the core, per call and mesh size: the 8 fastest, and up to 8 slower kinds that take less
memory than all faster ones."""


def select_core(problem: Problem, groups: list[CandidateGroups]) -> tuple[Problem, list[Ints]]:
    """Select the core of a problem: few candidates per call that good plans most probably use.

    Also returns the original indices of the remaining candidates, one array per call.
    """
    kept = [_select_candidates(of) for of in groups]
    names = [call.name for call in problem.graph.order]
    return problem.select(dict(zip(names, kept, strict=True))), kept


def _select_candidates(groups: CandidateGroups) -> Ints:
    of_size = np.searchsorted(groups.size[groups.level == SIZE], groups.size, side="left")
    kinds = np.flatnonzero(groups.level == KIND)
    # Kept copies change the step little. Local search adds them later to the best plan of the core.
    transient = kinds[~groups.may_keep[kinds]]
    kinds = transient if len(transient) else kinds
    chosen = np.concatenate(
        [_select_kinds(groups, kinds[of_size[kinds] == size]) for size in np.unique(of_size[kinds])]
    )
    ranges = zip(groups.child[chosen].tolist(), groups.child_end[chosen].tolist(), strict=True)
    return np.sort(np.concatenate([groups.candidate[begin:end] for begin, end in ranges]))


def _select_kinds(groups: CandidateGroups, kinds: Ints) -> Ints:
    """Select the fastest kinds, and evenly spaced ones among the lean kinds, including the leanest. A lean kind
    needs less memory than all faster kinds."""
    ordered = kinds[np.argsort(groups.seconds[kinds] + groups.load[kinds], kind="stable")]
    kept = groups.resident[ordered]
    less = [
        sizes < np.minimum.accumulate(np.append(np.inf, sizes))[:-1]
        for sizes in (kept, kept + groups.working[ordered])
    ]
    lean = np.flatnonzero(less[0] | less[1])
    lean = lean[lean >= _MOST]
    steps = min(_MOST, len(lean))
    spread = [lean[len(lean) - 1 - i * len(lean) // steps] for i in range(steps)]
    return ordered[np.array([*range(min(_MOST, len(ordered))), *spread], dtype=np.int64)]


DEFAULT_EFFORT = 800_000
"""Default effort of a search, in scored plans. Most searches for 128 devices end before they reach it."""
TOLERANCE = 0.01
"""Optimality gap (relative) that ends a search."""
_AT_ONCE = 2048
"""Number of plans scored at once."""
_STARTS, _IMPROVED = 64, 3
"""Number of random initial plans, and of final chains that local search improves."""


@dataclass(frozen=True)
class SearchBudget:
    """Work limits of a search. The search ends earlier once the gap is proven."""

    plans: int = 100_000
    """If a problem has at most this many plans, all of them are scored. The other limits apply to larger
    problems."""
    chains: int = 128
    """Number of annealing chains."""
    rounds: int = 1200
    """Number of rounds of annealing."""
    nodes: int = 20_000_000
    """Largest number of nodes of branch and bound."""


_SHORT_ROUNDS = 60
"""Rounds of the first chains. After them, branch and bound often improves plans faster than more rounds would."""
_CORE = 0.2
"""Share of the effort for the search in the core."""
_POLISH = 0.1
"""Additional share of the effort for local search, which improves the best plan of the core with candidates outside
the core."""
_FIRST_PROOF = 0.6
"""Share of the effort after which the first proof stops and new chains start."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Best plan of a search, with its proof."""

    assignment: dict[str, int]
    """Candidate index in the problem, by call."""
    evaluation: PlanEvaluation
    lower_bound: float
    """Lower bound on the step seconds of every plan of the problem."""
    evaluations: int
    """Number of plans scored."""
    nodes: int
    """Number of branch-and-bound nodes."""
    search_seconds: float
    history: tuple[Improvement, ...]
    """Improvements, oldest first."""

    @property
    def gap(self) -> float:
        """Relative optimality gap: upper bound on the avoidable fraction of the plan's seconds."""
        return 1 - self.lower_bound / self.evaluation.seconds if self.evaluation.seconds else 0.0


def search_plans(
    problem: Problem,
    *,
    effort: float = DEFAULT_EFFORT,
    seed: int = 0,
    tolerance: float = TOLERANCE,
    starts: Sequence[Assignment] = (),
    budget: SearchBudget | None = None,
) -> SearchResult:
    """Search for the plan with the shortest step, and bound all plans from below.

    If a problem has few plans, all are scored. Otherwise the core of the problem is searched first. Annealing
    chains start from `starts` (presets, for example) and from random plans, and local search improves their
    results. Branch and bound then searches the whole problem. It stops once the plan is within `tolerance`
    (relative) of the lower bound. If branch and bound takes long in the core, longer chains run before it
    continues.

    `effort` limits the number of scored plans. Bounding four sets of plans counts as scoring one plan. Results are
    reproducible by seed. Raises DoesNotFit if no plan is found that fits into memory.
    """
    budget = budget or SearchBudget()
    pruned, kept = prune_candidates(problem)
    scorer = Scorer(Timeline(pruned), effort)
    if _score_all(scorer, min(budget.plans, effort)):
        proof = Proof(lower_bound=scorer.best_seconds, nodes=0)
    else:
        given = [problem.chosen_candidates(start) for start in starts]
        proof = _search_core_first(scorer, given, budget, seed, tolerance)
    names = [call.name for call in scorer.timeline.tables.calls]
    best = scorer.best if scorer.best is not None else scorer.nearest_to_fit
    assert best is not None, "plans have been costed"
    assignment = {name: int(kept[name][i]) for name, i in zip(names, best, strict=True)}
    # Building tables of all other candidates would take longer than evaluating the plan.
    alone = problem.select({name: np.array([number]) for name, number in assignment.items()})
    evaluation = Timeline(alone).evaluate(dict.fromkeys(assignment, 0))
    if scorer.best is None:
        shortage = explain_plan_shortage(problem, assignment, evaluation)
        raise DoesNotFit(replace(shortage, proven=bool(np.isinf(proof.lower_bound))))
    return SearchResult(
        assignment=assignment,
        evaluation=evaluation,
        lower_bound=float(proof.lower_bound),
        evaluations=scorer.evaluations,
        nodes=proof.nodes,
        search_seconds=scorer.elapsed,
        history=tuple(scorer.history),
    )


def _score_all(scorer: Scorer, limit: float) -> bool:
    """Score every plan if there are at most `limit` plans. Returns whether it did."""
    sizes = scorer.timeline.tables.sizes
    count = prod(map(int, sizes))
    if count > limit:
        return False
    for start in range(0, count, _AT_ONCE):
        scorer(np.stack(np.unravel_index(np.arange(start, min(start + _AT_ONCE, count)), sizes)))
    return True


def _search_core_first(
    scorer: Scorer,
    given: Sequence[Mapping[str, Candidate]],
    budget: SearchBudget,
    seed: int,
    tolerance: float,
) -> Proof:
    """Search the core of a problem, then bound the whole problem.

    If no plan of the core fits, the whole problem is searched instead.
    """
    bound = Bound(scorer.timeline.tables)
    core, kept = select_core(scorer.timeline.problem, bound.groups)
    inner = Scorer(Timeline(core), _CORE * scorer.effort)
    within = Bound(inner.timeline.tables)
    _improve_and_prove(inner, within, _initial_plans(inner, given, seed), budget, seed, tolerance)
    scorer.evaluations += inner.evaluations
    scorer.bounded += inner.bounded
    begin = _initial_plans(scorer, given, seed)
    if inner.best is None:
        return _improve_and_prove(scorer, bound, begin, budget, seed, tolerance)
    found = np.array([numbers[i] for numbers, i in zip(kept, inner.best, strict=True)])
    scorer(np.concatenate([begin, found[:, None]], axis=1))
    improve_locally(scorer, bound, found, share=_CORE + _POLISH)
    return BranchAndBound(scorer, bound, tolerance=tolerance, seed=seed).run(budget.nodes)


def _improve_and_prove(
    scorer: Scorer, bound: Bound, begin: Ints, budget: SearchBudget, seed: int, tolerance: float
) -> Proof:
    """Improve initial plans, [calls, plans], and bound all plans, until the tolerance or the effort is reached."""
    proving = BranchAndBound(scorer, bound, tolerance=tolerance, seed=seed)
    short = replace(budget, rounds=min(budget.rounds, _SHORT_ROUNDS))
    _improve(scorer, bound, begin, short, seed, share=0.1)
    proof = proving.run(budget.nodes, _FIRST_PROOF)
    if proof.lower_bound < scorer.best_seconds * (1 - tolerance) and not scorer.exhausted():
        _improve(scorer, bound, begin, budget, seed + 1, share=_FIRST_PROOF + 0.25)
        proof = proving.run(budget.nodes)
    return proof


def _improve(
    scorer: Scorer, bound: Bound, begin: Ints, budget: SearchBudget, seed: int, *, share: float
) -> None:
    """Improve initial plans, [calls, plans], by local search and annealing until a share of the effort is spent."""
    scores = scorer(begin)
    improve_locally(scorer, bound, begin[:, int(scores.argmin())], share=share)
    if scorer.best is not None:
        begin = np.concatenate([begin, scorer.best[:, None]], axis=1)
    ends = anneal(scorer, begin, rounds=budget.rounds, chains=budget.chains, seed=seed, share=share)
    for i in range(min(_IMPROVED, ends.shape[1])):
        improve_locally(scorer, bound, ends[:, i], share=share)
    if scorer.best is not None:
        improve_locally(scorer, bound, scorer.best, share=share)


def _initial_plans(scorer: Scorer, starts: Sequence[Mapping[str, Candidate]], seed: int) -> Ints:
    """Return initial plans, [calls, plans]: `starts`, the fastest candidate of each call, and random plans."""
    tables = scorer.timeline.tables
    fastest = [int(np.argmin(tables.candidates(c).seconds)) for c in range(len(tables.calls))]
    random = np.random.default_rng(seed).integers(0, tables.sizes[:, None], (len(tables.sizes), _STARTS))
    given = [numbers for start in starts if (numbers := _surviving_candidates(scorer, start)) is not None]
    return np.concatenate([np.array([*given, fastest]).T, random], axis=1)


def _surviving_candidates(scorer: Scorer, given: Mapping[str, Candidate]) -> list[int] | None:
    """Return, for each call, the index of the candidate that is nearest to a plan's own candidate, among those that
    pruning left.

    The nearest candidate has the same mesh, then preferably the same layout, then the shortest seconds. Returns
    None if some mesh has no candidate left.
    """
    numbers = []
    for call in scorer.timeline.tables.calls:
        candidate = given[call.name]
        alike = [
            (o != candidate, o.layout != candidate.layout, o.seconds, i)
            for i, o in enumerate(scorer.timeline.problem.candidates[call.name])
            if o.placement.mesh == candidate.placement.mesh
        ]
        if not alike:
            return None
        numbers.append(min(alike)[-1])
    return numbers
