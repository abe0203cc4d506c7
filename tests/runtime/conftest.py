"""Finished runs, for tests that look at what a run leaves behind, and a model that ends many answers."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from realrl.cli.app import run_app
from tests.conftest import World

Command = Callable[..., tuple[int, str]]

JUDGE = """
def longer_is_better(completions):
    return [len(text) for text in completions]
"""


@pytest.fixture
def realrl(capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs a command line in this process: its exit status, and what it and its ranks print as errors."""

    def run(*arguments: str) -> tuple[int, str]:
        capfd.readouterr()
        status = run_app(arguments)
        return status, capfd.readouterr().err

    return run


def changes(world: World, algorithm: str, directory: Path) -> dict[str, object]:
    """Evaluation, checkpoints and, where there are samples, a judge that scores each by its length."""
    (directory / "judge.py").write_text(JUDGE)
    judge = f"{directory / 'judge.py'}:longer_is_better"
    return {
        "data__eval": str(world.root / f"{algorithm}.jsonl"),
        "evaluation__every": 2,
        "checkpoint__every": 2,
        "checkpoint__export": True,
        "checkpoint__keep": 3,
        **({"evaluation__shown": 100, "evaluation__judge": judge} if algorithm == "ppo" else {}),
    }


def run(world: World, algorithm: str, directory: Path, **more: object) -> Path:
    """The directory of a run of 5 steps, as `World.recipe` describes, that has ended well."""
    recipe = world.recipe(algorithm, directory, **{**changes(world, algorithm, directory), **more})
    assert run_app(["train", str(recipe)]) == 0
    return directory / "run"


@pytest.fixture(scope="session")
def actor(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that ends about half of its answers within 12 tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = tmp_path_factory.mktemp("actor")
    tokenizer = AutoTokenizer.from_pretrained(world.actor)
    model = AutoModelForCausalLM.from_pretrained(world.actor)
    model.model.embed_tokens.weight.data[tokenizer.eos_token_id] *= 4
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def finished(world: World, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Algorithm -> the directory of a run in one process."""
    return {name: run(world, name, tmp_path_factory.mktemp(name)) for name in ("sft", "reward", "ppo")}


@pytest.fixture(scope="session")
def finished_on_two(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run of PPO on two processes, but evaluated in batches of another size."""
    return run(world, "ppo", tmp_path_factory.mktemp("two"), cluster="1x2", data__eval_batch=27)
