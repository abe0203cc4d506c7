"""A whole run on a GPU."""

from pathlib import Path

import pytest
import torch

from realrl.cli.app import run_app
from tests.conftest import World, read_metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 5e-2)])
def test_ppo_on_a_gpu_agrees_with_the_cpu(world: World, tmp_path: Path, dtype: str, tolerance: float) -> None:
    first = {}
    for device in ("cpu", "cuda"):
        directory = tmp_path / device
        directory.mkdir()
        types = {f"models__{role}__dtype": dtype for role in ("actor", "critic", "ref", "reward")}
        recipe = world.recipe("ppo", directory, device=device, **(types if device == "cuda" else {}))
        assert run_app(["train", str(recipe)]) == 0
        first[device] = read_metrics(directory / "run")[0]
    mismatch = first["cuda"]["actor.train/sampler_trainer_mismatch"]
    assert mismatch <= (1e-4 if dtype == "float32" else 5e-2)
    for name in ("critic.train/value_loss", "actor.train/entropy"):
        assert first["cuda"][name] == pytest.approx(first["cpu"][name], rel=tolerance * 4)
