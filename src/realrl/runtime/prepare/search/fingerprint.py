"""Fingerprint of a value and all its parts. No torch."""

import inspect
from collections.abc import Iterable, Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum

from pydantic import BaseModel


def make_fingerprint(value: object) -> str:
    """Describe a value by all it is made of, the same in every process; whatever differs shows.

    What a value is made of: the fields of a dataclass or a pydantic model, the elements of a collection, and for
    any other class the parameters of its constructor, which must be attributes. TypeError for what has none.
    """
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return repr(value)
    if isinstance(value, Enum):
        return f"{_name(value)}.{value.name}"
    if is_dataclass(value):
        return _record(value, (field.name for field in fields(value)))
    if isinstance(value, BaseModel):
        return _record(value, type(value).model_fields)
    if isinstance(value, Mapping):
        items = sorted((make_fingerprint(key), make_fingerprint(item)) for key, item in value.items())
        return f"{{{', '.join(f'{key}: {item}' for key, item in items)}}}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(make_fingerprint, value)))}}}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(make_fingerprint, value))}]"
    if inspect.isfunction(value) or inspect.isclass(value):
        return f"{value.__module__}.{value.__qualname__}"
    return _record(value, inspect.signature(type(value)).parameters)


def _record(value: object, names: Iterable[str]) -> str:
    parts = []
    for name in names:
        if not hasattr(value, name):
            raise TypeError(f"{_name(value)} keeps no {name}, which it is made with, as an attribute")
        parts.append(f"{name}={make_fingerprint(getattr(value, name))}")
    return f"{_name(value)}({', '.join(parts)})"


def _name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
