"""Search algorithm: every plan where they are few, else annealing, local search, branch and bound."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from realrl.planner.search.bound import Bound
from realrl.planner.search.branch_and_bound import BranchAndBound, Proof
from realrl.planner.search.groups import KIND, SIZE, CandidateGroups
from realrl.planner.search.local import improve_locally
from realrl.planner.search.many_plans import PlanEvaluation, Timeline
from realrl.planner.search.mcmc import anneal
from realrl.planner.search.prune import prune_candidates
from realrl.planner.search.scorer import Improvement, Scorer
from realrl.planner.search.shortage import DoesNotFit, explain_plan_shortage
from realrl.planner.space.candidate import Candidate
from realrl.planner.space.problem import Assignment, Problem
from realrl.program.arrays import Ints

_MOST = 8
"""Kinds of candidates per call and mesh size in the core: so many of the fastest, and as many of those that take
less memory than all faster ones."""


def select_core(problem: Problem, groups: list[CandidateGroups]) -> tuple[Problem, list[Ints]]:
    """Select the core of a problem; also returns the original indices of its candidates, by call."""
    kept = [_select_candidates(of) for of in groups]
    names = [call.name for call in problem.graph.order]
    return problem.select(dict(zip(names, kept, strict=True))), kept


def _select_candidates(groups: CandidateGroups) -> Ints:
    of_size = np.searchsorted(groups.size[groups.level == SIZE], groups.size, side="left")
    kinds = np.flatnonzero(groups.level == KIND)
    # Copies that are kept change little: later, plans of the core are improved by them.
    transient = kinds[~groups.may_keep[kinds]]
    kinds = transient if len(transient) else kinds
    chosen = np.concatenate(
        [_select_kinds(groups, kinds[of_size[kinds] == size]) for size in np.unique(of_size[kinds])]
    )
    ranges = zip(groups.child[chosen].tolist(), groups.child_end[chosen].tolist(), strict=True)
    return np.sort(np.concatenate([groups.candidate[begin:end] for begin, end in ranges]))


def _select_kinds(groups: CandidateGroups, kinds: Ints) -> Ints:
    """Select the fastest kinds, and others at equal distances from the leanest one on."""
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
"""Effort of a search unless it is told otherwise, which most searches for 128 devices do not use up."""
TOLERANCE = 0.01
"""Optimality gap that ends a search."""
_AT_ONCE = 2048
"""Plans that are scored at once."""
_STARTS, _IMPROVED = 64, 3
"""Number of random initial plans, and of final chains that local search improves."""


@dataclass(frozen=True)
class SearchBudget:
    """Work limits of a search, which ends earlier once the gap is proven: plans of a problem that are all scored,
    and, where there are more, chains, rounds, branch-and-bound nodes."""

    plans: int = 100_000
    chains: int = 128
    rounds: int = 1200
    nodes: int = 20_000_000


_SHORT_ROUNDS = 60
"""Rounds of the first chains: branch and bound often improves their plans faster than further rounds would."""
_CORE = 0.2
"""Share of the effort for the core of a problem."""
_POLISH = 0.1
"""Further share in which the plan of the core is improved by what the core lacks."""
_FIRST_PROOF = 0.6
"""Share of the effort after which chains are started again."""


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

    Of a problem with few plans all are scored. Else chains start from `starts` (presets, for example) and from
    random plans; local search improves their results. Then branch and bound searches the rest and stops once the
    plan is within `tolerance` (relative) of the lower bound; where that takes long, chains are started again, at
    length, before it goes on. `effort` limits plans that are scored, bounding four sets of them counting like one;
    results are reproducible by seed. Raises DoesNotFit if no plan is found that fits into device memory.
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
    # The tables of all other candidates would take longer than the plan.
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
    """Score every plan, if they are at most `limit`; returns whether it has."""
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
    """Search the core of a problem, then prove all of it, or search all of it where no plan of the core fits."""
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
    """Initial plans, [calls, plans]: those given, the fastest candidate of each call, and random ones."""
    tables = scorer.timeline.tables
    fastest = [int(np.argmin(tables.candidates(c).seconds)) for c in range(len(tables.calls))]
    random = np.random.default_rng(seed).integers(0, tables.sizes[:, None], (len(tables.sizes), _STARTS))
    given = [numbers for start in starts if (numbers := _surviving_candidates(scorer, start)) is not None]
    return np.concatenate([np.array([*given, fastest]).T, random], axis=1)


def _surviving_candidates(scorer: Scorer, given: Mapping[str, Candidate]) -> list[int] | None:
    """Indices of a plan's candidates, or of the nearest ones that pruning left; None if a mesh has none."""
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
