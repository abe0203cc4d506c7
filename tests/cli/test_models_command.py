"""What `realrl models` lists."""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from realrl.cli.app import run_app
from realrl.families.registry import list_families
from realrl.families.shape import ModelShape
from realrl.families.sizes import SHAPES

FILE = """
from dataclasses import replace
from realrl.families.built_in.llama import LLAMA

FAMILY = replace(LLAMA, architectures={**LLAMA.architectures, "lm": "MyLM"})
"""


def listed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[str]:
    """The lines of the table, in a terminal wide enough that none is folded."""
    monkeypatch.setenv("COLUMNS", "1000")
    assert run_app(["models", *arguments]) == 0
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def read_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, dict[str, object]]]:
    assert run_app(["models", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_row_has_class_and_published_sizes_of_a_family(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heading, *rows = listed(capsys, monkeypatch)
    assert re.split(r"  +", heading) == ["family", "class", "published sizes with a name"]
    cells = {row.split()[0]: re.split(r"  +", row) for row in rows}
    assert [*cells] == [row.split()[0] for row in rows] == sorted(list_families())
    assert cells["gpt2"] == [
        "gpt2",
        "GPT2LMHeadModel",
        "gpt2 (124 M), gpt2-medium (355 M), gpt2-large (774 M), gpt2-xl (1.56 G)",
    ]
    assert cells["starcoder2"] == ["starcoder2", "Starcoder2ForCausalLM", "-"]
    named = [size.split()[0] for row in cells.values() for size in row[2].split(", ") if size != "-"]
    assert sorted(named) == sorted(SHAPES)


def test_a_narrow_terminal_folds_sizes_and_loses_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert run_app(["models", "qwen2"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 60
    assert all(size in out for size, shape in SHAPES.items() if shape.family == "qwen2")


@pytest.mark.parametrize("family", list_families())
def test_the_class_of_a_family_is_that_of_transformers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    _, row = listed(capsys, monkeypatch, family)
    known = AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(family))]
    assert row.split()[:2] == [family, known.__name__]


def test_json_has_sizes_that_a_recipe_takes_and_counts_of_parameters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = read_json(capsys)
    assert [*found] == [*list_families()]
    sizes = {name: dict(size) for of in found.values() for name, size in of.items()}
    counts = {name: size.pop("parameters") for name, size in sizes.items()}
    assert {name: ModelShape.model_validate(size) for name, size in sizes.items()} == SHAPES
    assert counts["gpt2"] == 124439808 and counts["llama-3.1-8b"] == 8030261248
    assert read_json(capsys, "phi3") == {"phi3": found["phi3"]}
    assert read_json(capsys, "starcoder2") == {"starcoder2": {}}


def test_a_family_of_ones_own_is_listed_by_its_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    _, row = listed(capsys, monkeypatch, str(file))
    assert re.split(r"  +", row) == [str(file), "MyLM", "-"]
    assert read_json(capsys, str(file)) == {str(file): {}}


def test_an_unknown_family_is_one_error_message(capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--json"]):
        assert run_app(["models", "lama", *more]) == 2
        out, error = capsys.readouterr()
        assert (out, error) == ("", "realrl: 'lama' is not a model family; did you mean llama?\n")
