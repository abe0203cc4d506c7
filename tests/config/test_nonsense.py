"""Settings that cannot do what they ask for are refused, whichever algorithm they are for."""

import pytest

from realrl.config.errors import UserError
from realrl.recipe.load import change_settings, parse_experiment
from tests.config.minimal import least


def refuse(algorithm: str, words: str, **changes: object) -> None:
    settings = change_settings(
        least(algorithm), [(name.replace("__", "."), v) for name, v in changes.items()]
    )
    with pytest.raises(UserError) as caught:
        parse_experiment(settings)
    assert words in str(caught.value)


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "expert_iteration", "distillation"])
def test_several_answers_to_a_prompt_need_tokens_that_are_drawn(algorithm: str) -> None:
    section = {"grpo": "policy", "rloo": "policy"}.get(algorithm, algorithm)
    several: dict[str, object] = {f"{section}__samples": 6}
    for setting, value in (("greedy", True), ("top_k", 1)):
        said = f"generation.{setting}={'true' if value is True else 1} always takes the likeliest token"
        refuse(algorithm, said, **several, **{f"generation__{setting}": value})
    parse_experiment(change_settings(least(algorithm), [(f"{section}.samples", 6), ("generation.top_k", 2)]))


def test_several_answers_of_an_evaluation_need_tokens_that_are_drawn() -> None:
    words = "evaluation.samples=2 would all be the same, since evaluation takes the likeliest token (top_k=1)"
    refuse("ppo", words, generation__top_k=1, evaluation__samples=2)


@pytest.mark.parametrize(
    ("algorithm", "field", "value", "form"),
    [
        ("dpo", "train_on", "last", "pair"),
        ("kto", "train_on", "last", "label"),
        ("grpo", "train_on", "last", "prompt"),
        ("sft", "pair_weight", "prompt", "answer"),
        ("sft", "max_pairs_per_prompt", 2, "answer"),
    ],
)
def test_settings_of_other_forms_of_records_are_refused(
    algorithm: str, field: str, value: object, form: str
) -> None:
    words = f"data.{field}={value} is about records of the form"
    refuse(algorithm, words, **{f"data__{field}": value})
    refuse(algorithm, f"have the form {form}; leave it out", **{f"data__{field}": value})


@pytest.mark.parametrize(
    ("loss", "given", "per_token"),
    [
        ("ipo", None, True),
        ("ipo", True, True),
        ("sigmoid", None, False),
        ("sigmoid", True, True),
        ("hinge", False, False),
    ],
)
def test_losses_that_compare_means_over_tokens_take_them_by_default(
    loss: str, given: bool | None, per_token: bool
) -> None:
    changes = [("preference.loss", loss), ("preference.length_normalization", given)]
    experiment = parse_experiment(change_settings(least("dpo"), changes))
    assert experiment.preference.per_token is per_token  # type: ignore[attr-defined]
