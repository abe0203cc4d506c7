"""Shipped recipes, damaged at random: shown, or refused in one message."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from realrl.config.errors import UserError
from realrl.config.yaml_file import parse_yaml
from realrl.recipe.load import dump_experiment, load_experiment, parse_experiment
from tests.cli.mistakes import is_message
from tests.fuzz.commands import check_command, ends_soon, fuzz

ROOT = Path(__file__).parents[2]
RECIPES = {
    str(file.relative_to(ROOT)): file.read_text() for file in sorted((ROOT / "recipes").rglob("*.yaml"))
}
NAMES = list(RECIPES)
LARGE = ("64_gpus", "8_gpus", "policy_gradient", "reference", "distillation", "expert_iteration")
"""Parts of the names of recipes whose programs take seconds to make; they are read, and not shown."""
TREES = {name: yaml.safe_load(text) for name, text in RECIPES.items()}
KEYS = sorted(
    {str(key) for tree in TREES.values() for key in tree}
    | {"steps", "path", "lr", "function", "coef", "train"}
)

huge = st.sampled_from(
    [2**31, 2**63, 2**64, 10**19, 10**20, 10**21, -(2**63), 10**400, 1e308, -1e308, 5e-324]
)
ODD = (
    *(
        "",
        " ",
        "/",
        "~",
        "..",
        "*",
        "\u202e",
        "\U0001f600" * 9,
        "é" * 300,
        "a:b",
        "file:///etc/passwd",
        "1x1",
        "0x0",
    ),
    *(
        "999999x999999",
        "1x100000",
        "-1x2",
        "h100:2x8",
        "search",
        "auto",
        "80GiB",
        "-1GiB",
        "1e9TiB",
        "nan",
        "a\0b",
    ),
    *("\n", "{{7*7}}", "$(id)", "os:system", "os.path:join", "realrl.cli.app:run_app", "x.py:f", "x" * 3000),
)
texts = st.text(max_size=30) | st.sampled_from(ODD)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | huge | texts
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | texts, inner, max_size=4)
    ),
    max_leaves=8,
)


def list_paths(tree: Any) -> list[tuple[Any, ...]]:
    """List the way to every node of a recipe but the root."""
    if isinstance(tree, dict):
        return [(key, *rest) for key, inner in tree.items() for rest in [(), *list_paths(inner)]]
    if isinstance(tree, list):
        return [(i, *rest) for i, inner in enumerate(tree) for rest in [(), *list_paths(inner)]]
    return []


@st.composite
def damaged_trees(draw: Callable[..., Any]) -> tuple[str, bytes]:
    """A recipe some of whose values, keys or sections are others, in YAML."""
    origin = draw(st.sampled_from(NAMES))
    tree = copy.deepcopy(TREES[origin])
    for _ in range(draw(st.integers(1, 3))):
        paths = list_paths(tree)
        if not paths:
            break
        *way, last = draw(st.sampled_from(paths))
        parent = tree
        for step in way:
            parent = parent[step]
        kind = draw(st.sampled_from(["value", "value", "number", "delete", "rename", "add", "wrap", "copy"]))
        if kind == "number" and isinstance(parent[last], int | float):
            parent[last] = draw(st.integers() | st.floats() | huge)
        elif kind == "delete":
            del parent[last]
        elif kind in ("rename", "add") and isinstance(parent, dict):
            value = parent.pop(last) if kind == "rename" else draw(values)
            parent[draw(st.sampled_from(KEYS) | texts | st.integers())] = value
        elif kind == "wrap":
            parent[last] = [parent[last]] if draw(st.booleans()) else {str(last): parent[last]}
        elif kind == "copy":
            source: Any = tree
            for step in draw(st.sampled_from(paths)):
                # An earlier change may have replaced what the way led through.
                source = source[step] if isinstance(source, dict | list) else source
            parent[last] = copy.deepcopy(source)
        else:
            parent[last] = draw(values)
    text: str = yaml.safe_dump(tree, allow_unicode=draw(st.booleans()), sort_keys=False)
    return origin, text.encode()


ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
"""Nine lists, each of nine times the one before: 9^9 texts where they are written out."""
PIECES = (
    *(
        "\t",
        ": ",
        "- ",
        "&a ",
        "*a",
        "*b ",
        "<<: *a\n",
        "? ",
        "| \n",
        "> \n",
        "---\n",
        "...\n",
        "%YAML 1.3\n",
    ),
    *(
        "!!python/object/apply:os.system [id]\n",
        "!!python/name:os.system ",
        "!!binary ",
        "!x ",
        "'",
        '"',
        "{",
        "}",
    ),
    *(
        "[",
        "]",
        "#",
        "\r",
        "\u2028",
        "\ufeff",
        "\x00",
        "\x7f",
        "\ud7ff",
        "[" * 200,
        "{a: " * 200,
        "- " * 500,
        ALIASES,
    ),
    *(
        "models: *i\n",
        "data: {train: &x [*x]}\n",
        "? [a, b]\n: c\n",
        "algorithm: sft\n",
        "=\n",
        "1" * 5000,
        "~: 1\n",
    ),
)


@st.composite
def damaged_texts(draw: Callable[..., Any]) -> tuple[str, bytes]:
    """A recipe whose text is damaged, and perhaps no text any more."""
    origin = draw(st.sampled_from(NAMES))
    data = RECIPES[origin].encode()
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(["piece", "piece", "line", "drop", "repeat", "flip", "cut", "bytes"]))
        if kind in ("piece", "line"):
            at = data.rfind(b"\n", 0, at) + 1 if kind == "line" else at
            data = data[:at] + draw(st.sampled_from(PIECES)).encode("utf-8", "surrogatepass") + data[at:]
        elif kind == "drop":
            data = data[:at] + data[at + draw(st.integers(1, 20)) :]
        elif kind == "repeat":
            data = data[:at] + data[max(0, at - draw(st.integers(1, 200))) :]
        elif kind == "flip" and at < len(data):
            data = data[:at] + bytes([data[at] ^ draw(st.integers(1, 255))]) + data[at + 1 :]
        elif kind == "cut":
            data = data[:at]
        else:
            data = data[:at] + draw(st.binary(max_size=8)) + data[at:]
    return origin, data


def check_recipe(file: Path, damaged: tuple[str, bytes], capsys: pytest.CaptureFixture[str]) -> None:
    """Check that a recipe is shown, or refused in one message."""
    origin, content = damaged
    file.write_bytes(content)
    if not any(part in origin for part in LARGE):
        check_command(["show", str(file)], capsys)
        return
    with ends_soon():
        try:
            experiment = load_experiment(str(file))
        except UserError as error:
            assert is_message(f"realrl: {error}")
        else:
            assert parse_experiment(parse_yaml(dump_experiment(experiment), "dump")) == experiment


@fuzz(125)
@given(damaged_trees())
def test_recipes_with_other_values_and_keys_are_shown_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damaged: tuple[str, bytes]
) -> None:
    check_recipe(tmp_path / "recipe.yaml", damaged, capsys)


@fuzz(125)
@given(damaged_texts())
def test_recipes_with_damaged_text_are_shown_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damaged: tuple[str, bytes]
) -> None:
    check_recipe(tmp_path / "recipe.yaml", damaged, capsys)
