"""Find a good plan and prove how good it is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from realrl.planner.evaluate.scorer import Improvement, Scorer
from realrl.planner.evaluate.shortage import DoesNotFit, explain_plan_shortage
from realrl.planner.evaluate.timeline import PlanEvaluation, Timeline
from realrl.planner.moves.transfers import Ints
from realrl.planner.search.branch_and_bound import prove
from realrl.planner.search.local import improve_locally
from realrl.planner.search.mcmc import anneal
from realrl.planner.search.prune import prune_candidates
from realrl.planner.space.problem import Assignment, Candidate, Problem

_STARTS, _IMPROVED = 64, 3
"""Random plans the chains begin with besides those given, and chains whose end is polished."""


@dataclass(frozen=True)
class SearchBudget:
    """How much a search does if it has the time. It ends sooner when the gap is proven."""

    chains: int = 128
    rounds: int = 1200
    nodes: int = 20_000_000


@dataclass(frozen=True)
class SearchResult:
    """The best plan that was found."""

    assignment: dict[str, int]
    """Call -> number of its option in the problem."""
    evaluation: PlanEvaluation
    lower_bound: float
    """No plan of the problem takes fewer seconds."""
    evaluations: int
    """Plans that were costed."""
    nodes: int
    """Sets of plans that were bounded."""
    search_seconds: float
    history: tuple[Improvement, ...]

    @property
    def gap(self) -> float:
        """By which part of its seconds the plan can be from the best, at most."""
        return 1 - self.lower_bound / self.evaluation.seconds if self.evaluation.seconds else 0.0


def search_plans(
    problem: Problem,
    *,
    seconds: float = 60.0,
    seed: int = 0,
    tolerance: float = 0.005,
    starts: Sequence[Assignment] = (),
    budget: SearchBudget | None = None,
) -> SearchResult:
    """The plan with the shortest step that is found in `seconds`, and a bound of all plans.

    Chains start from `starts` (for example presets) and at random; their ends are polished, then branch and
    bound looks for what they missed and stops when the plan is within `tolerance` (relative) of the bound.
    The same seed gives the same result where `seconds` do not make it hurry. Raises DoesNotFit if no plan is
    found that fits the memory of the devices.
    """
    budget = budget or SearchBudget()
    smaller, kept = prune_candidates(problem)
    scorer = Scorer(Timeline(smaller), seconds)
    begin = _initial_plans(scorer, [problem.chosen_candidates(start) for start in starts], seed)
    scores = scorer(begin)
    improve_locally(scorer, begin[:, int(scores.argmin())], part=0.2)
    if scorer.best is not None:
        begin = np.concatenate([begin, scorer.best[:, None]], axis=1)
    ends = anneal(scorer, begin, rounds=budget.rounds, chains=budget.chains, seed=seed, part=0.5)
    for i in range(min(_IMPROVED, ends.shape[1])):
        improve_locally(scorer, ends[:, i], part=0.55)
    if scorer.best is not None:
        improve_locally(scorer, scorer.best, part=0.6)
    proof = prove(scorer, tolerance=tolerance, max_nodes=budget.nodes, seed=seed)
    names = [call.name for call in scorer.timeline.tables.calls]
    best = scorer.best if scorer.best is not None else scorer.nearest_to_fit
    assert best is not None, "plans have been costed"
    assignment = {name: int(kept[name][i]) for name, i in zip(names, best, strict=True)}
    evaluation = Timeline(problem).evaluate(assignment)
    if scorer.best is None:
        shortage = explain_plan_shortage(problem, assignment, evaluation)
        raise DoesNotFit(replace(shortage, proven=bool(np.isinf(proof.lower_bound))))
    return SearchResult(
        assignment,
        evaluation,
        proof.lower_bound,
        scorer.evaluations,
        proof.nodes,
        scorer.elapsed,
        tuple(scorer.history),
    )


def _initial_plans(scorer: Scorer, starts: Sequence[Mapping[str, Candidate]], seed: int) -> Ints:
    """Plans to begin with, [calls, plans]: those given, the fastest option of each call, and random ones."""
    tables = scorer.timeline.tables
    fastest = [int(np.argmin(tables.candidates(c).seconds)) for c in range(len(tables.calls))]
    random = np.random.default_rng(seed).integers(0, tables.sizes[:, None], (len(tables.sizes), _STARTS))
    found = [numbers for start in starts if (numbers := _surviving_candidates(scorer, start)) is not None]
    return np.concatenate([np.array([*found, fastest]).T, random], axis=1)


def _surviving_candidates(scorer: Scorer, given: Mapping[str, Candidate]) -> list[int] | None:
    """Numbers of the options of a plan, or of what is left in their place; None where nothing is."""
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
