"""Every field of a recipe with its type, default and meaning, as commented YAML."""

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from realrl.config.base import Settings
from realrl.config.explain import section_class

_NAMES = {int: "whole number", float: "number", str: "text", bool: "true or false", NoneType: "null"}
_COLLECTIONS = {list: "list", dict: "mapping"}
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_WIDTH = 108


def describe_settings(cls: type[Settings], **given: str) -> str:
    """Commented YAML of a settings class: each field with its default, or its value in `given`, and above it its
    meaning and type.

    Sections that are null by default are shown commented out below; one that repeats an earlier section only
    names it.
    """
    return "\n".join([f"# {_doc(cls)}", "", *_lines(cls, "", {}, given)]) + "\n"


def _lines(
    cls: type[Settings], prefix: str, shown: dict[type[Settings], str], given: Mapping[str, str]
) -> Iterator[str]:
    """Lines of a section; prefix: its dotted path and a dot; shown: where a class was written out before; given:
    values by dotted path."""
    pad = "  " * prefix.count(".")
    for name, field in cls.written_fields().items():
        inner = section_class(field)
        about = field.description or (_doc(inner) if inner else "")
        if inner is None:
            about = f"{about} ({_field_type(field)})".strip()
        for line in textwrap.wrap(" ".join(about.split()), _WIDTH - len(pad)):
            yield f"{pad}# {line}"
        if inner is None:
            yield f"{pad}{name}: {given.get(prefix + name, _default(field))}".rstrip()
            continue
        empty = field.default is None
        if inner in shown:
            yield f"{pad}{name}: {'null' if empty else '{}'}  # keys as in {shown[inner]}"
            continue
        shown[inner] = prefix + name
        yield f"{pad}{name}:" + " null" * empty
        inside = _lines(inner, f"{prefix}{name}.", shown, given)
        if empty:
            yield f"{pad}# {name}:"
            inside = (f"{pad}# {line[len(pad) :]}" for line in inside)
        yield from inside


def _doc(cls: type[Settings]) -> str:
    return " ".join((cls.__doc__ or "").split())


def _default(field: FieldInfo) -> str:
    """The default in YAML; a literal with one value is no choice, so it is given."""
    if field.is_required():
        options = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        return str(options[0]) if len(options) == 1 else ""
    return json.dumps(field.default) if not isinstance(field.default, str) else field.default


def _field_type(field: FieldInfo) -> str:
    text = _type(field.annotation) + _bounds(field.metadata)
    return f"{text}; required" if field.is_required() else text


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        constraints = (c for a in arguments[1:] for c in getattr(a, "metadata", [a]))
        return _type(arguments[0]) + _bounds(constraints)
    if origin is Literal:
        return "one of " * (len(arguments) > 1) + ", ".join(str(value) for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_type(argument) for argument in arguments)
    if origin is tuple and arguments[1:] == (...,):
        return f"list of {_type(arguments[0])}"
    if origin is tuple:
        return f"list of {len(arguments)}: " + ", ".join(_type(argument) for argument in arguments)
    if origin is dict and isinstance(arguments[1], type) and issubclass(arguments[1], Settings):
        return f"names, each with {', '.join(arguments[1].model_fields)}"
    if origin in _COLLECTIONS:
        return _COLLECTIONS[origin]
    return _NAMES[annotation]


def _bounds(metadata: Iterable[Any]) -> str:
    found = (
        f"{sign} {getattr(constraint, name):g}"
        for constraint in metadata
        for name, sign in _SIGNS.items()
        if getattr(constraint, name, None) is not None
    )
    text = " and ".join(found)
    return f" {text}" if text else ""
