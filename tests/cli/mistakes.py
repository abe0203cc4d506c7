"""What tests of mistakes share: what every error message must be, and what is wrong in several kinds of files."""

from pathlib import Path
from typing import Any

import pytest

from realrl.cli.app import run_app

SENTENCE = 700
"""Characters of the longest error message. Some list all that there is to choose from."""

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
    captured = capsys.readouterr()
    assert captured.err.startswith("realrl: ") and captured.err.count("\n") == 1, captured.err
    assert len(captured.err) <= SENTENCE and "Traceback" not in captured.err
    assert words in captured.err, captured.err


def recipe_of(place: Path, algorithm: str) -> str:
    return str(place / algorithm / "recipe.yaml")
