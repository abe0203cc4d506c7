"""Recipes: a YAML file plus `key=value` overrides, validated into an experiment."""

import copy
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import ValidationError

from realrl.config.base import Settings
from realrl.config.errors import UserError
from realrl.config.explain import brief, explain, nearest, shorten
from realrl.config.yaml_file import dump_yaml, parse_yaml, read_yaml
from realrl.recipe.experiment import EXPERIMENT, Experiment


def experiment_classes() -> dict[str, type[Settings]]:
    """Algorithm name -> class of its recipes."""
    return {get_args(cls.model_fields["algorithm"].annotation)[0]: cls for cls in get_args(Experiment)}


def experiment_class(algorithm: Any) -> type[Settings]:
    """The class of an algorithm's recipes; UserError, naming those there are, for any other name."""
    classes = experiment_classes()
    if not isinstance(algorithm, str) or algorithm not in classes:
        hint = nearest(str(algorithm), classes)
        suffix = f"; did you mean {hint}?" if hint else ""
        raise UserError(f"algorithm: {brief(algorithm)} is not one of {', '.join(classes)}{suffix}")
    return classes[algorithm]


def load_experiment(path: str, overrides: Sequence[str] = ()) -> Experiment:
    """Read a recipe, apply overrides `a.b.c=value` (values in YAML, so `null`, numbers and lists work).

    Raises UserError: one message with the file and line, or with the dotted path of the field.
    """
    settings = read_yaml(path)
    if not isinstance(settings, dict):
        raise UserError(f"{path} holds no recipe: it must be a mapping such as algorithm: sft")
    for override in overrides:
        settings = apply_override(settings, override)
    return parse_experiment(settings)


def parse_experiment(settings: dict[str, Any]) -> Experiment:
    """Validate a mapping; UserError with the dotted path of the first wrong field."""
    if settings.get("algorithm") is None:
        raise UserError(f"algorithm: missing; give one of {', '.join(experiment_classes())}")
    cls = experiment_class(settings["algorithm"])
    try:
        return EXPERIMENT.validate_python(settings)
    except ValidationError as error:
        # Every location starts with the tag of the union's member, which is nothing the user wrote.
        raise UserError(explain(error, cls, skip=1)) from None


def apply_override(settings: dict[str, Any], override: str) -> dict[str, Any]:
    """A copy of `settings` with `a.b.c=value` applied; sections on the way are created where missing."""
    name, equals, text = override.partition("=")
    *sections, last = name.strip().split(".")
    if not equals or not last or not all(sections):
        raise UserError(
            f"override {brief(override)} is not understood; write key=value, for example data.batch=32"
        )
    value = parse_yaml(text, f"override {shorten(override)}")
    settings = copy.deepcopy(settings)
    section = settings
    for depth, part in enumerate(sections):
        if section.get(part) is None:
            section[part] = {}
        section = section[part]
        if not isinstance(section, dict):
            inner = ".".join(sections[: depth + 1])
            raise UserError(
                f"override {shorten(override)}: {inner} is {brief(section)}, which has no keys inside"
            )
    section[last] = value
    return settings


def dump_experiment(experiment: Experiment) -> str:
    """YAML with every field of an experiment, defaults included; loads back to an equal object."""
    return dump_yaml(experiment.model_dump(mode="json"))
