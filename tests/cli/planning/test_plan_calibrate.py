"""`realrl plan --calibrate`: the measurements of a run correct a profile."""

from pathlib import Path

import pytest

from realrl.cli.app import run_app
from realrl.planner.profile.profile import Profile
from realrl.planner.report.calibrate import calibrate_profile
from tests.planner.profiles.test_calibrate import run
from tests.planner.profiles.test_profile_file import profile


def calibrated(directory: Path, *more: str) -> int:
    run().save(directory)
    return run_app(["plan", "--calibrate", str(directory), *more])


def test_a_profile_is_corrected_in_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.json"
    profile().save(file)
    assert calibrated(tmp_path, "--profile", str(file)) == 0
    assert Profile.load(file) == calibrate_profile(profile(), run())
    captured = capsys.readouterr()
    assert captured.out == "" and f"profile: {file}" in captured.err
    row = next(line.split() for line in captured.err.splitlines() if "actor.generate" in line)
    assert row[:3] == ["actor.generate", "0-7", "4×2×1"] and row[-3:] == ["40", "s", "4"]


def test_where_there_is_no_profile_data_sheets_are_corrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert calibrated(tmp_path) == 0
    assert Profile.load(tmp_path / "profile.json") == calibrate_profile(None, run())


def test_the_profile_of_the_recipe_is_corrected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.json"
    profile().save(file)
    recipe = ["recipes/reference/ppo.yaml", f"profile={file}", "models.actor.shape=qwen2.5-0.5b"]
    assert calibrated(tmp_path, *recipe, "--cluster", "a100-80g:1x2", "--effort", "100000") == 0
    assert Profile.load(file) == calibrate_profile(profile(), run())
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "times of a100-80g measured (" in said
        and "but for actor, ref and tp=2 from tables and data sheets" in said
    )


def test_calibrating_from_a_directory_without_costs_is_a_user_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(["plan", "--calibrate", str(tmp_path)]) == 2
    assert f"{tmp_path} holds no costs.json" in capsys.readouterr().err


def test_the_plan_command_without_recipe_and_calibration_is_a_user_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_app(["plan"]) == 2
    assert capsys.readouterr().err == "realrl: name a recipe (a YAML file) to plan for\n"
