"""Learning rates over a run."""

from itertools import pairwise

import pytest

from realrl.engine.training.optimizer import compute_learning_rate
from realrl.recipe.optimizer import OptimizerConfig


def rates(steps: int = 10, **settings: object) -> list[float]:
    config = OptimizerConfig.model_validate({"lr": 1.0, **settings})
    return [compute_learning_rate(config, step, steps) for step in range(steps)]


def test_warmup_rises_linearly_to_the_peak() -> None:
    assert rates(schedule="constant", warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_the_linear_schedule_falls_to_the_floor() -> None:
    assert rates(schedule="linear", min_lr_ratio=0.5) == pytest.approx([1 - 0.05 * i for i in range(10)])


def test_the_cosine_schedule_is_halfway_in_the_middle_and_never_rises() -> None:
    got = rates(schedule="cosine", steps=11, warmup_steps=1)
    assert got[6] == pytest.approx(0.5)
    assert all(a >= b for a, b in pairwise(got))


def test_warmup_longer_than_the_run_is_allowed() -> None:
    assert rates(steps=2, warmup_steps=4) == [0.25, 0.5]
