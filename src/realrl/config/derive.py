"""Settings with other defaults: how the algorithms of a family differ."""

from collections.abc import Mapping
from copy import copy
from typing import Any

from pydantic import create_model

from realrl.config.base import Settings


def derive_settings(base: type[Settings], name: str, doc: str, defaults: Mapping[str, Any]) -> Any:
    """Derive settings from `base` that have other defaults, and the same documentation of fields."""
    fields: dict[str, Any] = {}
    for field, default in defaults.items():
        info = copy(base.model_fields[field])
        info.default = default
        if isinstance(default, Settings):
            info.annotation = type(default)
        fields[field] = (info.annotation, info)
    # Where the fields have their documentation from the base, pydantic would look for it in the sources of all
    # modules that are loaded, for half a second.
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
