"""Recipes that run one after the other in the same processes."""

from pathlib import Path

import pytest

from realrl.testing.ranks import RanksFailure, run_on_ranks
from tests.conftest import World


def test_the_failure_of_a_recipe_in_any_directory_is_reported(world: World, tmp_path: Path) -> None:
    recipes = []
    for name, changes in {"right": {}, "wrong": {"data__batch": 10**6}}.items():
        (tmp_path / name).mkdir()
        recipe = world.recipe("sft", tmp_path / name, training__steps=1, **changes)
        recipes.append(recipe.rename(recipe.with_stem(name)))
    with pytest.raises(RanksFailure, match=r"wrong: .*data\.batch") as caught:
        run_on_ranks(1, recipes)
    assert caught.value.recipe == "wrong"
