"""`realrl profile` on a GPU."""

from pathlib import Path

import pytest
import torch

from realrl.cli.app import run_app
from realrl.planner.cluster.devices import DEVICES
from realrl.planner.profile.profile import Profile
from tests.conftest import World

COPIES = {"copy", "clear", "allocate", "host"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_measured_for_more_of_its_kind(world: World, tmp_path: Path) -> None:
    file, recipe = tmp_path / "profile.json", world.recipe("ppo", tmp_path, device="cuda", cluster="auto")
    options = ["--quick", "--dtype", "bfloat16", "--out", str(file)]
    assert run_app(["profile", str(recipe), *options]) == 0
    found = Profile.load(file)
    assert found.device != "cpu" and {c.kind for c in found.collectives} >= COPIES
    group = f"{found.device}:1x2"
    if found.device in DEVICES:
        assert run_app(["profile", str(recipe), "--cluster", group, *options]) == 0
        kinds = {(m.kind, m.tp) for m in Profile.load(file).layers[0].measurements}
        assert {("decode", 2), ("backward", 2)} <= kinds
