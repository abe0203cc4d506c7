"""Recipes: a YAML file plus `key=value` overrides, validated into an experiment."""

import copy
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from realrl.config.errors import UserError
from realrl.config.explain import brief, explain, shorten
from realrl.config.paths import local_path
from realrl.config.secrets.redaction import REDACTED, redact_settings
from realrl.config.yaml_file import dump_yaml, parse_yaml, read_yaml
from realrl.recipe.checks import complete
from realrl.recipe.experiment import Experiment
from realrl.recipe.registry import describe_choices, find_algorithm


def load_experiment(path: str, overrides: Sequence[str] = ()) -> Experiment:
    """Read a recipe, apply overrides `a.b.c=value` (values in YAML, so `null`, numbers and lists work).

    Raises UserError: one message with the file and line, or with the dotted path of the field.
    """
    settings = read_yaml(path)
    if not isinstance(settings, dict):
        raise UserError(f"{path} holds no recipe: it must be a mapping such as algorithm: sft")
    _find_code(settings, local_path(path).parent, set())
    for override in overrides:
        settings = apply_override(settings, override)
    for name in _list_redacted(settings):
        raise UserError(
            f"{path}: {name} holds {REDACTED}, which stands for a secret that was not written; give it again by"
            f" {name}=VALUE behind the recipe"
        )
    return parse_experiment(settings)


def _find_code(settings: Any, folder: Path, seen: set[int]) -> None:
    """Make paths of code absolute that lies beside the recipe in `folder`, unless the current directory has it.

    Sections that stand in several places, or within themselves, are looked at once.
    """
    if not isinstance(settings, dict | list) or id(settings) in seen:
        return
    seen.add(id(settings))
    for key, value in settings.items() if isinstance(settings, dict) else enumerate(settings):
        _find_code(value, folder, seen)
        found = _CODE.fullmatch(value) if isinstance(value, str) else None
        if found and not local_path(found[1]).is_file() and (folder / found[1]).is_file():
            settings[key] = f"{(folder / found[1]).resolve()}{found[2]}"


_CODE = re.compile(r"([^\n]{1,200}\.py)((?::\w+)?)")
"""FILE.py and FILE.py:NAME."""


def parse_experiment(settings: dict[str, Any]) -> Experiment:
    """Validate a mapping; UserError with the dotted path of the first wrong field."""
    if settings.get("algorithm") is None:
        raise UserError(f"algorithm: missing; give {describe_choices()}")
    spec, reference = find_algorithm(settings["algorithm"])
    try:
        experiment = spec.recipe.model_validate({**settings, "algorithm": reference})
    except ValidationError as error:
        raise UserError(explain(error, spec.recipe)) from None
    return complete(experiment, spec)


def apply_override(settings: dict[str, Any], override: str) -> dict[str, Any]:
    """Copy `settings` with `a.b.c=value` applied; sections on the way are created where missing."""
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
    """YAML with every field of an experiment, defaults included; loads back to an equal object.

    Secrets are replaced, and where there were some, it does not load until they are given again.
    """
    return dump_yaml(dump_settings(experiment))


def dump_settings(experiment: Experiment) -> dict[str, Any]:
    """Dump the nested settings of an experiment, as JSON has them, without secrets."""
    settings: dict[str, Any] = redact_settings(experiment.model_dump(mode="json"))
    return settings


def _list_redacted(settings: Any, name: str = "", seen: set[int] | None = None) -> Iterator[str]:
    """List the dotted paths of settings from which a secret was removed.

    Lists and sections that stand in several places, or within themselves, are looked at once.
    """
    seen = set() if seen is None else seen
    if isinstance(settings, str) and REDACTED in settings:
        yield name
    if not isinstance(settings, dict | list) or id(settings) in seen:
        return
    seen.add(id(settings))
    for key, value in settings.items() if isinstance(settings, dict) else enumerate(settings):
        yield from _list_redacted(value, f"{name}.{key}" if name else str(key), seen)
