"""Settings that are given in part keep the rest: of the algorithm's defaults, and of the recipe's sections."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from realrl.config.base import PRESENCE, Settings
from realrl.config.errors import UserError
from realrl.config.explain import section_class
from realrl.recipe.experiment import Experiment
from realrl.recipe.load import change_settings, load_experiment, parse_experiment
from realrl.recipe.registry import find_algorithm, list_algorithms
from tests.config.minimal import least

GRPO = """
algorithm: grpo
run_dir: runs/x
data: {train: {a.jsonl: 1, b.jsonl: 2}, columns: {question: prompt}}
models: {actor: {path: a, optimizer: {lr: 1.0e-4, warmup_steps: 20}}}
reward: {verifier: {kind: exact_match}}
policy: {minibatches: 4, kl: {coef: 0.3, adaptive: true}}
trackers: {wandb: {project: x, tags: [a, b]}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "grpo.yaml"
    path.write_text(GRPO)
    return str(path)


def list_defaults(
    cls: type[Settings], section: Settings | None = None, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """The dotted path and the default of every field that has one, sections included."""
    for name, field in cls.written_fields().items():
        path = prefix + name
        if field.json_schema_extra == PRESENCE:
            continue
        inner = section_class(field)
        value = None if section is None and field.is_required() else getattr(section, name, field.default)
        if field.is_required() and section is None and inner is not None:
            yield from list_defaults(inner, None, f"{path}.")
        elif isinstance(value, Settings):
            yield path, value.model_dump(mode="json")
            yield from list_defaults(type(value), value, f"{path}.")
        elif not field.is_required():
            yield path, list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("algorithm", list_algorithms())
def test_a_default_that_is_written_out_changes_nothing(algorithm: str) -> None:
    settings = least(algorithm)
    plain = parse_experiment(settings)
    given = {"reward", *(f"models.{role}.path" for role in settings["models"])}
    everything = list_defaults(find_algorithm(algorithm)[0].recipe)
    defaults = [(path, value) for path, value in everything if path not in given]
    assert len(defaults) > 50
    changed = [
        path
        for path, value in defaults
        if parse_experiment(change_settings(settings, [(path, value)])) != plain
    ]
    assert changed == []
    assert parse_experiment(change_settings(settings, defaults)) == plain


def kl_of(experiment: Experiment) -> tuple[float, str, str]:
    kl = experiment.policy.kl  # type: ignore[attr-defined]
    return kl.coef, kl.place, kl.estimator


@pytest.mark.parametrize(
    ("algorithm", "override", "kl"),
    [
        ("rloo", "policy.kl.coef=0.2", (0.2, "reward", "k1")),
        ("rloo", "policy={kl: {coef: 0.2}}", (0.2, "reward", "k1")),
        ("rloo", "policy.kl.estimator=k1", (0.05, "reward", "k1")),
        ("remax", "policy.kl.coef=0.2", (0.2, "token_reward", "k1")),
        ("reinforce_pp_baseline", "policy.kl={coef: 0.2}", (0.2, "loss", "k2")),
        ("dapo", "policy.kl.target=6", (0.0, "loss", "k3")),
        ("grpo", "policy.kl.adaptive=true", (0.04, "loss", "k3")),
        ("grpo", "policy.kl={}", (0.04, "loss", "k3")),
    ],
)
def test_one_key_of_a_section_leaves_the_algorithms_other_defaults(
    algorithm: str, override: str, kl: tuple[float, str, str], tmp_path: Path
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(least(algorithm)))
    experiment = load_experiment(str(path), [override])
    assert kl_of(experiment) == kl
    assert (experiment.models.ref is None) is (kl[0] == 0)  # type: ignore[attr-defined]


def test_a_section_of_a_section_in_a_default_keeps_what_the_default_says() -> None:
    class Inner(Settings):
        a: int = 1
        b: int = 1

    class Middle(Settings):
        inner: Inner = Inner()
        c: int = 1

    class Outer(Settings):
        middle: Middle = Middle(inner=Inner(a=2), c=2)

    read = Outer.model_validate({"middle": {"inner": {"b": 3}}})
    assert read.middle.model_dump() == {"inner": {"a": 2, "b": 3}, "c": 2}


@pytest.mark.parametrize("setting", ["adaptive=true", "target=3", "horizon=10"])
def test_a_kl_coefficient_of_0_has_nothing_to_adapt(recipe: str, setting: str) -> None:
    off = ["policy.kl.adaptive=false", "policy.kl.coef=0"]
    assert load_experiment(recipe, off).models.ref is None  # type: ignore[attr-defined]
    with pytest.raises(
        UserError, match=f"policy.kl: {setting} needs a coefficient that can adapt, and coef=0"
    ):
        load_experiment(recipe, [*off, f"policy.kl.{setting}"])


def test_a_mapping_is_merged_over_the_recipes_section(recipe: str) -> None:
    overrides = ["policy={samples: 16, kl: {coef: 0.2}}", "models={actor: {optimizer: {lr: 1e-3}}}"]
    experiment = load_experiment(recipe, overrides)
    policy, optimizer = experiment.policy, experiment.models.actor.optimizer  # type: ignore[attr-defined]
    assert (policy.samples, policy.minibatches, policy.kl.coef, policy.kl.adaptive) == (16, 4, 0.2, True)
    assert (optimizer.lr, optimizer.warmup_steps) == (1e-3, 20)
    assert experiment.models.actor.path == "a"  # type: ignore[attr-defined]


def test_what_is_no_section_is_replaced_as_a_whole(recipe: str) -> None:
    overrides = [
        "data={train: {c.jsonl: 3}, columns: {query: prompt}}",
        "reward={format: {verifier: {kind: regex, pattern: x}}, 'right': {verifier: {kind: exact_match}}}",
        "reward.format.weight=0.5",
        "trackers={wandb: {tags: [c]}}",
    ]
    experiment = load_experiment(recipe, overrides)
    assert experiment.data.train == {"c.jsonl": 3} and experiment.data.columns == {"query": "prompt"}
    terms = experiment.reward  # type: ignore[attr-defined]
    assert {name: term.weight for name, term in terms.items()} == {"format": 0.5, "right": 1.0}
    assert experiment.trackers.wandb is not None
    assert (experiment.trackers.wandb.project, experiment.trackers.wandb.tags) == ("x", ["c"])


def test_null_removes_a_section_and_what_the_recipe_says_of_it(recipe: str) -> None:
    assert load_experiment(recipe, ["trackers.wandb=null"]).trackers.wandb is None
    policy = load_experiment(recipe, ["policy=null", "policy={samples: 16}"]).policy  # type: ignore[attr-defined]
    assert (policy.samples, policy.minibatches, policy.kl.coef) == (16, 1, 0.04)


def test_changes_leave_the_settings_that_they_are_made_from_alone() -> None:
    settings = least("grpo")
    change_settings(settings, [("models", {"actor": {"path": "b"}}), ("data.batch", 8)])
    assert settings == least("grpo")
