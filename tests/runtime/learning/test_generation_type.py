"""float32 training with bfloat16 generation: parameters change their type on the way to the copy."""

from pathlib import Path

import pytest

from realrl.cli.app import run_app
from tests.conftest import World, read_metrics

PLAN = """
cluster: 1x1
calls:
  actor.generate: {mesh: 0, dp: 1, dtype: bfloat16}
  reward.inference: {mesh: 0, dp: 1}
  ref.inference: {mesh: 0, dp: 1, dtype: bfloat16}
  critic.inference: {mesh: 0, dp: 1}
  actor.train: {mesh: 0, dp: 1}
  critic.train: {mesh: 0, dp: 1}
"""


def test_generation_in_bfloat16_agrees_with_float32_training_to_bfloat16_rounding(
    world: World, tmp_path: Path
) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    recipe = world.recipe("ppo", tmp_path, plan=str(tmp_path / "plan.yaml"), debug__verify_reallocation=True)
    assert run_app(["train", str(recipe)]) == 0
    mismatches = [step["actor.train/sampler_trainer_mismatch"] for step in read_metrics(tmp_path / "run")]
    assert len(mismatches) == 5
    assert all(1e-4 < mismatch < 0.2 for mismatch in mismatches)


def test_a_train_call_takes_its_dtype_from_the_model(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PLAN.replace("actor.train: {mesh: 0, dp: 1}", "actor.train: {mesh: 0, dp: 1, dtype: bfloat16}")
    (tmp_path / "plan.yaml").write_text(text)
    recipe = world.recipe("ppo", tmp_path, plan=str(tmp_path / "plan.yaml"))
    assert run_app(["train", str(recipe)]) == 2
    assert "actor.train: dtype is for calls that do not train" in capsys.readouterr().err
