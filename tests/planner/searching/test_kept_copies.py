"""Copies of parameters that are kept, as a choice of the search."""

import math
import random
from dataclasses import replace

import pytest

from realrl.planner.search.many_plans import Timeline
from realrl.planner.search.search import search_plans
from realrl.planner.search.shortage import explain_plan_shortage
from realrl.planner.space.problem import Problem
from realrl.program.lower import home_placements, kept_copies
from tests.planner.exhaustive import cheapest
from tests.planner.reference import sampled_problem
from tests.planner.searching.test_agreement import sampled_choices


def choose_keeping(problem: Problem, ways: tuple[bool, ...]) -> Problem:
    """The problem with candidates that keep copies, or do not, or both, wherever a home may choose."""
    candidates = {}
    for call in problem.graph.calls:
        found = [replace(o, keep=False) for o in problem.candidates[call.name]]
        if problem.is_home(call) and len(problem.graph.role_calls(call.role)) > 1:
            found = [replace(o, keep=keep) for o in found for keep in ways]
        candidates[call.name] = tuple(dict.fromkeys(found))
    return replace(problem, candidates=candidates)


def test_copies_are_kept_where_the_step_is_shorter_with_them() -> None:
    kept = 0
    for seed in range(40):
        sampled = sampled_problem(random.Random(seed), combinations=30)
        problem = choose_keeping(sampled, (False, True))
        without = cheapest(choose_keeping(sampled, (False,)))
        if cheapest(problem) < without * (1 - 1e-9) and without < math.inf:
            result = search_plans(problem)
            assert problem.plan(result.assignment).keep
            assert result.evaluation.seconds < without
            kept += 1
    assert kept > 5, "copies have hardly ever helped"


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_finds_candidates_that_cost_the_same(seed: int) -> None:
    rng = random.Random(seed)
    problem = choose_keeping(sampled_problem(rng), (False, True))
    timeline = Timeline(problem)
    for assignment in sampled_choices(rng, problem, 20):
        plan = problem.plan(assignment)
        again = problem.find_assignment(plan)
        assert again is not None
        assert problem.plan(again) == plan
        assert timeline.evaluate(again) == timeline.evaluate(assignment)


def test_only_the_home_of_a_role_decides_what_is_kept() -> None:
    problem = next(p for p in map(sampled_problem, map(random.Random, range(99))) if "ref" in p.graph.roles)
    call = next(c for c in problem.graph.calls if c.role == "actor" and not problem.is_home(c))
    keeping = tuple(replace(o, keep=True) for o in problem.candidates[call.name])
    with pytest.raises(ValueError, match=f"{call.name} is not the home of a role"):
        replace(problem, candidates={**problem.candidates, call.name: keeping})


def test_a_shortage_counts_a_copy_where_its_role_does_not_live() -> None:
    apart = 0
    for seed in range(20):
        rng = random.Random(seed)
        problem = choose_keeping(sampled_problem(rng), (True,))
        timeline = Timeline(problem)
        for assignment in sampled_choices(rng, problem, 20):
            plan, candidates = problem.plan(assignment), problem.chosen_candidates(assignment)
            homes = home_placements(problem.graph, plan)
            for role, copies in kept_copies(problem.graph, plan, homes).items():
                for rank in {rank for copy in copies for rank in copy.ranks} - {*homes[role].ranks}:
                    there = [copy for copy in copies if rank in copy.ranks]
                    calls = problem.graph.role_calls(role)
                    weights = [
                        next(o.weights_bytes for c in calls if (o := candidates[c.name]).placement == copy)
                        for copy in there
                    ]
                    found = replace(timeline.evaluate(assignment), peak_rank=rank, by_host=False)
                    shortage = explain_plan_shortage(problem, assignment, found)
                    assert shortage.resident_bytes[role] == sum(weights)
                    apart += 1
    assert apart > 20, "copies have hardly ever been apart from their role"
