"""Seconds of a generate call whose rows wait for their environment, beside a simulation of every row."""

import heapq
import math
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from realrl.plan.placement import Placement
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CallCost, CostModel
from realrl.planner.workload.environment import EnvironmentTimes, EnvironmentWork
from realrl.planner.workload.generation import split_generation
from realrl.planner.workload.workload import Workload
from tests.planner.problems import SMALL, call, place, stored

MODEL = CostModel(ClusterSpec.parse("h100:1x8"))
ITEMS, TOKENS, GIVEN = 63, 512, 112
"""Items fill the places of `TIGHT` three times, because predictions know no last round that is nearly empty."""
STEP = Workload(ITEMS, (128,), (TOKENS,), max_new_tokens=TOKENS)

ROOMY, TIGHT = place(1, tokens=1 << 20), place(1)


def predict(work: Workload, place: Placement = ROOMY) -> CallCost:
    return MODEL.call(call("actor.generate"), stored(SMALL, "lm", "bfloat16"), place, work)


def with_environment(
    seconds: tuple[float, ...], turns: int = 8, *, at_once: int = 1 << 10, given: int = GIVEN
) -> Workload:
    times = EnvironmentTimes(seconds, (turns,), (given,))
    return replace(STEP, environment=EnvironmentWork(times, at_once))


def measure_step(rows: int) -> float:
    """Seconds of a decode step of this many rows."""
    longer, shorter = (
        predict(replace(STEP, items=rows, answers=(tokens,), prompts=(128,))).seconds
        for tokens in (TOKENS, TOKENS - 128)
    )
    return (longer - shorter) / 128


def simulate(
    seconds: tuple[float, ...], turns: int, at_once: int, places: int, rows_at_once: int = ITEMS
) -> float:
    """Seconds until every row has had its turns, if up to `places` rows share decode steps, objects answer in the
    order in which they were asked, and `rows_at_once` rows are under way."""
    draw = np.random.default_rng(7)
    known = np.array([1, 2, 4, 8, 16, 32, 64])
    step_seconds = [measure_step(rows) for rows in known]
    per_turn = (TOKENS - GIVEN) // turns
    free = [0.0] * at_once
    clock = 0.0
    back: list[tuple[float, int]] = []
    left = dict.fromkeys(range(ITEMS), turns)
    running: dict[int, int] = {}
    waiting: list[int] = []

    def ask(row: int) -> None:
        begin = max(clock, heapq.heappop(free))
        heapq.heappush(free, end := begin + draw.choice(seconds))
        heapq.heappush(back, (end, row))

    begun = iter(left)
    for row in islice(begun, rows_at_once):
        ask(row)
    while running or back:
        while back and (back[0][0] <= clock or not running):
            at, row = heapq.heappop(back)
            clock = max(clock, at)
            if left[row]:
                waiting.append(row)
            elif (another := next(begun, None)) is not None:
                ask(another)
            while waiting and len(running) < places:
                running[row := waiting.pop(0)] = per_turn
                left[row] -= 1
        if running:
            clock += float(np.interp(len(running), known, step_seconds))
            for row in [*running]:
                running[row] -= 1
                if not running[row]:
                    del running[row]
                    ask(row)
            while waiting and len(running) < places:
                running[row := waiting.pop(0)] = per_turn
                left[row] -= 1
    return clock


CASES = {
    "short": ((0.01,), 8, 1 << 10),
    "long": ((2.0,), 8, 1 << 10),
    "as-long-as-a-turn": ((0.2,), 8, 1 << 10),
    "different": ((0.05, 0.1, 0.2, 1.0), 8, 1 << 10),
    "one-turn": ((1.0,), 1, 1 << 10),
    "queues": ((0.5,), 8, 8),
    "one-object-at-a-time": ((0.05,), 4, 1),
}


@pytest.mark.parametrize("where", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("case", CASES)
def test_predictions_are_close_to_a_simulation_of_every_row(case: str, where: Placement) -> None:
    seconds, turns, at_once = CASES[case]
    work = with_environment(seconds, turns, at_once=at_once)
    predicted = predict(work, where)
    places = split_generation(work.work(call("actor.generate")), where.strategy, cpu=False).cache.rows
    # The simulation knows no prefill.
    found = predicted.seconds - predicted.terms["compute"] - predicted.captures
    assert found == pytest.approx(simulate(seconds, turns, at_once, places), rel=0.2)


@pytest.mark.parametrize("agents", [4, 16, 256])
def test_a_limit_of_agents_at_a_time_is_predicted(agents: int) -> None:
    times = EnvironmentTimes((0.05, 0.2), (8,), (GIVEN,), agents=True)
    work = replace(STEP, environment=EnvironmentWork(times, math.inf, rows_at_once=agents))
    predicted = predict(work)
    places = split_generation(work.work(call("actor.generate")), ROOMY.strategy, cpu=False).cache.rows
    found = predicted.seconds - predicted.terms["compute"] - predicted.captures
    assert found == pytest.approx(simulate((0.05, 0.2), 8, 1 << 10, places, agents), rel=0.2)


def test_an_environment_that_takes_no_time_and_gives_nothing_changes_little() -> None:
    quick = predict(with_environment((0.0,), 1, given=0))
    assert quick.seconds == pytest.approx(predict(STEP).seconds, rel=0.02)


def test_the_term_is_what_waiting_adds() -> None:
    alone = predict(with_environment((0.0,))).seconds
    for seconds in (0.001, 0.2, 30.0):
        waiting = predict(with_environment((seconds,)))
        assert alone + waiting.terms["environment"] == pytest.approx(waiting.seconds, rel=0.1)
    assert waiting.terms["environment"] == pytest.approx(9 * 30, rel=0.1)
    assert "environment" not in predict(STEP).terms


def test_given_tokens_are_prefilled_instead_of_sampled() -> None:
    few, many = (predict(with_environment((0.0,), given=given)) for given in (0, 400))
    assert many.terms["decode"] < 0.4 * few.terms["decode"]
    assert many.terms["compute"] > few.terms["compute"]
