"""Checkpoints of runs whose sampling runs ahead hold the batches under way."""

import shutil
from pathlib import Path

import pytest

from realrl.cli.app import run_app
from realrl.testing.compare import read_metrics
from tests.conftest import World
from tests.runtime.asynchrony.test_ahead_runs import learnt, part, write_recipe
from tests.runtime.checkpoints.interrupted import interrupt
from tests.runtime.checkpoints.test_resume import lines, read_models

SAVING = {"checkpoint__every": 1, "checkpoint__keep": 10}


@pytest.mark.parametrize("staleness", [1, 2, 3])
@pytest.mark.parametrize("apart", [False, True])
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(
    world: World, tmp_path: Path, staleness: int, apart: bool
) -> None:
    ema = {"ppo__ref_ema": 0.5, "ppo__ref_every": 2}
    recipe = write_recipe(world, tmp_path / "whole", "ppo", staleness, **SAVING, **ema)
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


def test_a_run_resumes_on_other_ranks(world: World, tmp_path: Path) -> None:
    apart = part(write_recipe(world, tmp_path / "apart", "grpo", 2, **SAVING), size=3)
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
        assert (
            "2 batches that were sampled before the run stopped are sampled again" in capsys.readouterr().err
        )
        assert [row["step"] for row in read_metrics(resumed)] == [1, 2, 3, 4, 5]


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
