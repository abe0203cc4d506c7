"""Slow devices, and what a step loses by them."""

import math
from dataclasses import replace

import numpy as np
import pytest

from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.planner.simulate.estimator import estimate_plan
from realrl.planner.simulate.stragglers import Stragglers, expect_largest, simulate_stragglers
from tests.planner.searching.test_plan_report import GRAPH, scenario

OF = scenario("h100:1x8")
WHOLE = Placement(Mesh(0, 8), Strategy(dp=8))
TOGETHER = Plan(OF.spec.cluster, {call.name: WHOLE for call in GRAPH.calls})
APART = replace(
    TOGETHER,
    placements={
        call.name: Placement(Mesh(4 * (call.role in ("ref", "reward")), 4), Strategy(dp=4))
        for call in GRAPH.calls
    },
)


@pytest.mark.parametrize("jitter", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("count", [2, 8, 64])
def test_the_largest_of_random_factors_is_that_of_samples(jitter: float, count: int) -> None:
    rng = np.random.default_rng(0)
    factors = np.exp(jitter * rng.standard_normal((40_000, count)) - jitter**2 / 2)
    assert expect_largest(jitter, count) == pytest.approx(factors.max(axis=1).mean(), rel=0.003)


def test_the_largest_factor_grows_like_the_root_of_the_logarithm() -> None:
    assert expect_largest(0.03, 1) == expect_largest(0.0, 10_000) == 1.0
    for count in (1_000, 10_000):
        excess = math.log(expect_largest(1e-3, count)) / 1e-3
        assert 0.8 < excess / math.sqrt(2 * math.log(count)) < 1
    grown = [expect_largest(0.03, count) for count in (8, 128, 1024, 10_000)]
    assert grown == sorted(grown)


def test_a_step_without_slow_devices_is_as_it_was() -> None:
    for plan in (TOGETHER, APART):
        plain = estimate_plan(OF, plan)
        found = simulate_stragglers(OF, plan, Stragglers())
        assert found.step_seconds == pytest.approx(plain.step_seconds)
        assert found.repeated_seconds == pytest.approx(plain.repeated_seconds)


def test_a_slow_device_delays_the_calls_that_it_takes_part_in() -> None:
    for rank in (0, 7):
        found = simulate_stragglers(OF, TOGETHER, Stragglers(slow={rank: 1.5}))
        plain = estimate_plan(OF, TOGETHER)
        device = sum(
            s
            for call in plain.calls.values()
            for name, s in call.terms.items()
            if name in ("compute", "decode", "optimizer", "bubble", "launch")
        )
        assert found.step_seconds - plain.step_seconds == pytest.approx(0.5 * device)
    # Where the reference and the reward have devices of their own, only they wait for a slow one of these.
    plain = estimate_plan(OF, APART)
    actor, ref = (
        simulate_stragglers(OF, APART, Stragglers(slow={rank: 1.5})).step_seconds for rank in (0, 7)
    )
    assert plain.step_seconds <= ref < actor


def test_jitter_costs_more_on_more_devices() -> None:
    def lost(cluster: str, dp: int) -> float:
        of = scenario(cluster)
        place = Placement(Mesh(0, dp), Strategy(dp=dp))
        plan = Plan(of.spec.cluster, {call.name: place for call in GRAPH.calls})
        plain = simulate_stragglers(of, plan, Stragglers()).step_seconds
        return simulate_stragglers(of, plan, Stragglers(jitter=0.05)).step_seconds / plain

    assert 1 < lost("h100:1x2", 2) < lost("h100:1x8", 8) < lost("h100:2x8", 16)
