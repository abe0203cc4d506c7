"""The search against exhaustive enumeration, and what its bound promises."""

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from realrl.planner.search.bound import Bound
from realrl.planner.search.groups import ALONE
from realrl.planner.search.many_plans import Timeline
from realrl.planner.search.mcmc import anneal
from realrl.planner.search.scorer import Scorer
from realrl.planner.search.search import SearchBudget, SearchResult, search_plans
from realrl.planner.search.shortage import DoesNotFit, explain_call_shortage
from realrl.planner.search.tables import Tables
from realrl.planner.space.problem import Problem
from tests.planner.exhaustive import cheapest, cost
from tests.planner.reference import sampled_problem

LITTLE = SearchBudget(plans=0, chains=32, rounds=20, nodes=50_000)


def check_against_all_plans(problem: Problem) -> None:
    best = cheapest(problem)
    if math.isinf(best):
        for budget in (LITTLE, SearchBudget()):
            with pytest.raises(DoesNotFit):
                search_plans(problem, budget=budget)
        return
    result = search_plans(problem, budget=LITTLE)
    assert best * (1 - 1e-9) <= result.evaluation.seconds <= best * 1.01
    assert result.lower_bound <= best * (1 + 1e-9)
    assert result.gap <= 0.01
    assert cost(problem, result.assignment, {})[1] <= 1
    # All of them are scored.
    result = search_plans(problem)
    assert result.nodes == 0
    assert result.lower_bound == pytest.approx(result.evaluation.seconds, rel=1e-12)
    assert result.evaluation.seconds == pytest.approx(best, rel=1e-9)
    assert cost(problem, result.assignment, {})[1] <= 1


@pytest.mark.parametrize("seed", range(20))
def test_the_search_finds_and_bounds_the_best_of_all_plans(seed: int) -> None:
    check_against_all_plans(sampled_problem(random.Random(seed), combinations=150))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(1000, 1008))
def test_the_search_finds_and_bounds_the_best_of_thousands_of_plans(seed: int) -> None:
    check_against_all_plans(sampled_problem(random.Random(seed), combinations=4000))


@pytest.mark.parametrize("nodes", [1, 30, 300])
@pytest.mark.parametrize("seed", range(5))
def test_the_bound_holds_when_the_search_is_cut_short(seed: int, nodes: int) -> None:
    problem = sampled_problem(random.Random(seed), combinations=150)
    try:
        result = search_plans(
            problem, tolerance=0.0, budget=SearchBudget(plans=0, chains=4, rounds=1, nodes=nodes)
        )
    except DoesNotFit:
        return
    assert result.lower_bound <= cheapest(problem) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_of_a_set_is_below_the_bound_of_the_set(seed: int) -> None:
    rng = random.Random(200 + seed)
    tables = Tables(sampled_problem(rng, combinations=10_000))
    bound, timeline = Bound(tables), Timeline(tables.problem)
    for _ in range(40):
        node = [rng.randrange(len(groups.level)) for groups in bound.groups]
        plans = []
        for groups, number in zip(bound.groups, node, strict=True):
            low, high = number, number + 1
            while groups.level[low] < ALONE:
                low, high = groups.child[low], groups.child_end[high - 1]
            plans.append(groups.candidate[[rng.randrange(low, high) for _ in range(50)]])
        seconds, fill = timeline(np.array(plans))
        least = np.where(fill <= 1, seconds, np.inf).min()
        for goal in (np.inf, *np.quantile(seconds, [0, 0.1, 0.5])):
            assert least >= bound(np.array(node)[:, None], goal=goal)[0] * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_the_bound_of_a_single_plan_is_not_above_its_seconds(seed: int) -> None:
    tables = Tables(sampled_problem(random.Random(700 + seed), combinations=100_000))
    bound, timeline = Bound(tables), Timeline(tables.problem)
    plans = np.random.default_rng(seed).integers(0, tables.sizes[:, None], (len(tables.sizes), 3000))
    seconds, fill = timeline(plans)
    nodes = np.array([groups.alone[row] for groups, row in zip(bound.groups, plans, strict=True)])
    for goal in (np.inf, *np.quantile(seconds, [0.01, 0.1, 0.5])):
        assert (bound(nodes, goal=goal) <= np.where(fill <= 1, seconds * (1 + 1e-9), np.inf)).all()


def test_annealing_cools_down_within_its_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline(sampled_problem(random.Random(3), combinations=5_000))
    starts = np.zeros((len(timeline.tables.sizes), 1), dtype=np.int64)
    calm = anneal(Scorer(timeline, 1e9), starts, rounds=40, chains=16, seed=0)
    asked = itertools.count()
    monkeypatch.setattr(Scorer, "used", lambda self, share=1.0: max(0, next(asked) - 1) / 40)
    # Asked before the rounds, and by each: of 4,000 the effort suffices for 40.
    hurried = anneal(Scorer(timeline, 1e9), starts, rounds=4000, chains=16, seed=0)
    assert (hurried == calm).all()


def test_searches_with_equal_seeds_find_the_same_plan() -> None:
    problem = sampled_problem(random.Random(7), combinations=30_000)
    first, second = (search_plans(problem, seed=5, budget=LITTLE) for _ in range(2))
    assert (first.assignment, first.lower_bound) == (second.assignment, second.lower_bound)
    assert first.evaluations == second.evaluations


def test_what_a_search_finds_does_not_depend_on_how_busy_the_machine_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = sampled_problem(random.Random(7), combinations=30_000)

    def search() -> SearchResult:
        return search_plans(problem, effort=600, tolerance=0.0, budget=SearchBudget(plans=0))

    first = search()
    assert 600 <= first.evaluations + first.nodes / 4 < 100_000
    hours = itertools.count(step=3600.0)
    monkeypatch.setattr("realrl.planner.search.scorer.time.perf_counter", lambda: next(hours))
    second = search()
    assert second.search_seconds > 3600
    assert replace(second, search_seconds=0, history=()) == replace(first, search_seconds=0, history=())


def test_a_search_is_never_worse_than_what_it_starts_from() -> None:
    problem = sampled_problem(random.Random(8), combinations=30_000)
    best = search_plans(problem, budget=LITTLE)
    hurried = search_plans(
        problem, starts=[best.assignment], budget=SearchBudget(plans=0, chains=1, rounds=0, nodes=1), seed=9
    )
    assert hurried.evaluation.seconds <= best.evaluation.seconds


def test_a_call_that_fits_no_device_is_named_with_its_shortage() -> None:
    problem = sampled_problem(random.Random(3))
    name = problem.graph.calls[-1].name
    candidates = tuple(
        replace(o, working_bytes=3 * problem.memory_bytes[0]) for o in problem.candidates[name]
    )
    with pytest.raises(DoesNotFit) as caught:
        search_plans(replace(problem, candidates={**problem.candidates, name: candidates}), budget=LITTLE)
    shortage = caught.value.shortage
    assert shortage.call == name
    assert shortage.factor >= 3


def test_the_shortage_of_a_role_at_home_lists_what_it_keeps() -> None:
    problem = sampled_problem(random.Random(3))
    call = next(call for call in problem.graph.calls if not call.is_function and problem.is_home(call))
    shortage = explain_call_shortage(problem, call, 0)
    assert shortage.resident_bytes == {call.role: problem.candidates[call.name][0].resident_bytes}


def crowded(rng: random.Random) -> Problem:
    """Each call would fit alone, but not all roles together."""
    problem = sampled_problem(rng, combinations=500, offload=False)
    room = problem.memory_bytes[0]
    candidates = {
        name: tuple(
            replace(o, resident_bytes=0.7 * room, working_bytes=0.1 * room, weights_bytes=0.1 * room)
            for o in given
            if o.placement.mesh.size > problem.cluster.size / 2
        )
        for name, given in problem.candidates.items()
    }
    return replace(problem, candidates=candidates) if all(candidates.values()) else crowded(rng)


@pytest.mark.parametrize("seed", range(4))
def test_roles_that_do_not_fit_together_are_listed_with_their_resident_bytes(seed: int) -> None:
    problem = crowded(random.Random(seed))
    roles = problem.graph.roles
    if len(roles) == 1:
        return
    with pytest.raises(DoesNotFit) as caught:
        search_plans(problem, budget=LITTLE)
    shortage = caught.value.shortage
    assert len(shortage.resident_bytes) > 1
    assert shortage.factor == pytest.approx(shortage.needed_bytes / shortage.limit_bytes)
    assert shortage.needed_bytes >= sum(shortage.resident_bytes.values())


def test_a_problem_restricted_to_some_nodes_has_only_meshes_inside_them() -> None:
    rng = random.Random(2)
    problem = next(p for p in iter(lambda: sampled_problem(rng), None) if p.cluster.nodes == 4)
    for nodes in (1, 2, 4):
        restricted = problem.restricted(nodes)
        for candidates in () if restricted is None else restricted.candidates.values():
            ends = [one.placement.mesh.first + one.placement.mesh.size for one in candidates]
            assert max(ends) <= problem.cluster.bounds[nodes]


@pytest.mark.parametrize("seed", [1, 5, 8])
def test_no_plan_that_any_part_of_a_search_has_found_is_lost(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorers: list[Scorer] = []

    def make(*given: Any) -> Scorer:
        scorers.append(Scorer(*given))
        return scorers[-1]

    monkeypatch.setattr("realrl.planner.search.search.Scorer", make)
    problem = sampled_problem(random.Random(seed), combinations=30_000)
    result = search_plans(problem, effort=300, budget=SearchBudget(plans=0))
    assert len(scorers) == 2, "the core has not been searched"
    assert result.evaluation.seconds <= min(s.best_seconds for s in scorers) * (1 + 1e-9)
