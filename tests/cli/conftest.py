"""A directory full of mistakes."""

import json
from pathlib import Path

import pytest

from realrl.recipe.registry import list_algorithms
from tests.cli.mistakes import CONFIG_JSON
from tests.conftest import World


@pytest.fixture(scope="module")
def place(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a recipe of each algorithm, and files to be named by mistake."""
    directory = tmp_path_factory.mktemp("mistakes")
    for algorithm in list_algorithms():
        (directory / algorithm).mkdir()
        world.recipe(algorithm, directory / algorithm)
    (directory / "empty").write_text("")
    (directory / "text.txt").write_text("hello\n")
    (directory / "records.tsv").write_text("prompt\tanswer\na\tb\n")
    (directory / "records.jsonl.xz").write_bytes(b"")
    (directory / "records.jsonl.gz").write_bytes(b"\x1f\x8b")
    (directory / "folder").mkdir()
    (directory / "folder" / "records.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (directory / "folder" / "about.json").write_text("{}")
    (directory / "nothing").mkdir()
    (directory / "family.py").write_text("")
    (directory / "qwen9").mkdir()
    (directory / "qwen9" / "config.json").write_text(json.dumps({**CONFIG_JSON, "model_type": "qwen9"}))
    return directory
