"""`realrl config`: settings of an algorithm as commented YAML, with the defaults that the algorithm has."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest

from realrl.cli.app import run_app
from realrl.config.base import PRESENCE, Settings
from realrl.config.errors import UserError
from realrl.config.yaml_file import parse_yaml
from realrl.recipe.describe import describe_settings
from realrl.recipe.load import change_settings, parse_experiment
from realrl.recipe.optimizer import OptimizerConfig
from realrl.recipe.registry import find_algorithm, list_algorithms
from tests.config.minimal import least


def describe(algorithm: str, **options: Any) -> str:
    return describe_settings(find_algorithm(algorithm)[0].recipe, algorithm=algorithm, **options)


def compare(printed: Mapping[str, Any], cls: type[Settings], section: Settings | None, path: str = "") -> int:
    """Compare printed values with the defaults that validation takes; return the number of values compared."""
    compared = 0
    fields = cls.written_fields()
    present = {name: field for name, field in fields.items() if field.json_schema_extra != PRESENCE}
    assert set(printed) == set(present), path
    for name, field in present.items():
        if section is None and field.is_required():
            continue
        default = field.get_default() if section is None else getattr(section, name)
        if isinstance(default, Settings):
            if printed[name]:  # {} stands for keys that are printed elsewhere
                compared += compare(printed[name], type(default), default, f"{path}{name}.")
        else:
            expected = list(default) if isinstance(default, tuple) else default
            assert printed[name] == expected, f"{path}{name}"
            compared += 1
    return compared


@pytest.mark.parametrize("algorithm", list_algorithms())
def test_every_field_is_printed_with_the_algorithms_default_and_its_meaning(algorithm: str) -> None:
    text = describe(algorithm)
    printed = parse_yaml(text, "printed")
    assert printed.pop("algorithm") == algorithm
    assert compare({"algorithm": None, **printed}, find_algorithm(algorithm)[0].recipe, None) > 40
    for above, line in pairwise(text.splitlines()):
        is_field = line.strip() and not line.strip().startswith("#")
        assert not is_field or above.strip().startswith("#"), f"{line!r} is not explained"


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("algorithm", list_algorithms())
def test_what_is_printed_is_the_recipe_of_the_required_settings_alone(algorithm: str, common: bool) -> None:
    required = least(algorithm)
    printed = parse_yaml(describe(algorithm, common=common), "printed")
    # Sections are merged, so that only what is required, and nothing of it printed, comes from the other recipe.
    assert parse_experiment(change_settings(printed, required.items())) == parse_experiment(required)


@pytest.mark.parametrize(
    ("algorithm", "kl"),
    [
        ("grpo", (0.04, "loss", "k3")),
        ("dapo", (0.0, "loss", "k3")),
        ("rloo", (0.05, "reward", "k1")),
        ("remax", (0.01, "token_reward", "k1")),
        ("reinforce_pp_baseline", (0.01, "loss", "k2")),
    ],
)
def test_one_section_is_printed_within_those_around_it(
    algorithm: str, kl: tuple[float, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(["config", algorithm, "policy.kl"]) == 0
    printed = parse_yaml(capsys.readouterr().out, "printed")
    assert list(printed) == ["policy"] and list(printed["policy"]) == ["kl"]
    section = printed["policy"]["kl"]
    assert (section["coef"], section["place"], section["estimator"]) == kl


def test_one_field_and_a_section_that_repeats_another_are_printed_in_full() -> None:
    assert parse_yaml(describe("grpo", section="data.batch"), "printed") == {"data": {"batch": 64}}
    critic = parse_yaml(describe("ppo", section="models.critic.optimizer"), "printed")["models"]["critic"]
    assert critic["optimizer"] == {**OptimizerConfig().model_dump(), "betas": [0.9, 0.95]}


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("policy.kll", "policy.kll: there is no such setting; did you mean policy.kl?"),
        ("kl", "did you mean policy.kl?"),
        ("num_generations", "did you mean policy.samples?"),
        ("zzz", "zzz: there is no such setting; there are algorithm, run_dir"),
    ],
)
def test_an_unknown_section_is_one_error_message(section: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        describe("grpo", section=section)
    assert words in str(caught.value)


def test_the_common_settings_are_printed_and_all_of_them_with_an_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_app(["config", "grpo"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1].startswith("#") and "`realrl config grpo --all`" in text.splitlines()[-1]
    short = parse_yaml(text, "printed")
    assert {"models", "data", "policy", "generation", "reward"} <= set(short)
    assert set(short["policy"]) == {"samples", "clip", "kl", "minibatches"}
    assert "debug" not in short and len(describe("grpo", common=True)) < len(describe("grpo")) / 3
    assert run_app(["config", "grpo", "--all"]) == 0
    assert capsys.readouterr().out == describe("grpo")
