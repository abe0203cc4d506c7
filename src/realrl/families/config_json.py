"""Read a model's shape from a Hugging Face `config.json`, and write it back, by the family that the file names."""

import json
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from realrl.config.base import Settings
from realrl.config.errors import UserCodeError, UserError
from realrl.config.explain import brief, explain
from realrl.config.json_file import read_json
from realrl.families.family import Family
from realrl.families.registry import find_family, find_layer_options, list_families
from realrl.families.settings import IRRELEVANT, ConfigReader
from realrl.families.shape import Head, ModelShape

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_COMPARABLE = 5
"""Minimum number of settings in a `config.json` that is compared with known families."""
_UNTOUCHED = ("attention_dropout", "use_cache", *SPECIAL_TOKENS)


def read_config(file: Path, family: str | None = None) -> ModelShape:
    """Read the shape that a `config.json` describes; see `shape_from_hf`. Raises UserError if the file does not
    exist."""
    return shape_from_hf(read_json(file), str(file), family)


def shape_from_hf(
    config: Mapping[str, Any], where: str = "config.json", family: str | None = None
) -> ModelShape:
    """Derive the shape that the contents of a `config.json` describe.

    `where` names the file in errors. `family` is a reference for `find_family`; by default it is the file's
    `model_type`. Raises UserError if the file is of another family, has a setting that models here do not support,
    or cannot be written back by its family.
    """
    model_type = config.get("model_type")
    if family is None:
        known = list_families()
        if model_type not in known:
            text = config.get("text_config")
            if isinstance(text, Mapping) and text.get("model_type") in known:
                raise UserError(
                    f"{where}: model_type {brief(model_type)} reads more than text and is not supported, but its"
                    f" text model, {text['model_type']}, is: save that model in a directory of its own, with"
                    " text_config as its config.json"
                )
            raise UserError(
                f"{where}: model_type {brief(model_type)} is not supported; supported are: {', '.join(known)};"
                f" {_compare_with_nearest(config, known)}to use a family of your own, name its file in"
                " models.ROLE.family of a recipe, or with --family"
            )
        family = str(model_type)
    found = find_family(family)
    _check_model_type(found, config, where, family)
    shape = _read_shape(found, config, where, family)
    check_writing(shape)
    return shape


def _compare_with_nearest(config: Mapping[str, Any], known: Sequence[str]) -> str:
    """Describe the known family that is nearest to a `config.json`, and a setting that this family lacks. Empty if
    no family is near."""
    if len(config) < _COMPARABLE:
        return ""
    nearest: tuple[int, float, str, str] | None = None
    for name in known:
        family = find_family(name)
        reader = ConfigReader(config, name)
        try:
            family.read_config(reader)
            unread = reader.unread(family.untouched)
            problem = f"which has no {unread[0]}={brief(config[unread[0]])}" if unread else ""
        except UserError as error:
            unread, problem = [*config], f"but {str(error).removeprefix(f'{name}: ')}"
        alike = SequenceMatcher(None, name, str(config.get("model_type"))).ratio()
        if nearest is None or (len(unread), -alike) < nearest[:2]:
            nearest = len(unread), -alike, name, problem
    # A family that does not know half of the settings is not near.
    if nearest is None or nearest[0] > len(config.keys() - IRRELEVANT) / 2:
        return ""
    *_, name, problem = nearest
    return f"the nearest is {name}, {problem or 'which has the same settings'}; "


def check_writing(shape: ModelShape) -> None:
    """Raise UserError unless a shape's family reads back the `config.json` that it writes for the shape. Otherwise
    a mistake would only show when a model is saved, hours into a run."""
    label, family = f"family={shape.family}", find_family(shape.family)
    if (shape.mixture is not None) != family.mixture:
        problem = "needs a mixture: experts and per_token" if family.mixture else "cannot have a mixture"
        raise UserError(f"{label}: a shape of this family {problem}")
    config = shape_to_hf(shape, "lm", "float32", {})
    try:
        config = json.loads(json.dumps(config))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{label}: write_config returns what config.json cannot hold: {error}") from None
    where = "what write_config returns"
    try:
        _check_model_type(family, config, where, shape.family)
        again = _read_shape(family, config, where, shape.family)
    except UserCodeError as error:
        problem = str(error).removeprefix(label).lstrip(": ")
        raise UserCodeError(f"{label}: read_config of {where}: {problem}", error.trace) from error
    except UserError as error:
        raise UserError(f"{label}: {str(error).removeprefix(f'{label}: ')}") from None
    changed = _find_change(shape, again)
    if changed is not None:
        name, given, read = changed
        raise UserError(
            f"{label}: read_config does not read back what write_config returns:"
            f" {name}={brief(given)} becomes {brief(read)}"
        )


def _find_change(given: Settings, read: Settings) -> tuple[str, Any, Any] | None:
    """Find the first field that differs between two settings of one class: its name and both values."""
    for name in type(given).model_fields:
        one, other = getattr(given, name), getattr(read, name)
        if isinstance(one, Settings) and type(one) is type(other):
            within = _find_change(one, other)
            if within is not None:
                return f"{name}.{within[0]}", *within[1:]
        elif one != other:
            return name, one, other
    return None


def _check_model_type(found: Family, config: Mapping[str, Any], where: str, family: str) -> None:
    model_type = config.get("model_type")
    if found.model_type != model_type:
        raise UserError(
            f"{where}: model_type is {brief(model_type)}, but family {family} has {brief(found.model_type)}"
        )


def _read_shape(found: Family, config: Mapping[str, Any], where: str, family: str) -> ModelShape:
    reader = ConfigReader(config, where)
    fields = _mapping(found.read_config(reader), family, "read_config")
    reader.check_all_read(found.untouched)
    usual = {"layer": None} if fields.get("layer") == found.layer else {}
    try:
        shape = ModelShape(**{**fields, **usual, "family": family})
    except ValidationError as error:
        raise UserError(f"{where}: {explain(error, ModelShape)}") from error
    return shape


def _mapping(given: Any, family: str, function: str) -> Mapping[str, Any]:
    """Check that a family's function returned a mapping whose keys are text. Raises UserError if not."""
    if not isinstance(given, Mapping):
        raise UserError(f"family={family}: {function} must return a mapping, not {brief(given)}")
    wrong = next((key for key in given if not isinstance(key, str)), None)
    if wrong is not None:
        raise UserError(f"family={family}: {function} returns the key {brief(wrong)}, which is not text")
    return given


def shape_to_hf(shape: ModelShape, head: Head, dtype: str, others: Mapping[str, Any]) -> dict[str, Any]:
    """Make the contents of a `config.json` that transformers 4 and 5 and inference servers understand.

    `dtype` is torch's name, such as `float32`. Settings that training does not touch are copied from `others`, the
    settings of the model that was opened. A scalar head becomes a sequence classifier with one label.
    """
    family = find_family(shape.family)
    config: dict[str, Any] = {
        "architectures": [family.architectures[head]],
        "model_type": family.model_type,
        **_mapping(family.write_config(shape, find_layer_options(shape)), shape.family, "write_config"),
        "dtype": dtype,
        "torch_dtype": dtype,
        **{name: others[name] for name in (*_UNTOUCHED, *family.untouched) if name in others},
    }
    if head == "scalar":
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return config
