"""Fixtures of this room."""

from collections.abc import Callable

import pytest
from small_models import SHAPES, Twins, make_twins

from realrl.families.shape import Head, ModelShape


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> ModelShape:
    """One of several small shapes."""
    return SHAPES[request.param]


@pytest.fixture
def twins() -> Callable[[ModelShape, Head], Twins]:
    """Makes our model and the transformers one with the same random weights."""
    return make_twins
