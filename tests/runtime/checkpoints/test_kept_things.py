"""What goes on after a resume besides weights: a reward's own state, and what is kept of checkpoints."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

from realrl.checkpoint.retention import choose_kept
from realrl.checkpoint.saved import list_checkpoints
from realrl.checkpoint.storage import write_state
from realrl.cli.app import run_app
from realrl.config.errors import UserError
from realrl.recipe.evaluation import BestConfig
from realrl.recipe.run_settings import CheckpointConfig
from realrl.recipe.training import SpikeConfig
from realrl.runtime.resume import Spike, SpikeDetector
from tests.conftest import World, read_metrics
from tests.runtime.checkpoints.interrupted import interrupt
from tests.runtime.checkpoints.test_resume import lines, write_recipe

BROKEN = """
calls = 0

def score(completions):
    global calls
    calls += 1
    assert calls < 2, "no more answers"
    return [0.0] * len(completions)
"""
REWARD = """
class Novelty:
    def __init__(self):
        self.calls = 0

    def __call__(self, completions):
        self.calls += 1
        return [self.calls + len(text) / 100 for text in completions]

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]

novelty = Novelty()
"""


def test_a_reward_function_goes_on_with_its_state(world: World, tmp_path: Path) -> None:
    reward = tmp_path / "novelty.py"
    reward.write_text(REWARD)
    changes = {"reward": f"{reward}:novelty", "models__reward": None, "evaluation__every": None}
    recipe = write_recipe(world, "grpo", tmp_path / "whole", data__eval=None, **changes)
    # In processes of their own: in this one, a function that has been imported keeps what it has.
    assert run_app(["train", str(recipe), "cluster=1x2"]) == 0
    whole = tmp_path / "whole" / "run"
    resumed = interrupt(whole, 2, tmp_path)
    assert run_app(["train", str(recipe), f"run_dir={resumed}", "cluster=1x2"]) == 0
    assert lines(resumed) == lines(whole)


def test_training_goes_back_after_a_spike_without_the_records_since(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looked: list[int] = []

    def look(self: SpikeDetector, step: int, metrics: object) -> Spike | None:
        looked.append(step)
        return Spike(step, "actor.train/loss", 9.0, 1.0) if step == 4 and looked.count(4) == 1 else None

    monkeypatch.setattr(SpikeDetector, "look", look)
    spike = {"metric": "actor.train/loss", "back": 2}
    recipe = write_recipe(
        world, "sft", tmp_path / "whole", training__spike=spike, data__shuffle=False, plan="symmetric"
    )
    assert run_app(["train", str(recipe)]) == 0
    run_dir = tmp_path / "whole" / "run"
    assert looked == [1, 2, 3, 4, 3, 4, 5]
    assert [line["step"] for line in lines(run_dir) if line["kind"] == "train"] == [1, 2, 3, 4, 5]
    assert {*list_checkpoints(run_dir)} == {1, 2, 3, 4, 5}
    assert (run_dir / "checkpoints" / "unused-step-000003").is_dir()
    error = capsys.readouterr().err
    assert "step 4: actor.train/loss is 9, usually 1; training goes back to step 2 and skips 32" in error
    # The step with the spike can be looked at, although step 4 was trained again with other records.
    assert run_app(["replay", str(run_dir), "--step", "4"]) == 0
    assert "recorded because step 4: actor.train/loss is 9, usually 1" in capsys.readouterr().out


def test_a_mistake_does_not_lose_the_checkpoint_that_is_being_written(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*arguments: Any, copied: Callable[[], None], **more: Any) -> None:
        copied()
        time.sleep(1)
        write_state(*arguments, copied=copied, **more)

    monkeypatch.setattr("realrl.runtime.checkpoint_writer.write_state", write)
    reward = tmp_path / "broken.py"
    reward.write_text(BROKEN)
    more = {"reward__function": f"{reward}:score", "data__eval": None, "evaluation__every": None}
    recipe = write_recipe(world, "grpo", tmp_path / "whole", models={"actor": {"path": world.actor}}, **more)
    assert run_app(["train", str(recipe), "data.batch=4"]) == 2
    checkpoint = tmp_path / "whole" / "run" / "checkpoints" / "step-000001"
    assert f"saved: {checkpoint}" in capsys.readouterr().err


def test_spikes_are_far_above_what_is_usual() -> None:
    detector = SpikeDetector(SpikeConfig(metric="loss", window=8, factor=4.0))
    values = [3.0, 2.9, 3.1, 3.0, 2.9, 3.1, 2.0, 3.3, 4.5, 3.0, float("nan")]
    spikes = [detector.look(step, {"loss": value}) for step, value in enumerate(values, 1)]
    assert [spike.step for spike in spikes if spike is not None] == [9, 11]
    assert spikes[8] is not None and spikes[8].usual == pytest.approx(3.0)
    with pytest.raises(UserError, match=r"no such metric; did you mean losses\?"):
        detector.look(1, {"losses": 1.0})


@pytest.mark.parametrize(
    ("keep", "keep_best", "direction", "kept"),
    [
        (2, 0, "highest", {40, 50}),
        (1, 1, "highest", {30, 50}),
        (1, 2, "lowest", {10, 20, 50}),
        (9, 1, "highest", {10, 20, 30, 40, 50}),
    ],
)
def test_the_last_and_the_best_checkpoints_are_kept(
    keep: int, keep_best: int, direction: Literal["highest", "lowest"], kept: set[int]
) -> None:
    settings, best = CheckpointConfig(keep=keep, keep_best=keep_best), BestConfig(metric="m", keep=direction)
    metrics = {10: 1.0, 20: 1.5, 30: 3.0, 40: 2.0}
    steps = [10, 20, 30, 40, 50]
    assert choose_kept(steps, settings, best, metrics) == kept
    # And what a spike in step 51 or later goes back to.
    assert choose_kept(steps, settings, best, metrics, back=22) == kept | {20}
    assert choose_kept(steps, settings, best, metrics, back=1) == kept


def test_the_checkpoint_of_the_best_evaluation_is_kept(world: World, tmp_path: Path) -> None:
    best = {"metric": "actor.inference/loss", "keep": "highest"}
    more = {"evaluation__best": best, "checkpoint__keep_best": 1, "evaluation__every": 1}
    recipe = write_recipe(world, "sft", tmp_path / "whole", checkpoint__keep=1, **more)
    assert run_app(["train", str(recipe)]) == 0
    run_dir = tmp_path / "whole" / "run"
    # The loss falls, so that the highest one is the first.
    assert {*list_checkpoints(run_dir)} == {0, 5}
    note = json.loads((run_dir / "checkpoints" / "step-000000" / "metric.json").read_text())
    assert note["value"] == read_metrics(run_dir, "eval")[0]["actor.inference/loss"]


def test_an_export_is_what_was_saved(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(world, "ppo", tmp_path / "whole", data__eval=None, evaluation__every=None)
    assert run_app(["train", str(recipe), "training.steps=1"]) == 0
    run_dir = tmp_path / "whole" / "run"
    assert run_app(["export", str(run_dir), "--out", str(tmp_path / "out")]) == 0
    for role, saved in (("actor", "final"), ("critic", "final-critic")):
        files = {file.name for file in (run_dir / saved).iterdir()}
        assert {file.name for file in (tmp_path / "out" / role).iterdir()} == files
        for name in files:
            assert (tmp_path / "out" / role / name).read_bytes() == (run_dir / saved / name).read_bytes()
    assert run_app(["export", str(run_dir), "--out", str(tmp_path / "out")]) == 2
    assert run_app(["export", str(run_dir), "--out", str(tmp_path / "o"), "--step", "7"]) == 2
    small = ["export", str(run_dir), "--out", str(tmp_path / "small"), "--role", "actor", "--max-shard-size"]
    assert run_app([*small, "20KB"]) == 0
    index = json.loads((tmp_path / "small" / "actor" / "model.safetensors.index.json").read_text())
    whole = load_file(run_dir / "final" / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(values.nbytes for values in whole.values())
    for name, file in index["weight_map"].items():
        values = load_file(tmp_path / "small" / "actor" / file)
        assert torch.equal(values[name], whole[name])
        assert len(values) == 1 or sum(tensor.nbytes for tensor in values.values()) <= 20_000
    assert len(index["weight_map"]) == len(whole) > len({*index["weight_map"].values()}) > 1
    capsys.readouterr()
    assert run_app([*small, "20", "--overwrite"]) == 2
    assert "--max-shard-size: '20' is not a size; write a number and a unit" in capsys.readouterr().err


def test_a_new_run_from_saved_models_goes_on_with_their_state(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kl = {"ppo__kl": {"adaptive": True, "target": 0.01, "horizon": 100}}
    none = {"data__eval": None, "evaluation__every": None, "training__steps": 2}
    assert run_app(["train", str(write_recipe(world, "ppo", tmp_path / "first", **kl, **none))]) == 0
    final = tmp_path / "first" / "run" / "final"
    coefficient = json.loads(final.with_name("final-state.json").read_text())["state"]["kl_coef"]
    models = {"models__actor": {"path": str(final)}, "models__critic": {"path": f"{final}-critic"}}
    recipe = write_recipe(world, "ppo", tmp_path / "second", **kl, **none, **models)
    assert run_app(["train", str(recipe)]) == 0
    assert f"the algorithm continues from {final}-state.json" in capsys.readouterr().err
    run_dir = tmp_path / "second" / "run"
    first = read_metrics(run_dir)[0]
    assert first["actor.train/kl_coef"] == pytest.approx(coefficient)
    # As if it had been killed before its first checkpoint, and started again.
    for path in (run_dir / "checkpoints", *run_dir.glob("final*"), run_dir / "summary.json"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert run_app(["train", str(recipe)]) == 0
    assert "has no checkpoint yet and starts again" in capsys.readouterr().err
    assert read_metrics(run_dir)[0] == first
