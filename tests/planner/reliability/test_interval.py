"""Expected steps and checkpoint intervals, compared with a run that fails at random."""

import math
import random
from dataclasses import replace

import pytest

from realrl.planner.reliability.goodput import Interruptions, best_interval, expected_step

OFTEN = Interruptions(rate=1 / 300, stop=3.0, write=3.0, restart=25.0)


def fail_at_random(of: Interruptions, step: float, every: int, checkpoints: int, seed: int) -> float:
    """Seconds per step of a run until so many checkpoints are complete, failure by failure.

    A step begins at once after the stop for a checkpoint, which becomes complete later; a failure takes the run
    back to the last complete one.
    """
    rng = random.Random(seed)
    now, next_failure, complete = 0.0, rng.expovariate(of.rate), 0
    begun: list[float] = []  # times at which the checkpoints after the last complete one begin
    resume = 0.0
    while complete < checkpoints:
        if not begun:
            begun = [resume + every * step]
        if next_failure < begun[0] + of.write:
            now = next_failure
            while True:  # restarts fail, too
                next_failure = now + rng.expovariate(of.rate)
                if next_failure >= now + of.restart:
                    break
                now = next_failure
            resume, begun = now + of.restart, []
            continue
        now = begun[0] + of.write
        complete += 1
        begun = [begun[0] + of.stop + every * step]
    return now / (every * checkpoints)


@pytest.mark.parametrize(
    "of",
    [
        OFTEN,
        replace(OFTEN, write=30.0),
        replace(OFTEN, stop=0.0, write=40.0),
        replace(OFTEN, rate=1 / 2000, restart=200.0),
    ],
)
@pytest.mark.parametrize("every", [5, 12])
def test_expected_steps_are_those_of_runs_that_fail_at_random(of: Interruptions, every: int) -> None:
    simulated = fail_at_random(of, 10.0, every, 30_000, seed=1)
    assert expected_step(of, 10.0, every) == pytest.approx(simulated, rel=0.015)


@pytest.mark.parametrize("seed", range(20))
def test_the_best_interval_is_that_of_all_intervals(seed: int) -> None:
    rng = random.Random(seed)
    stop = rng.choice([0.0, 10 ** rng.uniform(-1, 2)])
    of = Interruptions(
        rate=10 ** rng.uniform(-6, -3),
        stop=stop,
        write=stop + rng.choice([0.0, 10 ** rng.uniform(0, 3)]),
        restart=10 ** rng.uniform(1, 3),
    )
    step = 10 ** rng.uniform(0, 2)
    possible = [every for every in range(1, 20_000) if every * step >= of.write - of.stop - 1e-6]
    best = min(possible, key=lambda every: expected_step(of, step, every))
    found = best_interval(of, step)
    assert found in possible
    assert expected_step(of, step, found) == pytest.approx(expected_step(of, step, best), rel=1e-12)


def test_rare_failures_have_the_interval_of_young() -> None:
    of = Interruptions(rate=1 / (40 * 86_400), stop=60.0, write=60.0, restart=300.0)
    assert best_interval(of, 1.0) == pytest.approx(math.sqrt(2 * of.stop / of.rate), rel=0.01)


def test_without_failures_a_step_takes_its_own_time() -> None:
    of = replace(OFTEN, rate=1e-12)
    assert expected_step(of, 10.0, best_interval(of, 10.0)) == pytest.approx(10.0, rel=1e-4)


@pytest.mark.parametrize(
    "worse", [{"rate": 1 / 200}, {"restart": 50.0}, {"write": 20.0}, {"write": 9.0, "stop": 9.0}]
)
def test_steps_get_longer_with_failures_and_what_they_cost(worse: dict[str, float]) -> None:
    after = replace(OFTEN, **worse)
    assert expected_step(after, 10.0, 7) > expected_step(OFTEN, 10.0, 7)


def test_a_checkpoint_begins_after_the_one_before_is_complete() -> None:
    of = Interruptions(rate=1e-4, stop=0.0, write=95.0, restart=10.0)
    assert best_interval(of, 10.0) == 10


def test_failures_that_leave_no_time_have_no_expected_step() -> None:
    assert expected_step(replace(OFTEN, restart=1e6), 10.0, 1) == math.inf


def test_impossible_times_are_refused() -> None:
    for change in ({"rate": 0.0}, {"stop": 4.0}, {"restart": -1.0}):
        with pytest.raises(ValueError, match="is not possible"):
            replace(OFTEN, **change)
