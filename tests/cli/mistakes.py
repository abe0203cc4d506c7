"""Helpers for tests of mistakes: the form of every error message, and mistakes in several kinds of files."""

from pathlib import Path
from typing import Any

import pytest

from realrl.cli.app import run_app
from realrl.config.explain import MOST_MISTAKES

SENTENCE = 700
"""Characters of the longest line of an error message. Some list all that there is to choose from."""

DEEP, DEEPER = "[" * 1500, "[" * 100_000
"""Too deep for YAML, and for JSON."""
CONFIG_JSON: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    """Run a command line that must end with one error message that has `words` in it."""
    assert run_app(arguments) == 2, "accepted"
    said = capsys.readouterr().err
    assert is_message(said) and words in said, said


def is_message(text: str) -> bool:
    """Tell whether text is one error message: a line for each mistake that it lists, all but the first indented."""
    first, *others = text.removesuffix("\n").split("\n")
    short = all(len(line) <= SENTENCE for line in (first, *others)) and len(others) <= MOST_MISTAKES
    listed = all(line.startswith("  ") for line in others)
    return first.startswith("realrl: ") and short and listed and "Traceback" not in text


def recipe_of(place: Path, algorithm: str) -> str:
    return str(place / algorithm / "recipe.yaml")
