"""Every algorithm on two processes, of srun, a script or a notebook, agrees with one process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

import realrl
from realrl.recipe.registry import list_algorithms
from realrl.testing.compare import compare_runs
from tests.api.kernels import run_cells
from tests.api.test_python_runs import CHANGES
from tests.api.test_srun import assert_succeeded, srun
from tests.conftest import World

TOLERANCE = 1e-4
CODE = """
import json, pathlib, realrl

for algorithm, settings in json.loads(pathlib.Path({file!r}).read_text()).items():
    run = realrl.algorithm(algorithm)(**settings).train()
    assert run.finished
"""


def write_settings(world: World, directory: Path, cluster: str) -> dict[str, dict[str, Any]]:
    """Write the arguments of a run of one step of each algorithm to `settings.json`. Returns them, too."""
    found = {}
    for algorithm in list_algorithms():
        changes = {"training__steps": 1, "data__batch": 8, "cluster": cluster} | CHANGES.get(algorithm, {})
        (directory / algorithm).mkdir(parents=True)
        settings = yaml.safe_load(world.recipe(algorithm, directory / algorithm, **changes).read_text())
        found[settings.pop("algorithm")] = settings
    (directory / "settings.json").write_text(json.dumps(found))
    return found


@pytest.fixture(scope="module")
def alone(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The run of each algorithm in one process."""
    settings = write_settings(world, tmp_path_factory.mktemp("alone"), "1x1")
    return {name: realrl.algorithm(name)(**given).train().path for name, given in settings.items()}


@pytest.mark.parametrize(
    "place",
    # srun starts its processes once; the others start new ones for each run.
    [
        "srun",
        pytest.param("script", marks=pytest.mark.slow),
        pytest.param("notebook", marks=pytest.mark.slow),
    ],
)
def test_every_algorithm_agrees_with_one_process(
    place: str, alone: dict[str, Path], world: World, tmp_path: Path
) -> None:
    settings = write_settings(world, tmp_path, "1x2")
    code = CODE.format(file=str(tmp_path / "settings.json"))
    (tmp_path / "script.py").write_text(code)
    if place == "notebook":
        run_cells([code], tmp_path)
    elif place == "srun":
        assert_succeeded(srun(["script.py"], tmp_path))
    else:
        done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    for algorithm, given in settings.items():
        run = Path(given["run_dir"])
        compare_runs(run, alone[algorithm], name=algorithm, than="in one process", tolerance=TOLERANCE)
        ours, theirs = (load_file(of / "final" / "model.safetensors") for of in (run, alone[algorithm]))
        for name, tensor in theirs.items():
            assert tensor.allclose(ours[name], rtol=0, atol=TOLERANCE), f"{algorithm}: {name}"
