"""Training in bfloat16, or with products of bfloat16 operands, follows float32 training, in every algorithm."""

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
def test_losses_of_narrow_types_follow_float32(
    world: World, tmp_path: Path, algorithm: str, loss: str
) -> None:
    types = ("float32", "mixed", "bfloat16")
    expected, *others = (run(world, algorithm, tmp_path / dtype, dtype) for dtype in types)
    for got in others:
        assert [step[loss] for step in got] == pytest.approx(
            [step[loss] for step in expected], rel=0.05, abs=0.02
        )
        assert got[-1][loss] < got[0][loss]


# Logits of this world reach 5, where bfloat16 numbers lie 1/32 apart.
@pytest.mark.parametrize("dtype", ["bfloat16", "mixed"])
def test_sampler_and_trainer_agree_to_rounding(world: World, tmp_path: Path, dtype: str) -> None:
    for step in run(world, "ppo", tmp_path / "ppo", dtype):
        assert step["actor.train/sampler_trainer_mismatch"] < 2 / 32
