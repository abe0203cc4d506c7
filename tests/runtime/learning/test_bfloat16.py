"""Training in bfloat16 with float32 masters follows float32 training, in every algorithm."""

from pathlib import Path

import pytest

from realrl.cli.app import run_app
from tests.conftest import World, read_metrics

ROLES = {"sft": ("actor",), "reward": ("reward",), "ppo": ("actor", "critic", "ref", "reward")}


def run(world: World, algorithm: str, directory: Path, dtype: str) -> list[dict[str, float]]:
    directory.mkdir()
    types = {f"models__{role}__dtype": dtype for role in ROLES[algorithm]}
    assert run_app(["train", str(world.recipe(algorithm, directory, **types))]) == 0
    return read_metrics(directory / "run")


@pytest.mark.parametrize(
    ("algorithm", "loss"), [("sft", "actor.train/loss"), ("reward", "reward.train/loss")]
)
def test_bfloat16_losses_follow_float32(world: World, tmp_path: Path, algorithm: str, loss: str) -> None:
    expected, got = (run(world, algorithm, tmp_path / dtype, dtype) for dtype in ("float32", "bfloat16"))
    assert [step[loss] for step in got] == pytest.approx(
        [step[loss] for step in expected], rel=0.05, abs=0.02
    )
    assert got[-1][loss] < got[0][loss]


def test_sampler_and_trainer_agree_to_bfloat16_rounding(world: World, tmp_path: Path) -> None:
    for step in run(world, "ppo", tmp_path / "ppo", "bfloat16"):
        # Logits of this world reach 5, where bfloat16 numbers lie 1/32 apart.
        assert 0 < step["actor.train/sampler_trainer_mismatch"] < 2 / 32
