"""Intervals of predicted steps, and probabilities of being the fastest."""

from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from realrl.plan.plan import Plan
from realrl.planner.profile.profile import Profile, SweepSpread
from realrl.planner.report.calibrate import calibrate_profile
from realrl.planner.report.comparison import CallCosts, Comparison, Seconds
from realrl.planner.simulate.estimate import LEVEL
from realrl.planner.simulate.estimator import estimate_plan
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.uncertainty import sampled_steps
from realrl.planner.uncertainty.ranking import StepSampler, find_interval
from realrl.planner.uncertainty.sampled_steps import (
    SPREADS,
    CallErrors,
    Draws,
    Spread,
    find_call_errors,
    sample_step,
    widen,
)
from tests.planner.simulating.test_estimate import preset, sampled_plan, scenario

NOTHING = CallErrors("profile", Spread(machine=0.0, call=0.0))


def only(monkeypatch: pytest.MonkeyPatch, errors: CallErrors, moves: float = 0.0) -> None:
    """Let all calls have these errors, and what happens between calls those of `moves`."""
    monkeypatch.setattr(sampled_steps, "find_call_errors", lambda *_: errors)
    monkeypatch.setattr(sampled_steps, "MOVES", dict.fromkeys(sampled_steps.MOVES, moves))


@pytest.mark.parametrize("seed", range(6))
def test_samples_without_errors_are_the_estimate(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, NOTHING)
    of = scenario("a100-80g:2x4", ref_ema=0.99, ref_every=2)
    plan = sampled_plan(Random(seed), of)
    estimate, samples = estimate_plan(of, plan), sample_step(of, plan, Draws(count=3))
    np.testing.assert_allclose(samples.step, estimate.step_seconds)
    np.testing.assert_allclose(samples.repeated, estimate.repeated_seconds)


def test_nine_in_ten_of_other_samples_lie_in_the_interval() -> None:
    of = scenario()
    inside = []
    for name in ("symmetric", "heuristic", "disjoint"):
        interval = StepSampler(of).compare({name: estimate_plan(of, preset(name, of))})[name].interval
        truths = sample_step(of, preset(name, of), Draws(seed=1, count=4000)).step
        inside.append(np.mean([truth in interval for truth in truths]))
    assert inside == pytest.approx([LEVEL] * 3, abs=0.03)


def test_the_interval_holds_the_prediction_and_is_wider_where_less_is_known() -> None:
    of = scenario()
    plan = preset("heuristic", of)
    estimate = estimate_plan(of, plan)
    tables = find_interval(StepSampler(of)(plan).step)
    bare = replace(of.spec.groups[0], device=replace(of.spec.groups[0].device, measured=None))
    unknown = of.on(replace(of.spec, groups=(bare,)))
    sheets = find_interval(StepSampler(unknown)(plan).step)
    assert estimate.step_seconds in tables
    assert sheets.high / sheets.low > tables.high / tables.low


def test_an_error_of_the_machine_widens_intervals_and_leaves_the_ranking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = scenario()
    estimates = {name: estimate_plan(of, preset(name, of)) for name in ("symmetric", "heuristic")}
    first = min(estimates, key=lambda name: estimates[name].step_seconds)
    only(monkeypatch, CallErrors("profile", Spread(machine=0.5, call=0.0)))
    outlooks = StepSampler(of).compare(estimates)
    assert outlooks[first].fastest == 1.0
    assert outlooks[first].interval.high > 2 * estimates[first].step_seconds


def test_the_ranking_of_plans_does_not_depend_on_what_else_is_compared() -> None:
    of = scenario()
    plans = {name: preset(name, of) for name in ("symmetric", "heuristic", "disjoint")}
    alone = StepSampler(of).probability_of(plans["symmetric"], plans["heuristic"])
    sampler = StepSampler(of)
    sampler.compare({name: estimate_plan(of, plan) for name, plan in reversed(plans.items())})
    assert sampler.probability_of(plans["symmetric"], plans["heuristic"]) == alone


def test_probabilities_add_up_to_one_and_equal_plans_have_equal_ones() -> None:
    of = scenario()
    estimates = {name: estimate_plan(of, preset(name, of)) for name in ("symmetric", "heuristic", "disjoint")}
    outlooks = StepSampler(of).compare(estimates)
    assert sum(outlook.fastest for outlook in outlooks.values()) == pytest.approx(1.0)
    again = StepSampler(of).compare({**estimates, "mine.yaml": estimates["heuristic"]})
    assert again["mine.yaml"] == again["heuristic"] == outlooks["heuristic"]


def test_results_are_those_of_the_seed() -> None:
    of = scenario()
    estimates = {"symmetric": estimate_plan(of, preset("symmetric", of))}
    assert StepSampler(of, 3).compare(estimates) == StepSampler(of, 3).compare(estimates)
    assert StepSampler(of, 3).compare(estimates) != StepSampler(of, 4).compare(estimates)


def calibrated(of: Scenario, ratio: float = 1.5) -> tuple[Scenario, Plan]:
    """A scenario whose profile was corrected by a run of the plan that is returned."""
    plan = preset("symmetric", of)
    calls = tuple(
        CallCosts(
            call=call,
            placement=str(plan[call.name]),
            seconds=Seconds.of([ratio * of.call_cost(call, plan[call.name]).seconds] * 3),
            predicted_seconds=None,
            terms={},
            bytes=None,
            predicted_bytes=None,
        )
        for call in of.graph.calls
    )
    run = Comparison(
        cluster=str(plan.cluster),
        spec=of.spec,
        software={},
        models=dict(of.models),
        workload=of.workload,
        step=Seconds.of([1.0]),
        predicted_step_seconds=None,
        calls=calls,
        reallocations=(),
        reserved_bytes=None,
    )
    profile = calibrate_profile(None, run)
    return replace(of, cost=type(of.cost)(of.spec, profile)), plan


def test_a_run_narrows_the_interval_of_its_own_plan_most() -> None:
    before = scenario()
    after, plan = calibrated(before)
    other = preset("disjoint", before)

    def width(of: Scenario, plan: Plan) -> float:
        interval = find_interval(StepSampler(of)(plan).step)
        return interval.high / interval.low

    assert width(after, plan) < 0.75 * width(before, plan)
    assert width(after, plan) < width(after, other) < width(before, other)


def test_sources_of_times_are_told_apart() -> None:
    of = scenario()
    call = of.graph.call("actor.train")
    placement = preset("symmetric", of)[call.name]
    assert find_call_errors(of, call, placement).source == "tables"
    after, plan = calibrated(of)
    assert find_call_errors(after, call, plan[call.name]).source == "run"
    slower = replace(placement, strategy=replace(placement.strategy, dtype="float32"))
    assert find_call_errors(of, call, slower).source == "data sheet"


def test_a_profile_whose_sweeps_differ_makes_its_times_less_certain() -> None:
    sure = SPREADS["profile"]
    unsure = widen(sure, SweepSpread(layers=0.3, transfers=0.4))
    assert unsure.machine == pytest.approx(np.hypot(sure.machine, 0.3))
    assert unsure.term("tensor") == pytest.approx(np.hypot(sure.term("tensor"), 0.4))
    assert unsure.term("compute") == sure.term("compute")
    assert widen(sure, None) == sure


def test_profiles_keep_what_their_sweeps_differed_by_and_older_ones_have_none(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    given = Profile(device="cpu", software={}, sweeps=SweepSpread(layers=0.1))
    given.save(path)
    assert Profile.load(path) == given
    Profile(device="cpu", software={}).save(path)
    assert "sweeps" not in path.read_text() and Profile.load(path).sweeps is None
