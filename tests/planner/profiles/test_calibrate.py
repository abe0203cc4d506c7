"""Calibration of profiles from runs."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from realrl.algorithms.ppo import train_graph
from realrl.config.errors import UserError
from realrl.plan.placement import Mesh, Placement, function_placement
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.profile.corrections import find_correction
from realrl.planner.profile.profile import Profile
from realrl.planner.report.calibrate import calibrate_profile, describe_times
from realrl.planner.report.comparison import CallCosts, Comparison, Seconds
from tests.planner.problems import GRAPH, GROUPED, SMALL, STEP, call, place, stored
from tests.planner.profiles.test_profile_file import profile as measured_profile
from tests.rewards import function_reward

SPEC = ClusterSpec.parse("a100-80g:1x8")
MODELS = {role: stored(SMALL, "lm" if role in ("actor", "ref") else "scalar") for role in GRAPH.roles}
PLACES = {"actor.generate": place(4, 2), "actor.train": place(2, 2, 2), "critic.train": place(8)}
TIMES = {"actor.generate": 40.0, "critic.inference": 1.5, "actor.train": 17.0, "critic.train": 60.0}
STEPS = 4


def run(
    times: Mapping[str, float] = TIMES,
    spec: ClusterSpec | None = SPEC,
    steps: int = STEPS,
    places: Mapping[str, Placement] = PLACES,
) -> Comparison:
    """A run in which calls took these seconds."""
    calls = tuple(
        CallCosts(
            call=call(name),
            placement=str(places.get(name, place(8))),
            seconds=Seconds(median=seconds, least=seconds / 2, most=seconds * 3, steps=steps),
            predicted_seconds=None,
            terms={},
            bytes=None,
            predicted_bytes=None,
        )
        for name, seconds in times.items()
    )
    whole = sum(times.values())
    return Comparison(
        cluster="1x8",
        spec=spec,
        software={"torch": "2.13"},
        models=MODELS,
        workload=STEP,
        step=Seconds(median=whole, least=whole, most=whole, steps=steps),
        predicted_step_seconds=None,
        calls=calls,
        reallocations=(),
        reserved_bytes=None,
    )


def seconds(profile: Profile | None, name: str, placement: Placement | None = None) -> float:
    where = placement or PLACES.get(name, place(8))
    return CostModel(SPEC, profile).call(call(name), MODELS[call(name).role], where, STEP).seconds


@pytest.mark.parametrize("profile", [None, measured_profile()], ids=["roofline", "profile"])
@pytest.mark.parametrize("name", TIMES)
def test_after_calibration_the_prediction_is_the_measurement(profile: Profile | None, name: str) -> None:
    assert seconds(calibrate_profile(profile, run()), name) == pytest.approx(TIMES[name])


def test_calibrating_again_changes_nothing() -> None:
    once = calibrate_profile(None, run())
    assert calibrate_profile(once, run()) == once


def test_a_newer_run_replaces_corrections_of_the_same_calls_only() -> None:
    twice = calibrate_profile(calibrate_profile(None, run()), run({"actor.train": 20.0}))
    assert seconds(twice, "actor.train") == pytest.approx(20)
    assert seconds(twice, "actor.generate") == pytest.approx(TIMES["actor.generate"])
    assert len(twice.corrections) == len(TIMES)


def test_calibration_keeps_the_proportions_of_terms() -> None:
    arguments = (call("actor.train"), MODELS["actor"], PLACES["actor.train"], STEP)
    before = CostModel(SPEC).call(*arguments)
    after = CostModel(SPEC, calibrate_profile(None, run())).call(*arguments)
    factor = TIMES["actor.train"] / before.seconds
    assert after.terms == pytest.approx({name: factor * s for name, s in before.terms.items()})


def test_calls_of_the_same_kind_and_model_are_corrected_by_the_nearest() -> None:
    calibrated, train = calibrate_profile(None, run()), call("critic.train")

    def ratio(placement: Placement) -> float:
        return seconds(calibrated, "critic.train", placement) / seconds(None, "critic.train", placement)

    exact = ratio(place(8))
    assert ratio(place(4)) == pytest.approx(exact) and ratio(place(1, 8)) == pytest.approx(exact)
    two = calibrate_profile(calibrated, run({"critic.train": 9.0}, places={"critic.train": place(1, 8)}))
    nearest = find_correction(two.corrections, train, MODELS["critic"], place(1, 4).strategy)
    assert nearest == pytest.approx(9.0 / seconds(None, "critic.train", place(1, 8)))


def test_equally_near_corrections_are_averaged_by_their_steps() -> None:
    name, other = "reward.inference", "critic.inference"
    calibrated = calibrate_profile(
        None, run({name: seconds(None, name) * 2, other: seconds(None, other) * 2})
    )
    longer = calibrate_profile(calibrated, run({other: seconds(None, other) * 16}, steps=2 * STEPS))
    third = replace(call(other), name="other.inference")
    found = find_correction(longer.corrections, third, MODELS["critic"], place(8).strategy)
    assert found == pytest.approx((2 * 16 * 16) ** (1 / 3))


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("actor.train", stored(GROUPED)),
        ("actor.train", stored(SMALL, "lm", 4)),
        ("ref.inference", stored(SMALL)),
    ],
    ids=["other sizes", "another type", "another kind"],
)
def test_corrections_do_not_apply_to_other_kinds_or_models(name: str, model: object) -> None:
    corrections = calibrate_profile(None, run()).corrections
    assert find_correction(corrections, call(name), model, place(8).strategy) == 1  # type: ignore[arg-type]


def test_corrections_do_not_apply_to_other_families_of_equal_sizes() -> None:
    corrections = calibrate_profile(None, run()).corrections
    other = stored(SMALL.model_copy(update={"family": "qwen2"}))
    assert find_correction(corrections, call("actor.train"), other, place(8).strategy) == 1


def test_a_profile_file_names_the_family_of_corrected_calls(tmp_path: Path) -> None:
    calibrate_profile(None, run()).save(tmp_path / "p.json")
    text = (tmp_path / "p.json").read_text()
    assert text.count('"family": "llama"') == len(TIMES)
    (tmp_path / "p.json").write_text(re.sub(r'"family": "llama",\s*', "", text))
    with pytest.raises(UserError, match=r"corrections.0.shape.family: missing"):
        Profile.load(tmp_path / "p.json")


def test_corrections_ignore_model_properties_without_effect_on_time() -> None:
    shape = SMALL.model_copy(update={"init_std": 0.5, "max_positions": 77})
    corrections = calibrate_profile(None, run()).corrections
    assert find_correction(corrections, call("actor.train"), stored(shape), place(8).strategy) != 1


def test_corrections_do_not_apply_to_other_device_kinds() -> None:
    calibrated, elsewhere = calibrate_profile(None, run()), ClusterSpec.parse("h100:1x8")
    arguments = (call("actor.train"), MODELS["actor"], place(8), STEP)
    assert CostModel(elsewhere, calibrated).call(*arguments) == CostModel(elsewhere).call(*arguments)


def test_runs_without_known_devices_of_the_profile_are_rejected() -> None:
    with pytest.raises(UserError, match="profile is of a100-80g, but the run was on h100"):
        calibrate_profile(measured_profile(), run(spec=ClusterSpec.parse("h100:1x8")))
    with pytest.raises(UserError, match="kind of its devices"):
        calibrate_profile(None, run(spec=None))


def test_cost_files_round_trip(tmp_path: Path) -> None:
    run().save(tmp_path)
    assert Comparison.load(tmp_path) == run()
    calibrated = calibrate_profile(measured_profile(), run())
    calibrated.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == calibrated


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no costs.json"),
        ("no", "not valid JSON"),
        ('{"version": 2}', "version 2"),
        ("[]", "costs.json: "),
        ('{"version": 1, "format": "realrl costs"}', "missing"),
    ],
)
def test_invalid_cost_files_are_rejected_with_one_message(
    tmp_path: Path, text: str | None, words: str
) -> None:
    if text is not None:
        (tmp_path / "costs.json").write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        Comparison.load(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))


REWARD = train_graph(minibatches=4, reward=function_reward("reward.py:score")).call("reward.function")
HOSTS = function_placement(Mesh(0, 4))


def of_a_function(seconds: float) -> Comparison:
    """A run in which a function took these seconds on each of four ranks."""
    times = Seconds(median=seconds, least=seconds, most=seconds, steps=STEPS)
    costs = CallCosts(
        call=REWARD,
        placement=str(HOSTS),
        seconds=times,
        waited=times,
        predicted_seconds=None,
        terms={},
        bytes=None,
        predicted_bytes=None,
    )
    return run().model_copy(update={"calls": (costs,)})


def test_a_function_takes_per_item_what_it_took_in_a_run(tmp_path: Path) -> None:
    profile = calibrate_profile(None, of_a_function(3.2))
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    for ranks in (1, 4, 8):
        cost = CostModel(SPEC, profile).call(REWARD, None, function_placement(Mesh(0, ranks)), STEP)
        assert cost.seconds == pytest.approx(3.2 * 4 / ranks)
    newer = calibrate_profile(profile, of_a_function(1.6))
    assert CostModel(SPEC, newer).call(REWARD, None, HOSTS, STEP).seconds == pytest.approx(1.6)


def test_a_function_no_run_has_measured_counts_nothing_and_that_is_said() -> None:
    assert CostModel(SPEC).call(REWARD, None, HOSTS, STEP).terms == {}
    twice = ["reward.py:score"] * 2
    said = "; ".join(describe_times(None, "", SPEC, MODELS, twice))
    assert "reward.py:score not measured, so counted as 0 s" in said and said.count("reward.py:score") == 1
    profile = calibrate_profile(None, of_a_function(3.2))
    assert "not measured" not in "; ".join(describe_times(profile, "p", SPEC, MODELS, ["reward.py:score"]))
