"""Simpler plans are preferred where predictions cannot tell them from the fastest."""

from dataclasses import replace
from random import Random

import pytest

from realrl.plan.plan import Plan
from realrl.planner.report.make import list_contenders
from realrl.planner.report.report import CHOSEN, FASTEST
from realrl.planner.search import plan_search
from realrl.planner.search.many_plans import Timeline
from realrl.planner.search.plan_search import find_best_plan
from realrl.planner.search.variants import Variants
from realrl.planner.simulate.estimate import CONVINCING, Estimate
from realrl.planner.simulate.estimator import estimate_plan
from realrl.planner.space.build import build_problem
from realrl.planner.space.problem import Assignment, Problem
from realrl.planner.uncertainty import ranking
from realrl.planner.uncertainty.ranking import MOST_LONGER, choose_plan, count_parts
from tests.planner.simulating.test_estimate import preset, scenario

OF = scenario()
SIMPLE, COMPLEX = (estimate_plan(OF, preset(name, OF)) for name in ("symmetric", "disjoint"))


class Odds:
    """A sampler that knows the probability that the fastest plan is faster than any other."""

    def __init__(self, probability: float) -> None:
        self.probability = probability

    def probability_of(self, plan: Plan, other: Plan) -> float:
        return 0.0 if plan == other else self.probability


def choose(longer: float, probability: float) -> Estimate:
    """Choose between a complex plan of 10 s and a simple one that takes longer by a fraction."""
    fastest, other = replace(COMPLEX, step_seconds=10.0), replace(SIMPLE, step_seconds=10.0 * (1 + longer))
    return choose_plan(OF.graph, Odds(probability), [other, fastest], lambda e: e.step_seconds)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("longer", "probability", "plan"),
    [
        (MOST_LONGER / 2, CONVINCING - 0.01, SIMPLE.plan),
        (MOST_LONGER * 1.1, CONVINCING - 0.01, COMPLEX.plan),
        (MOST_LONGER / 2, CONVINCING, COMPLEX.plan),
    ],
)
def test_a_simpler_plan_is_preferred_if_it_is_nearly_as_fast_and_the_odds_are_not_convincing(
    longer: float, probability: float, plan: Plan
) -> None:
    assert count_parts(OF.graph, SIMPLE.plan) < count_parts(OF.graph, COMPLEX.plan)
    assert choose(longer, probability).plan == plan


def test_a_plan_that_is_both_faster_and_simpler_is_chosen() -> None:
    assert choose(-0.01, 0.5).plan == SIMPLE.plan


def test_parts_are_layouts_calls_away_from_home_copies_and_offloaded_state() -> None:
    symmetric = preset("symmetric", OF)
    assert count_parts(OF.graph, symmetric) == 1
    assert count_parts(OF.graph, replace(symmetric, offload=("ref",), offload_optimizer=("actor",))) == 3
    generate = preset("heuristic", OF)["actor.generate"]
    placements = {**symmetric.placements, "actor.generate": generate}
    assert count_parts(OF.graph, replace(symmetric, placements=placements)) == 3
    assert count_parts(OF.graph, replace(symmetric, placements=placements, keep=("actor",))) == 4


@pytest.fixture(scope="module")
def problem() -> Problem:
    return build_problem(scenario("a100-80g:1x4"))


def sample(problem: Problem, rng: Random) -> Assignment:
    return {name: rng.randrange(len(found)) for name, found in problem.candidates.items()}


def seconds_of(problem: Problem, assignment: Assignment) -> float:
    evaluation = Timeline(problem).evaluate(assignment)
    return evaluation.seconds if evaluation.fits else float("inf")


@pytest.mark.parametrize("seed", range(4))
def test_a_simplified_plan_has_no_simpler_neighbour_that_is_fast_enough(problem: Problem, seed: int) -> None:
    rng = Random(seed)
    begin = next(a for a in iter(lambda: sample(problem, rng), None) if seconds_of(problem, a) < float("inf"))
    most = 1.1 * seconds_of(problem, begin)
    found = Variants(problem).simplify(begin, most)
    parts = count_parts(OF.graph, problem.plan(found))
    assert seconds_of(problem, found) <= most and parts <= count_parts(OF.graph, problem.plan(begin))
    for name, candidates in problem.candidates.items():
        for i in rng.sample(range(len(candidates)), 8):
            other = {**found, name: i}
            if count_parts(OF.graph, problem.plan(other)) < parts:
                assert seconds_of(problem, other) > most


def degrees_of(plan: Plan) -> tuple[tuple[int, int, int], ...]:
    strategies = (place.strategy for place in plan.placements.values())
    return tuple((strategy.dp, strategy.tp, strategy.pp) for strategy in strategies)


def test_runners_up_are_the_fastest_plans_one_change_away_with_other_degrees() -> None:
    best = find_best_plan(OF).found
    runners_up = Variants(best.problem).find_runners_up(best.result.assignment, 3)
    degrees = [degrees_of(plan) for plan in (best.plan, *map(best.problem.plan, runners_up))]
    assert len(set(degrees)) == 4
    seconds = [seconds_of(best.problem, assignment) for assignment in runners_up]
    assert seconds == sorted(seconds)
    for name in ("actor.train", "ref.inference"):
        for i in range(len(best.problem.candidates[name])):
            other = {**best.result.assignment, name: i}
            new = degrees_of(best.problem.plan(other))
            assert new in degrees or seconds_of(best.problem, other) >= seconds[-1]


def test_the_report_names_the_faster_plan_that_a_simpler_one_was_preferred_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = scenario("a100-80g:1x4")
    plain = find_best_plan(of)
    assert plain.estimate.step_seconds <= plain.fastest.step_seconds * (1 + MOST_LONGER)
    monkeypatch.setattr(plan_search, "MOST_LONGER", 0.5)
    monkeypatch.setattr(ranking, "MOST_LONGER", 0.5)
    monkeypatch.setattr(ranking, "CONVINCING", 1.01)
    best = find_best_plan(of)
    contenders = list_contenders(of, best)
    assert contenders[CHOSEN].parts < contenders[FASTEST].parts
    assert contenders[FASTEST].estimate.step_seconds == plain.fastest.step_seconds
    assert best.gap > plain.gap
