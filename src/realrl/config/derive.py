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
    return create_model(name, __base__=base, __doc__=doc, __module__=base.__module__, **fields)
