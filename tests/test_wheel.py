"""A wheel has everything that the package needs, and trains when it is installed alone."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import World

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of a copy: setuptools leaves files beside the sources."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    command = [sys.executable, "-m", "pip", "wheel", str(copy), "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([*command, "-w", str(out)], check=True)
    (built,) = out.glob("realrl-*.whl")
    return built


def test_a_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "realrl"
    files = [file for file in package.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert {str(file.relative_to(ROOT / "src")) for file in files} <= inside


def test_a_package_from_the_wheel_trains(wheel: Path, world: World, tmp_path: Path) -> None:
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "-q", "--target", str(target), str(wheel)]
    subprocess.run(command, check=True)
    code = (
        "import realrl, sys; assert realrl.__file__.startswith(sys.argv[1]), realrl.__file__;"
        "recipe = realrl.SFT(sys.argv[2], data=sys.argv[3], batch=8, steps=1, device='cpu', cluster='1x1');"
        "print(recipe.train())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(target), world.actor, str(world.root / "sft.jsonl")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "1 steps, finished" in done.stdout
