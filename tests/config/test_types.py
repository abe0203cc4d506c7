"""Values keep their type: nothing is turned into something else without notice."""

import pytest

from realrl.config.errors import UserError
from realrl.recipe.load import load_experiment, parse_experiment
from realrl.recipe.optimizer import OptimizerConfig

RECIPE = "algorithm: sft\nrun_dir: x\ndata: {train: a.jsonl}\nmodels: {actor: {path: a}}\n"


def load(tmp_path_factory: pytest.TempPathFactory, override: str) -> object:
    file = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    file.write_text(RECIPE)
    return load_experiment(str(file), [override])


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("data.batch=true", "data.batch: true is not a whole number"),
        ("data.batch='8'", "data.batch: '8' is not a whole number"),
        ("data.batch=8.5", "data.batch: 8.5 is not a whole number"),
        ("seed=false", "seed: false is not a whole number"),
        ("training.epochs=true", "training.epochs: true is not a number"),
        ("models.actor.optimizer.betas=[true, 0.9]", "models.actor.optimizer.betas.0: true is not a number"),
        ("overwrite=1", "overwrite: 1 is not true or false"),
        ("overwrite=maybe", "overwrite: 'maybe' is not true or false"),
        ("run_dir=3", "run_dir: 3 is not text; in quotes it would be"),
    ],
)
def test_a_value_of_another_type_is_refused(
    tmp_path_factory: pytest.TempPathFactory, override: str, sentence: str
) -> None:
    with pytest.raises(UserError) as caught:
        load(tmp_path_factory, override)
    assert str(caught.value) == sentence


def test_whole_numbers_are_numbers_and_lists_are_pairs() -> None:
    optimizer = OptimizerConfig.model_validate({"lr": 1, "betas": [0, 0.5]})
    assert optimizer.lr == 1.0 and optimizer.betas == (0.0, 0.5)


def test_infinite_numbers_are_refused_where_they_mean_nothing() -> None:
    settings = {
        "algorithm": "sft",
        "run_dir": "x",
        "data": {"train": "a"},
        "models": {"actor": {"path": "a"}},
    }
    with pytest.raises(UserError, match=r"training\.epochs: inf is not a finite number"):
        parse_experiment({**settings, "training": {"epochs": float("inf")}})
