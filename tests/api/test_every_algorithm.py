"""Every algorithm learns the same from Python as by the command, also on two processes of srun or a notebook."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

import realrl
from realrl.cli.app import run_app
from realrl.recipe.registry import list_algorithms
from realrl.testing.compare import compare_runs
from tests.api.kernels import run_cells
from tests.api.test_python_runs import assert_equal_runs
from tests.api.test_srun import assert_succeeded, srun
from tests.conftest import EVERY_RUN, World, thin

CHANGES: dict[str, dict[str, Any]] = {"remax": {"policy__samples": 1}, "ranked_reward": {"loss__answers": 3}}
PLACES = {"srun": ["ppo", "dapo", "dpo", "reward"], "script": ["sft"], "notebook": ["grpo"]}
"""Algorithms that run on two processes; `make test-all` runs all of them in every place, for ten minutes."""
TOLERANCE = 1e-4
CODE = """
import json, pathlib, realrl

settings = json.loads(pathlib.Path({file!r}).read_text())
for algorithm in {algorithms}:
    run = realrl.algorithm(algorithm)(**settings[algorithm]).train()
    assert run.finished
"""


def write_settings(world: World, directory: Path, cluster: str) -> dict[str, dict[str, Any]]:
    """Write the arguments of a run of two steps of each algorithm to `settings.json`. Returns them, too."""
    found = {}
    for algorithm in list_algorithms():
        changes = {"training__steps": 2, "data__batch": 8, "cluster": cluster} | CHANGES.get(algorithm, {})
        (directory / algorithm).mkdir(parents=True)
        settings = yaml.safe_load(world.recipe(algorithm, directory / algorithm, **changes).read_text())
        found[settings.pop("algorithm")] = settings
    (directory / "settings.json").write_text(json.dumps(found))
    return found


@pytest.fixture(scope="module")
def alone(world: World, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run of each algorithm in one process."""
    settings = write_settings(world, tmp_path_factory.mktemp("alone"), "1x1")
    return cache(lambda name: realrl.algorithm(name)(**settings[name]).train().path)


@pytest.mark.parametrize("algorithm", thin(list_algorithms(), 2))
def test_python_trains_like_the_command(algorithm: str, alone: Callable[[str], Path], tmp_path: Path) -> None:
    run = realrl.Run(alone(algorithm))
    assert run.finished and len(run.metrics) == 2 and run.model.is_dir()
    recipe = run.path.parent / "recipe.yaml"
    assert run_app(["train", str(recipe), f"run_dir={tmp_path / 'run'}"]) == 0
    assert_equal_runs(tmp_path / "run", run.path)


@pytest.mark.parametrize("place", [pytest.param("srun", marks=pytest.mark.exhaustive), "script", "notebook"])
def test_every_algorithm_agrees_with_one_process(
    place: str, alone: Callable[[str], Path], world: World, tmp_path: Path
) -> None:
    settings = write_settings(world, tmp_path, "1x2")
    algorithms = list_algorithms() if EVERY_RUN else PLACES[place]
    code = CODE.format(file=str(tmp_path / "settings.json"), algorithms=algorithms)
    (tmp_path / "script.py").write_text(code)
    if place == "notebook":
        run_cells([code], tmp_path)
    elif place == "srun":
        assert_succeeded(srun(["script.py"], tmp_path))
    else:
        done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    for algorithm in algorithms:
        expected, run = alone(algorithm), Path(settings[algorithm]["run_dir"])
        compare_runs(run, expected, name=algorithm, than="in one process", tolerance=TOLERANCE)
        ours, theirs = (load_file(of / "final" / "model.safetensors") for of in (run, expected))
        for name, tensor in theirs.items():
            assert tensor.allclose(ours[name], rtol=0, atol=TOLERANCE), f"{algorithm}: {name}"
