"""A plan file says which calls recompute; what a run learns does not depend on it."""

from pathlib import Path
from typing import Any

import pytest

from realrl.cli.app import run_app
from realrl.engine.training.trainer import Trainer
from tests.conftest import World, read_metrics

PLAN = """
cluster: 1x1
calls:
  actor.generate: {mesh: 0, dp: 1}
  reward.inference: {mesh: 0, dp: 1}
  ref.inference: {mesh: 0, dp: 1}
  critic.inference: {mesh: 0, dp: 1}
  actor.train: {mesh: 0, dp: 1, recompute: true}
  critic.train: {mesh: 0, dp: 1}
"""


def test_only_the_call_that_the_plan_names_recomputes_and_learns_the_same(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, seen = Trainer.train, set()

    def watched(self: Trainer, batch: Any, method: Any, minibatches: Any, options: Any, **more: Any) -> Any:
        seen.add((self.model.head, options.recompute))
        return train(self, batch, method, minibatches, options, **more)

    monkeypatch.setattr(Trainer, "train", watched)
    (tmp_path / "plan.yaml").write_text(PLAN)
    learnt = []
    for name, plan in (("plain", "symmetric"), ("again", str(tmp_path / "plan.yaml"))):
        seen.clear()
        (tmp_path / name).mkdir()
        recipe = world.recipe("ppo", tmp_path / name, plan=plan, training__steps=2)
        assert run_app(["train", str(recipe)]) == 0
        learnt.append((dict(seen), [learned(step) for step in read_metrics(tmp_path / name / "run")]))
    (plain, expected), (again, got) = learnt
    assert plain == {"lm": False, "scalar": False} and again == {"lm": True, "scalar": False}
    assert got == expected and len(got) == 2


def learned(step: dict[str, float]) -> dict[str, float]:
    """Figures that do not tell of time."""
    return {name: value for name, value in step.items() if ".train/" in name}
