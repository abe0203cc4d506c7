"""`realrl plan --try`: plans are run on this machine, and the fastest one is kept."""

import json
from pathlib import Path

import pytest

from realrl.algorithms.sft import train_graph
from realrl.cli.app import run_app
from realrl.plan.plan import Plan
from realrl.planner.profile.profile import Profile
from realrl.planner.report.make import make_report
from realrl.runtime import try_plans as trying
from realrl.runtime.processes.signals import Interrupted
from realrl.runtime.try_plans import LocalRuns, PlanTrials, TrialSettings, choose_contenders, try_plans
from tests.conftest import World
from tests.planner.profiles.test_calibrate import run
from tests.planner.simulating.test_estimate import scenario

SETTINGS = TrialSettings(count=3, minutes=1.0, arguments=["r.yaml"], cluster=None, profile=None)


def test_the_fastest_plan_as_measured_is_written_and_the_profile_corrected(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = world.recipe("sft", tmp_path, cluster="1x2", checkpoint={"every": 1})
    out, profile = tmp_path / "plan.yaml", tmp_path / "p.json"
    Profile(device="cpu", software={}).save(profile)
    options = ["--try", "2", "--try-minutes", "9", "--out", str(out), "--profile", str(profile), "--json"]
    assert run_app(["plan", str(recipe), *options]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    tried = {plan["name"]: plan for plan in found["tried"]["plans"]}
    assert found["tried"]["complete"] and len(tried) == 2
    assert all(
        plan["seconds"] > 0 and plan["steps"] >= 3 and plan["failure"] is None for plan in tried.values()
    )
    fastest = found["tried"]["fastest"]
    assert tried[fastest]["seconds"] == min(plan["seconds"] for plan in tried.values())
    contender = next(plan for plan in found["contenders"] if plan["name"] == fastest)
    written = Plan.load(out, train_graph())
    assert {name: str(place.mesh) for name, place in written.placements.items()} == {
        name: call["mesh"] for name, call in contender["plan"]["calls"].items()
    }
    assert len(Profile.load(profile).corrections) == 2
    assert not (tmp_path / "run").exists() and "try: " in captured.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--cluster", "h100:1x8"],
            "--try runs plans on this machine: device=cuda, but torch finds no GPU here",
        ),
        (["--cluster", "cpu:2x2"], "--try runs plans on this machine: cluster=2x2 has 2 nodes"),
        (["--cluster", "cpu:1x2", "--nodes", "1"], "leave out --nodes"),
        (["--cluster", "cpu:1x2", "--try-minutes", "0"], "--try-minutes: 0 must be above 0"),
        (["--cluster", "cpu:1x2", "launch.by=ray"], "leave launch.by=ray out"),
        (
            ["--cluster", "cpu:1x2", "models.actor.path=no/such/model", "models.actor.shape=null"],
            "no/such/model",
        ),
        pytest.param(
            ["--cluster", "cpu:1x2", "data.train=no-such.jsonl"],
            "no plan runs here",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_what_cannot_be_tried_here_is_one_error_message(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    overrides = [option for option in options if "=" in option]
    others = [option for option in options if "=" not in option]
    command = ["plan", str(world.recipe("sft", tmp_path)), *overrides, "--try", "2", *others, "--json"]
    assert run_app(command) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("realrl: ") and words in error


def test_plans_that_are_tried_are_distinct_and_most_probably_the_fastest() -> None:
    report = make_report(scenario("a100-80g:1x2"), effort=30_000)
    chosen = choose_contenders(report, 3)
    assert len(chosen) == 3
    plans = [contender.estimate.plan for contender in chosen.values()]
    assert all(plan not in plans[:i] for i, plan in enumerate(plans))
    odds = [contender.outlook.fastest for contender in chosen.values()]
    assert odds == sorted(odds, reverse=True)
    assert odds[-1] >= max(
        (c.outlook.fastest for c in report.contenders.values() if c.estimate.plan not in plans), default=0.0
    )


def test_an_interruption_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    report = make_report(scenario("a100-80g:1x2"), effort=30_000)
    interruption = Interrupted(2)
    asked: list[str] = []

    def measure(_: LocalRuns, name: str, steps: int) -> object:
        if asked:
            raise interruption
        asked.append(name)
        return run({"actor.train": 2.0}, steps=steps)

    monkeypatch.setattr(LocalRuns, "__call__", measure)
    trials = try_plans(report, SETTINGS, lambda _: None)
    assert trials.fastest is not None and trials.fastest.name == asked[0] and not trials.complete
    assert interruption.saved == "before all plans were tried"
    assert trying.find_fastest_plan(report, trials) == report.contenders[asked[0]].estimate.plan


def test_without_a_measurement_the_chosen_plan_stays() -> None:
    report = make_report(scenario("a100-80g:1x2"), effort=30_000)
    assert trying.find_fastest_plan(report, PlanTrials.of(report.contenders)) == report.chosen.plan


def test_a_run_that_only_measures_leaves_no_models_and_no_checkpoints(world: World, tmp_path: Path) -> None:
    recipe = world.recipe("sft", tmp_path, training={"steps": 2}, checkpoint={"last": False, "minutes": None})
    assert run_app(["train", str(recipe)]) == 0
    kept = {path.name for path in (tmp_path / "run").iterdir()}
    assert "costs.json" in kept and not {"checkpoints", "final", "actor"} & kept
    assert not list((tmp_path / "run").rglob("*.safetensors"))
