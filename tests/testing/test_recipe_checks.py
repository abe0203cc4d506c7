"""`realrl check` passes right recipes, and names bugs with their likely reasons."""

import os
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from realrl.cli.app import run_app
from tests.conftest import World, thin, write_jsonl

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with the examples, and what they need."""
    directory, before = tmp_path_factory.mktemp("checks"), Path.cwd()
    (directory / "examples").symlink_to(ROOT / "examples")
    os.chdir(directory)
    runpy.run_path("examples/prepare.py", run_name="__main__")
    yield directory
    os.chdir(before)


@pytest.mark.parametrize(
    "name",
    thin(
        [
            "mean over a micro-batch",
            "advantages per rank",
            "state that is not saved",
            "state in a global of the run",
            "labels shifted by one",
            "reward that fails on empty answers",
        ],
        2,
    ),
)
def test_planted_bugs_are_explained(
    name: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    planted = runpy.run_path(str(ROOT / "bench" / "planted.py"))
    bug = planted["BUGS"][name]
    assert bug.says in planted["check"](tmp_path, bug)


def test_a_detached_factor_is_a_note(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    planted = runpy.run_path(str(ROOT / "bench" / "planted.py"))
    margin = planted["_MARGIN"]
    bug = planted["Bug"](
        "online_dpo.py", margin, f"{margin}        margin = margin * (1 + margin.detach())\n", ""
    )
    recipe = planted["plant"](tmp_path, bug)
    assert run_app(["check", str(recipe), "--processes", "2"]) == 0
    assert "that is right only if a factor is detached on purpose" in capsys.readouterr().out


GAME = """
class Game:
    def reset(self, level, seed):
        self.left = 1 + seed % 3
        return f" level {level}" + " and so on" * 60

    def step(self, text):
        self.left -= 1
        return f" {self.left} left", len(text) / 10, not self.left
"""


def test_an_environment_without_mistakes_passes(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "game.py").write_text(GAME)
    records = [{"prompt": "the film", "level": level} for level in range(8)]
    settings = {
        "data__train": write_jsonl(tmp_path / "levels.jsonl", records),
        "data__batch": 4,
        "environment": {"factory": f"{tmp_path / 'game.py'}:Game", "max_turn_tokens": 100},
        "generation__max_new_tokens": 500,
        "data__max_tokens": 1024,
        "policy__kl__coef": 0.0,
    }
    file = world.recipe("grpo", tmp_path, **settings)
    document = yaml.safe_load(file.read_text())
    del document["models"]["reward"]
    file.write_text(yaml.safe_dump(document))
    status, text = run_app(["check", str(file), "--processes", "2"]), capsys.readouterr().out
    assert status == 0 and "no problems" in text, text
    assert "ok       environment: step gets the turns, reset gets level, seed\n" in text
    assert "ok       plan tp=2 on 2 processes\n" in text
    assert "ok       plan pp=2, vpp=2 and zero bubble on 2 processes\n" in text
    assert "[[It is so.</s>]]" in text and "these turns of the model are made up" in text


@pytest.mark.parametrize("algorithm", ["ppo", "dpo"])
def test_recipes_without_mistakes_pass(
    algorithm: str, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = world.recipe(algorithm, tmp_path)
    status, text = run_app(["check", str(recipe), "--processes", "2"]), capsys.readouterr().out
    assert status == 0 and "no problems" in text, text
    assert "resumed from a checkpoint" in text
    # Three records are shown, with the tokens to learn in brackets.
    assert len(re.findall(r"\.jsonl:\d+ .*\(\d+ tokens", text)) >= 3
    assert ("[[" in text) == (algorithm in ("sft", "dpo"))
