"""docs/constants.md has every constant of the cost model, its value and where it comes from."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from realrl.planner.cluster.efficiency import Efficiency

TEXT = (Path(__file__).parents[3] / "docs" / "constants.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([a-z0-9_]+)` \| (\S+) \| ([a-z ]+) \|(.*)\|$", TEXT.partition("## Others")[0], re.M)
SOURCELESS = ("counted",)
"""Kinds whose source is said once for all of them."""


def test_every_constant_has_a_row_with_its_value() -> None:
    assert [name for name, *_ in ROWS] == [field.name for field in fields(Efficiency)]
    for name, value, *_ in ROWS:
        expected = getattr(Efficiency(), name)
        if isinstance(expected, bool):
            assert value == str(expected), name
        else:
            assert float(value) == pytest.approx(expected), name


def test_every_row_names_its_source() -> None:
    for name, _, kind, source in ROWS:
        assert source.strip() or kind in SOURCELESS, name
