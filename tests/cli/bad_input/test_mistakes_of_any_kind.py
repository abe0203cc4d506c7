"""Every field of every recipe with every kind of wrong value: refused in one error message, or valid."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from realrl.cli.app import run_app
from realrl.config.base import Settings
from realrl.config.errors import UserError
from realrl.config.explain import section_class
from realrl.config.yaml_file import parse_yaml, read_yaml
from realrl.recipe.load import (
    apply_overrides,
    dump_experiment,
    parse_experiment,
)
from realrl.recipe.registry import find_algorithm, list_algorithms
from tests.cli.mistakes import is_message, recipe_of
from tests.conftest import thin


def fields(cls: type[Settings], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The dotted path and the type of every field of a recipe."""
    for name, field in cls.model_fields.items():
        yield prefix + name, repr(field)
        inner = section_class(field)
        if inner is not None:
            yield from fields(inner, f"{prefix}{name}.")


FIELDS = [(name, *field) for name in list_algorithms() for field in fields(find_algorithm(name)[0].recipe)]
ONCE = {(path, kind): (name, path) for name, path, kind in reversed(FIELDS)}
"""Fields that several algorithms have alike are tried with the first one of them."""
WRONG = (
    *("null", "true", "-1", "0", "1", "-0.5", "1.5", "1e30", "1e300", "1e-300", ".nan", ".inf", "-.inf"),
    *("1000000000000000000", "9" * 400, "text", "''", "'3'", "[]", "[1]", "[a, b]", "{}", "{a: 1}", "{1: 2}"),
    *(
        "'1e5'",
        "'1e-5x'",
        "'.5'",
        "'0x10'",
        "'2024-01-01'",
        "'1:30'",
        "'yes'",
        "'~'",
        "'<<'",
        "'1_0'",
        "'-.inf'",
    ),
    *("[[[[1]]]]", "2024-01-01", "!!timestamp 2024-01-01", "0x2", "1:30", "~nobody/x", "/proc/x"),
    *("!!binary aGk=", "!!set {a}", "&a [*a]", '"\\0"', "'a\U0001f600'", "'" + "x" * 5000 + "'"),
)
"""YAML of every kind that there is."""


@pytest.mark.parametrize(("algorithm", "path"), thin(reversed(ONCE.values()), 2))
def test_a_field_with_a_value_of_any_kind_is_refused_in_one_message_or_valid(
    place: Path, algorithm: str, path: str
) -> None:
    recipe = read_yaml(recipe_of(place, algorithm))
    for value in WRONG:
        try:
            experiment = parse_experiment(apply_overrides(recipe, [f"{path}={value}"]))
        except UserError as error:
            assert is_message(f"realrl: {error}")
        else:
            assert parse_experiment(parse_yaml(dump_experiment(experiment), "dump")) == experiment


@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.tuples(st.sampled_from(FIELDS), st.sampled_from(WRONG)), min_size=1, max_size=3))
def test_recipes_with_several_wrong_values_are_shown_or_refused_in_one_message(
    place: Path, capsys: pytest.CaptureFixture[str], changes: list[tuple[tuple[str, str, str], str]]
) -> None:
    algorithm = changes[0][0][0]
    overrides = [f"{path}={value}" for (of, path, _), value in changes if of == algorithm]
    status = run_app(["show", recipe_of(place, algorithm), *overrides])
    said = capsys.readouterr().err
    assert status in (0, 2) and "Traceback" not in said
    assert status == 0 or is_message(said)
