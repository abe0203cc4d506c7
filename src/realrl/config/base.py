"""Base class of recipe settings."""

from collections.abc import Mapping
from copy import copy
from typing import Any

from pydantic import BaseModel, ConfigDict, create_model, model_validator
from pydantic.fields import FieldInfo

DERIVED: dict[str, Any] = {"derived": True}
"""`json_schema_extra` of a field that other settings determine; users cannot write it."""

PRESENCE: dict[str, Any] = {"presence": True}
"""`json_schema_extra` of a section that has a meaning even if it is empty. `realrl config` comments it out."""


class Settings(BaseModel):
    """Strict, immutable settings: unknown keys and values of another type are errors.

    `true` is not 1, and `"3"` is not 3. Numbers are finite, and text is not empty.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        str_min_length=1,
        validate_default=True,
        use_attribute_docstrings=True,
        defer_build=True,  # a command validates few of the classes that it imports
    )

    @classmethod
    def written_fields(cls) -> dict[str, FieldInfo]:
        return {name: of for name, of in cls.model_fields.items() if of.json_schema_extra != DERIVED}

    @model_validator(mode="before")
    @classmethod
    def _keep_defaults(cls, given: Any) -> Any:
        """Fill in the settings that a given section lacks from the default of the section's field.

        Otherwise pydantic would take these settings from the defaults of the section's class, although two
        algorithms may share the class and differ in their defaults.
        """
        if not isinstance(given, Mapping):
            return given
        defaults = {name: field.default for name, field in cls.model_fields.items() if name in given}
        return {**given, **_merge_sections(defaults, given)}


def _merge_sections(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the mappings in `given` over the settings in `defaults` of the same name, at every depth."""
    merged = {}
    for name, default in defaults.items():
        value = given.get(name)
        if isinstance(default, Settings) and isinstance(value, Mapping):
            # Take only fields that the default sets explicitly, because some settings check which fields are set.
            said = {field: getattr(default, field) for field in default.model_fields_set}
            merged[name] = {**said, **value, **_merge_sections(said, value)}
    return merged


def derive_settings(base: type[Settings], name: str, doc: str, defaults: Mapping[str, Any]) -> Any:
    """Derive settings from `base` with other defaults and the same field documentation."""
    fields: dict[str, Any] = {}
    for field, default in defaults.items():
        info = copy(base.model_fields[field])
        info.default = default
        if isinstance(default, Settings):
            info.annotation = type(default)
        fields[field] = (info.annotation, info)
    # Fields inherit their documentation. Otherwise pydantic would search the sources of all loaded modules for
    # it, which takes half a second.
    derived = create_model(
        name,
        __base__=base,
        __doc__=doc,
        __module__=base.__module__,
        __cls_kwargs__={"use_attribute_docstrings": False},
        **fields,
    )
    derived.model_config["use_attribute_docstrings"] = True
    return derived
