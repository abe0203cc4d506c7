"""Vectorised evaluation of plans against a walk through the programs of each."""

import itertools
import random

import numpy as np
import pytest

from realrl.planner.search.many_plans import Timeline
from realrl.planner.space.problem import Problem
from realrl.program.order import producers
from tests.planner.exhaustive import cost
from tests.planner.reference import Walk, sampled_problem


def sampled_choices(rng: random.Random, problem: Problem, most: int) -> list[dict[str, int]]:
    names = [call.name for call in problem.graph.order]
    every = list(itertools.product(*(range(len(problem.candidates[name])) for name in names)))
    return [
        dict(zip(names, assignment, strict=True)) for assignment in rng.sample(every, min(most, len(every)))
    ]


def columns(search_space: list[dict[str, int]]) -> np.ndarray:
    return np.array([list(assignment.values()) for assignment in search_space]).T


@pytest.mark.parametrize("seed", range(12))
def test_vectorised_plan_costs_match_their_simulated_programs(seed: int) -> None:
    rng = random.Random(seed)
    problem = sampled_problem(rng)
    search_space = sampled_choices(rng, problem, 40)
    seconds, fill = Timeline(problem)(columns(search_space))
    walks = [Walk(problem, assignment) for assignment in search_space]
    assert seconds == pytest.approx([walk.seconds for walk in walks], rel=1e-9)
    possible = np.flatnonzero(np.isfinite(fill))
    assert fill[possible] == pytest.approx([walks[i].fill for i in possible], rel=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_vectorised_plan_costs_match_loops_over_devices(seed: int) -> None:
    rng = random.Random(100 + seed)
    problem = sampled_problem(rng)
    search_space = sampled_choices(rng, problem, 60)
    found = np.array([cost(problem, assignment, {}) for assignment in search_space]).T
    assert np.array(Timeline(problem)(columns(search_space))) == pytest.approx(found, rel=1e-9)


def test_detailed_evaluation_matches_the_vectorised_one() -> None:
    rng = random.Random(3)
    problem = sampled_problem(rng)
    search_space = sampled_choices(rng, problem, 20)
    timeline = Timeline(problem)
    seconds, fill = timeline(columns(search_space))
    details = [timeline.evaluate(assignment) for assignment in search_space]
    assert [d.seconds for d in details] == seconds.tolist()
    assert [d.fill for d in details] == fill.tolist()


def test_calls_start_after_those_they_depend_on() -> None:
    rng = random.Random(4)
    problem = sampled_problem(rng)
    for assignment in sampled_choices(rng, problem, 20):
        result = Timeline(problem).evaluate(assignment)
        for call in problem.graph.calls:
            for other in problem.graph.dependencies(call):
                if other in producers(problem.graph, call):
                    assert result.start[call.name] > result.end[other.name]
