"""Successive halving of plans that are tried: which ones run, for how long, and which one wins."""

from collections.abc import Callable, Mapping

import pytest

from realrl.planner.report.comparison import Comparison
from realrl.runtime.try_plans import OutOfTime, PlanTrials, TrialFailed
from tests.planner.profiles.test_calibrate import run

Asked = list[tuple[str, int]]


def measuring(seconds: Mapping[str, float], asked: Asked) -> Callable[[str, int], Comparison]:
    """Measure plans that take these seconds, and note what was asked for."""

    def measure(name: str, steps: int) -> Comparison:
        asked.append((name, steps))
        return run({"actor.train": seconds[name]}, steps=steps)

    return measure


def test_the_faster_half_runs_twice_as_long_until_one_is_left() -> None:
    asked: Asked = []
    trials = PlanTrials.of("abcd")
    trials.run(measuring({"a": 4.0, "b": 1.0, "c": 3.0, "d": 2.0}, asked), 3)
    assert asked == [("a", 3), ("b", 3), ("c", 3), ("d", 3), ("b", 6), ("d", 6)]
    assert trials.complete and trials.fastest is trials.tried["b"]
    assert trials.tried["b"].steps == 9 and trials.tried["a"].steps == 3


def test_of_three_plans_two_go_on() -> None:
    asked: Asked = []
    trials = PlanTrials.of("abc")
    trials.run(measuring({"a": 1.0, "b": 2.0, "c": 3.0}, asked), 5)
    assert asked[3:] == [("a", 10), ("b", 10)]


def test_all_steps_of_a_plan_count_so_that_a_lucky_start_does_not_decide() -> None:
    times = {("a", 3): 1.0, ("a", 6): 3.0, ("b", 3): 2.0, ("b", 6): 2.0, ("c", 3): 1.9, ("c", 6): 1.9}
    trials = PlanTrials.of("abc")
    trials.run(lambda name, steps: run({"actor.train": times[name, steps]}, steps=steps), 3)
    assert trials.tried["a"].seconds == pytest.approx((3 * 1.0 + 6 * 3.0) / 9)
    assert trials.fastest is trials.tried["c"]


def test_a_plan_that_fails_is_dropped_and_the_others_go_on() -> None:
    asked: Asked = []
    measure = measuring({"b": 2.0, "c": 1.0}, asked)

    def failing(name: str, steps: int) -> Comparison:
        if name == "a":
            raise TrialFailed("out of memory")
        return measure(name, steps)

    trials = PlanTrials.of("abc")
    trials.run(failing, 3)
    assert trials.tried["a"].failure == "out of memory"
    assert trials.fastest is trials.tried["c"] and trials.complete


def test_where_every_plan_fails_none_is_the_fastest() -> None:
    def failing(name: str, steps: int) -> Comparison:
        raise TrialFailed(name)

    trials = PlanTrials.of("ab")
    trials.run(failing, 3)
    assert trials.fastest is None
    assert [trial.failure for trial in trials.tried.values()] == ["a", "b"]


@pytest.mark.parametrize(("before", "fastest"), [(0, None), (1, "a"), (2, "b"), (4, "b")])
def test_what_is_known_when_the_time_is_up_counts(before: int, fastest: str | None) -> None:
    asked: Asked = []
    measure = measuring({"a": 2.0, "b": 1.0, "c": 3.0}, asked)

    def limited(name: str, steps: int) -> Comparison:
        if len(asked) == before:
            raise OutOfTime
        return measure(name, steps)

    trials = PlanTrials.of("abc")
    trials.run(limited, 3)
    assert not trials.complete
    assert (trials.fastest.name if trials.fastest else None) == fastest
