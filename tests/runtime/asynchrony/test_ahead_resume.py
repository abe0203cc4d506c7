"""Checkpoints of runs whose sampling runs ahead hold the batches under way."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from realrl.cli.app import run_app
from realrl.runtime.resume import Spike, SpikeDetector
from realrl.testing.compare import read_metrics
from tests.conftest import World
from tests.runtime.asynchrony.test_ahead_runs import learnt, part, write_recipe
from tests.runtime.checkpoints.interrupted import interrupt
from tests.runtime.checkpoints.test_resume import lines, read_models

SAVING = {"checkpoint__every": 1, "checkpoint__keep": 10}


@pytest.mark.parametrize(
    "settings",
    [
        {"staleness": 1},
        {"staleness": 2},
        {"staleness": 3, "partial": True},
        {"staleness": 2, "partial": True, "overlap": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("apart", [False, True])
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(
    world: World, tmp_path: Path, settings: dict[str, Any], apart: bool
) -> None:
    ema = {"ppo__ref_ema": 0.5, "ppo__ref_every": 2}
    recipe = write_recipe(world, tmp_path / "whole", "ppo", 0, **SAVING, **ema, asynchrony=settings)
    recipe = part(recipe) if apart else recipe
    assert run_app(["train", str(recipe)]) == 0
    whole = tmp_path / "whole" / "run"
    for step in (1, 4) if apart else (1, 2, 4):
        resumed = interrupt(whole, step, tmp_path / f"after-{step}")
        assert run_app(["train", str(recipe), f"run_dir={resumed}"]) == 0
        expected, found = read_models(whole), read_models(resumed)
        assert expected.keys() == found.keys()
        assert all(expected[name].equal(found[name]) for name in expected)
        assert lines(resumed) == lines(whole)


@pytest.mark.parametrize("partial", [False, True])
def test_a_run_resumes_on_other_ranks(world: World, tmp_path: Path, partial: bool) -> None:
    settings = {"staleness": 2, "partial": partial}
    apart = part(write_recipe(world, tmp_path / "apart", "grpo", 0, **SAVING, asynchrony=settings), size=3)
    assert run_app(["train", str(apart)]) == 0
    resumed = interrupt(tmp_path / "apart" / "run", 2, tmp_path / "moved")
    changes = [f"run_dir={resumed}", "cluster=1x1", "plan=symmetric"]
    assert run_app(["train", str(apart), *changes]) == 0
    rows = [row["metrics"] for row in read_metrics(resumed)]
    for row, wanted in zip(rows, learnt(apart), strict=True):
        assert {name: row[name] for name in wanted} == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_batches_of_another_staleness_are_sampled_again(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(world, tmp_path / "whole", "grpo", 2, **SAVING)
    assert run_app(["train", str(recipe)]) == 0
    for staleness in (0, 1):
        resumed = interrupt(tmp_path / "whole" / "run", 2, tmp_path / f"to-{staleness}")
        changes = [f"run_dir={resumed}", f"asynchrony.staleness={staleness}", "resume=changed"]
        capsys.readouterr()
        assert run_app(["train", str(recipe), *changes]) == 0
        assert "batches under way: 2 are sampled again" in capsys.readouterr().err
        assert [row["step"] for row in read_metrics(resumed)] == [1, 2, 3, 4, 5]
        ages = [row["metrics"].get("actor.train/staleness", 0) for row in read_metrics(resumed)]
        assert ages == [0, 1, 0, staleness, staleness]


@pytest.mark.parametrize(
    "change",
    [["asynchrony.partial=false", "asynchrony.overlap=true"], ["generation.max_new_tokens=20"]],
    ids=["whole", "longer"],
)
def test_parts_of_answers_are_not_continued_as_other_parts(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: list[str]
) -> None:
    settings = {"staleness": 1, "partial": True, "overlap": False}
    # Without a function, both settings have the same keys under way.
    recipe = world.recipe("grpo", tmp_path, **SAVING, asynchrony=settings)
    assert run_app(["train", str(recipe)]) == 0
    resumed = interrupt(tmp_path / "run", 2, tmp_path / "moved")
    capsys.readouterr()
    assert run_app(["train", str(recipe), f"run_dir={resumed}", *change, "resume=changed"]) == 0
    assert "batches under way: 1 is sampled again" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change", ["policy.samples=2", "data.batch=8", "generation.max_new_tokens=9", "data", "reward"]
)
def test_batches_of_another_recipe_are_sampled_again(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    recipe = write_recipe(world, tmp_path / "whole", "grpo", 2, **SAVING)
    settings = yaml.safe_load(recipe.read_text())
    reward, data = tmp_path / "whole" / "reward.py", tmp_path / "data.jsonl"
    data.write_text(Path(settings["data"]["train"]).read_text())
    settings["data"]["train"] = str(data)
    recipe.write_text(yaml.safe_dump(settings))
    assert run_app(["train", str(recipe)]) == 0
    resumed, changes = interrupt(tmp_path / "whole" / "run", 2, tmp_path / "moved"), [change]
    if change == "data":
        data.write_text("".join(data.read_text().splitlines(keepends=True)[::-1]))
        changes = []
    elif change == "reward":
        reward.write_text(reward.read_text().replace("5", "7"))
        changes = []
    capsys.readouterr()
    assert run_app(["train", str(recipe), f"run_dir={resumed}", *changes, "resume=changed"]) == 0
    assert "batches under way: 2 are sampled again" in capsys.readouterr().err


def test_a_spike_drops_the_batches_under_way(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looked: list[int] = []

    def look(self: SpikeDetector, step: int, metrics: object) -> Spike | None:
        looked.append(step)
        return Spike(step, "actor.train/loss", 9.0, 1.0) if step == 4 and looked.count(4) == 1 else None

    monkeypatch.setattr(SpikeDetector, "look", look)
    spike = {"metric": "actor.train/loss", "back": 2}
    recipe = write_recipe(world, tmp_path / "whole", "grpo", 2, **SAVING, training__spike=spike)
    assert run_app(["train", str(recipe)]) == 0
    assert looked == [1, 2, 3, 4, 3, 4, 5]
    # After step 4, all 5 batches were taken, and 2 of them had been trained on before the checkpoint.
    assert "training goes back to step 2 and skips 48 records" in capsys.readouterr().err


def test_a_finished_run_goes_on_with_more_steps(world: World, tmp_path: Path) -> None:
    recipe = write_recipe(world, tmp_path / "whole", "grpo", 2, **SAVING)
    assert run_app(["train", str(recipe)]) == 0
    assert run_app(["train", str(recipe), "training.steps=7"]) == 0
    assert [row["step"] for row in read_metrics(tmp_path / "whole" / "run")] == [1, 2, 3, 4, 5, 6, 7]


def test_a_run_may_have_fewer_steps_than_sampling_runs_ahead(world: World, tmp_path: Path) -> None:
    recipe = write_recipe(world, tmp_path, "grpo", 3)
    assert run_app(["train", str(recipe), "training.steps=2"]) == 0
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2]
    shutil.rmtree(tmp_path / "run")
