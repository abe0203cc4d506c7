"""Load recipes: a YAML file and `key=value` overrides are validated and become an experiment."""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError

from realrl.config.base import Settings
from realrl.config.errors import UserError
from realrl.config.explain import accept_name, brief, explain, section_class, shorten
from realrl.config.paths import local_path
from realrl.config.redaction import REDACTED, redact_settings
from realrl.config.yaml_file import dump_yaml, parse_yaml, read_yaml
from realrl.recipe.checks import complete
from realrl.recipe.experiment import Experiment
from realrl.recipe.other_names import OTHER_NAMES
from realrl.recipe.registry import describe_choices, find_algorithm


def load_experiment(path: str, overrides: Sequence[str] = ()) -> Experiment:
    """Read a recipe, and apply overrides `a.b.c=value`. Values are YAML, so `null`, numbers and lists work.

    Raises UserError with file and line, or with the dotted path of each wrong field.
    """
    settings = read_yaml(path)
    if not isinstance(settings, dict):
        raise UserError(f"{path} holds no recipe: it must be a mapping such as algorithm: sft")
    _find_code(settings, local_path(path).parent, set())
    settings = apply_overrides(settings, overrides)
    for name in _list_redacted(settings):
        raise UserError(
            f"{path}: {name} holds {REDACTED}, which stands for a secret that was not written; give it again by"
            f" {name}=VALUE behind the recipe"
        )
    return parse_experiment(settings)


def _find_code(settings: Any, folder: Path, seen: set[int]) -> None:
    """Make paths of code absolute if the files are in `folder`, the recipe's directory, and not in the current
    directory.

    Sections that are repeated or recursive are visited once.
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
"""Matches FILE.py and FILE.py:NAME."""


def parse_experiment(settings: dict[str, Any]) -> Experiment:
    """Create an experiment from a mapping. Raises UserError with the dotted path of each wrong field."""
    if settings.get("algorithm") is None:
        raise UserError(f"algorithm: missing; give {describe_choices()}")
    spec, reference = find_algorithm(settings["algorithm"])
    settings = rename_settings(settings, spec.recipe)
    try:
        experiment = spec.recipe.model_validate({**settings, "algorithm": reference})
    except ValidationError as error:
        raise UserError(explain(error, spec.recipe, other_names=OTHER_NAMES)) from None
    return complete(experiment, spec)


def apply_overrides(settings: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Copy `settings` with overrides `a.b.c=value` applied in order, see `change_settings`."""
    return change_settings(settings, [_parse_override(override) for override in overrides])


def _parse_override(override: str) -> tuple[str, Any]:
    """Split `a.b.c=value` into name and value. Raises UserError for anything else."""
    name, equals, text = override.partition("=")
    if not equals or not all(name.strip().split(".")):
        raise UserError(
            f"override {brief(override)} is not understood; write key=value, for example data.batch=32"
        )
    return name.strip(), parse_yaml(text, f"override {shorten(override)}")


def change_settings(settings: Mapping[str, Any], changes: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Copy the settings of a recipe, and apply changes (`a.b.c`, value) in order.

    If the value is a mapping, a section changes only in the fields of the mapping, at every depth. All other values
    are replaced as a whole: numbers, lists, null, and mappings whose keys are not settings, such as a mixture of
    data or a `reward`. Missing sections are created. Raises UserError for an unknown algorithm, or if a name treats
    a plain value as a section.
    """
    changed, changes = copy.deepcopy(dict(settings)), list(changes)
    algorithm = {**settings, **dict(changes)}.get("algorithm")
    recipe = None if algorithm is None else find_algorithm(algorithm)[0].recipe
    if recipe is not None:
        changed = rename_settings(changed, recipe)
    for name, value in changes:
        name, value = rename_setting(name, value, recipe)
        *path, last = name.split(".")
        section: Any = changed
        cls: type[Settings] | None = recipe
        for depth, part in enumerate(path):
            if section.get(part) is None:
                section[part] = {}
            section, cls = section[part], _class_inside(cls, part)
            if not isinstance(section, dict):
                inner = ".".join(path[: depth + 1])
                raise UserError(f"{name}: {inner} is {brief(section)}, which has no keys inside")
        _merge(section, last, value, cls)
    return changed


def rename_settings(settings: Mapping[str, Any], recipe: type[Settings]) -> dict[str, Any]:
    """Copy settings, and replace the names of other tools by the names that realrl uses (docs/recipes.md).

    Raises UserError if both names of a setting are given.
    """
    renamed = copy.deepcopy(dict(settings))
    for path in list(_list_unknown(renamed, recipe)):
        *place, key = path
        section = renamed
        for part in place:
            section = section[part]
        name, value = rename_setting(".".join(path), section[key], recipe)
        if name == ".".join(path):
            continue
        del section[key]
        *target, last = name.split(".")
        section = renamed
        for part in target:
            if section.get(part) is None:
                section[part] = {}
            section = section[part]
        if last in section:
            raise UserError(f"{'.'.join(path)} and {name} are the same setting; give one of them")
        section[last] = value
    return renamed


def rename_setting(name: str, value: Any, recipe: type[Settings] | None) -> tuple[str, Any]:
    """Translate the name and value of a setting with another tool's name; return other settings unchanged.

    `name` is a path such as `policy.samples`.
    """
    path = name.split(".")
    *place, _ = path
    cls = recipe
    for part in place:
        cls = _class_inside(cls, part)
    if recipe is None or cls is None or path[-1] in cls.model_fields:
        return name, value
    found = accept_name(path, place, recipe, OTHER_NAMES)
    if found is None:
        return name, value
    other, target = found
    return target, other.values.get(value, value) if isinstance(value, str | bool) else value


def _list_unknown(section: Mapping[str, Any], cls: type[Settings]) -> Iterator[list[str]]:
    """Yield the path of each key that is not a setting."""
    for key, value in section.items():
        if not isinstance(key, str):
            continue  # validation names it
        inner = _class_inside(cls, key)
        if key not in cls.model_fields:
            yield [key]
        elif inner is not None and isinstance(value, Mapping):
            yield from ([key, *path] for path in _list_unknown(value, inner))


def _merge(section: dict[str, Any], key: str, value: Any, cls: type[Settings] | None) -> None:
    """Set a key in a section of class `cls`. If old and new value are both mappings of settings, merge them."""
    inner, before = _class_inside(cls, key), section.get(key)
    if inner is None or not isinstance(value, Mapping) or not isinstance(before, dict):
        section[key] = copy.deepcopy(value)
        return
    for name, new in value.items():
        _merge(before, name, new, inner)


def _class_inside(cls: type[Settings] | None, key: str) -> type[Settings] | None:
    """Find the class of a section of `cls`; None for a value or an unknown key."""
    field = None if cls is None else cls.model_fields.get(key)
    # Lists and tables of sections count as values, because their entries have no fixed names.
    if field is None or get_origin(field.annotation) in (list, dict, tuple):
        return None
    return section_class(field)


def dump_experiment(experiment: Experiment, *, secrets: bool = False) -> str:
    """Write YAML with every field of an experiment, defaults included; it loads back to an equal object.

    Without `secrets`, a placeholder replaces each secret. The YAML then loads only if the secrets are given again.
    """
    return dump_yaml(experiment.model_dump(mode="json") if secrets else dump_settings(experiment))


def dump_settings(experiment: Experiment) -> dict[str, Any]:
    """Dump the nested settings of an experiment as JSON values, without secrets."""
    settings: dict[str, Any] = redact_settings(experiment.model_dump(mode="json"))
    return settings


def _list_redacted(settings: Any, name: str = "", seen: set[int] | None = None) -> Iterator[str]:
    """Yield the dotted paths of settings whose secret was replaced by a placeholder.

    Lists and sections that are repeated or recursive are visited once.
    """
    seen = set() if seen is None else seen
    if isinstance(settings, str) and REDACTED in settings:
        yield name
    if not isinstance(settings, dict | list) or id(settings) in seen:
        return
    seen.add(id(settings))
    for key, value in settings.items() if isinstance(settings, dict) else enumerate(settings):
        yield from _list_redacted(value, f"{name}.{key}" if name else str(key), seen)
