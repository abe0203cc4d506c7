"""The examples run as docs/examples.md says, on what `examples/prepare.py` makes."""

import json
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import realrl
from realrl.cli.app import run_app
from realrl.testing import check_algorithm
from tests.conftest import read_metrics

ROOT = Path(__file__).parents[3]
RECIPES = ("grpo", "ppo_ema", "sentiment", "online_dpo")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with the examples, and what they need."""
    directory, before = tmp_path_factory.mktemp("examples"), Path.cwd()
    (directory / "examples").symlink_to(ROOT / "examples")
    os.chdir(directory)
    runpy.run_path("examples/prepare.py", run_name="__main__")
    yield directory
    os.chdir(before)


def load(name: str) -> dict[str, Any]:
    """What a file of the examples defines."""
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))


@pytest.mark.parametrize("name", RECIPES)
def test_an_example_trains(place: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENTIMENT_MODEL", "data/examples/classifier")
    assert run_app(["train", f"examples/{name}.yaml", "training.steps=2", f"run_dir=runs/{name}"]) == 0
    steps = read_metrics(place / "runs" / name)
    assert len(steps) == 2 and all(step["actor.train/grad_norm"] > 0 for step in steps)
    if name == "ppo_ema":  # the reference has moved away from the start, and so has the actor
        assert steps[1]["actor.train/kl"] != 0
    if name == "sentiment":
        assert all(step["actor.train/score"] < 0 for step in steps)  # log p


@pytest.mark.parametrize("name", ["own_loop", "second_try"])
def test_a_loop_learns(place: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = load(name)
    records = [json.loads(line) for line in Path("data/examples/questions.jsonl").read_text().splitlines()]
    actor = {**example["MODEL"], "optimizer": {"lr": 1e-2}}
    models = {"actor": actor, "ref": example["MODEL"]}
    with realrl.Session(models, train="actor", device="cpu", cluster="1x1") as session:
        steps = list(example["train"](session, records, 2))
    assert all(step["grad_norm"] > 0 for step in steps)


def test_the_notebook_runs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    notebook = nbformat.read("examples/first_steps.ipynb", as_version=4)
    NotebookClient(notebook, timeout=300).execute()
    shown = str([cell.get("outputs") for cell in notebook.cells])
    assert "10 steps, finished" in shown and "name a fruit:" in shown and "h100" in shown


def test_the_verifier_rewards_words_and_their_beginnings() -> None:
    names_one = load("verifier")["names_one"]
    accepted = [["pear", "plum"]] * 4
    assert names_one(completions=["Pear tree", "pe", "a pear", ""], accepted=accepted) == [
        1.0,
        0.25,
        0.0,
        0.0,
    ]


def test_the_classifier_prefers_praise(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENTIMENT_MODEL", "data/examples/classifier")
    scores = load("sentiment")["positive"](["the film is"] * 2, ["great", "dull"])
    assert scores[1] < scores[0] < 0


def test_online_dpo_learns_the_same_under_every_plan(place: Path, tmp_path: Path) -> None:
    records = [json.loads(line) for line in Path("data/examples/questions.jsonl").read_text().splitlines()]
    check_algorithm("examples/online_dpo.yaml", tmp_path, records=records)
