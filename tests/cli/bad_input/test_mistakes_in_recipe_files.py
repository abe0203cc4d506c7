"""Files that are not recipes: every command prints one message and exits with status 2."""

from pathlib import Path

import pytest

from tests.cli.mistakes import DEEP, refused

RECIPES: list[tuple[str | bytes, str]] = [
    ("", "holds no recipe"),
    ("- 1", "holds no recipe"),
    ("text", "holds no recipe"),
    ("3", "holds no recipe"),
    ("null", "holds no recipe"),
    ("{}", "algorithm: missing; give one of "),
    ("algorithm: sft", "missing"),
    ("algorithm: sft\nalgorithm: ppo", "line 2: not valid YAML (key 'algorithm' twice)"),
    ("algorithm: sft\n  data: 3", "line 2: not valid YAML"),
    ("\talgorithm: sft", "line 1: not valid YAML"),
    ("algorithm: [sft", "not valid YAML"),
    ("a: &a [*b]", "not valid YAML"),
    ("? [a]\n: 1", "not valid YAML"),
    ("? {a: 1}\n: 1", "not valid YAML"),
    ("<<: 3", "not valid YAML"),
    ("3: 4\nalgorithm: sft", "is not text, so it cannot be a key"),
    ("a: " + DEEP, "lists or sections are nested too deep"),
    ("a: " + "{a: " * 1500, "lists or sections are nested too deep"),
    ("a: " + "[" * 200 + "]" * 200, "line 1: not valid YAML (lists or sections are nested too deep)"),
    ("- " * 1500, "lists or sections are nested too deep"),
    (b"\xff\xfe", "it is not UTF-8 text"),
    ("\x00", "not valid YAML"),
    ("a: 1\n---\nb: 2", "not valid YAML"),
    ("algorithm: sft\n" + "x: &x [a, a]\n" + "y: &y [*x, *x, *x]\nz: [*y, *y, *y]", "x: unknown key"),
    ('{"algorithm": "sft", "algorithm": "sft"}', "key 'algorithm' twice"),
]
"""Texts of recipes."""


@pytest.mark.parametrize("command", ["train", "show", "plan", "profile"])
@pytest.mark.parametrize(("text", "words"), RECIPES, ids=[repr(text[:30]) for text, _ in RECIPES])
def test_a_wrong_recipe_is_one_error_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | bytes, words: str, command: str
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(capsys, [command, str(file)], words)
