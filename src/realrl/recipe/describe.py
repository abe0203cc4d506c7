"""Describe every field of a recipe as commented YAML, with type, default and meaning."""

import json
import textwrap
from collections.abc import Container, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from realrl.config.base import PRESENCE, Settings
from realrl.config.errors import UserError
from realrl.config.explain import list_paths, nearest, section_class, translate_name
from realrl.recipe.other_names import OTHER_NAMES

_NAMES = {int: "whole number", float: "number", str: "text", bool: "true or false", NoneType: "null"}
_COLLECTIONS = {list: "list", dict: "mapping"}
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_WIDTH = 108


COMMON = (
    *("algorithm", "run_dir", "cluster", "plan", "data.train", "data.eval", "data.columns", "data.batch"),
    *("data.max_tokens", "data.max_prompt_tokens", "data.apply_chat_template", "training.epochs"),
    *("training.steps", "evaluation.every", "checkpoint.every", "models.*.path", "models.*.lora"),
    *("models.*.optimizer.lr", "models.*.optimizer.warmup_steps", "reward", "generation.max_new_tokens"),
    *("generation.temperature", "*.samples", "*.minibatches", "*.kl.coef", "*.clip", "*.loss", "*.beta"),
    *("distillation.divergence", "distillation.top_k", "expert_iteration.keep", "expert_iteration.threshold"),
)
"""Patterns of the dotted paths of settings that `realrl config` prints without `--all`."""


def describe_settings(
    cls: type[Settings], *, section: str | None = None, common: bool = False, **given: str
) -> str:
    """Write commented YAML of a settings class: each field with its meaning, its type, and its value.

    A value comes from `given`, or is the default. Sections that are null by default are commented out. If a section
    appears again, a comment refers to its first place. `section`: dotted path of the only section to show, inside
    its parents. Raises UserError if it does not exist. `common`: show only common settings.
    """
    wanted = set(list_paths(cls))
    if section is not None:
        _check_section(section, cls)
        wanted = {path for path in wanted if f"{path}.".startswith(f"{section}.")}
    if common:
        wanted = {path for path in wanted if any(fnmatchcase(path, pattern) for pattern in COMMON)}
    for path in list(wanted):
        parts = path.split(".")
        wanted |= {".".join(parts[:depth]) for depth in range(1, len(parts))}
    title = [] if section is not None else [f"# {_doc(cls)}", ""]
    return "\n".join([*title, *_Lines(given, wanted).describe(cls)]) + "\n"


def _check_section(section: str, cls: type[Settings]) -> None:
    paths = list(list_paths(cls))
    if section in paths:
        return
    *place, last = section.split(".")
    meant = translate_name([*place, last], place, cls, OTHER_NAMES)
    near = next((path for path in paths if path.split(".")[-1] == last), None) or nearest(section, paths)
    hint = (
        meant[1] if meant else f"did you mean {near}?" if near else f"there are {', '.join(cls.model_fields)}"
    )
    raise UserError(f"{section}: there is no such setting; {hint}")


class _Lines:
    """Writes the description, and remembers the sections that it has shown."""

    def __init__(self, given: Mapping[str, str], wanted: Container[str]) -> None:
        """`given`: values by dotted path. `wanted`: dotted paths to show."""
        self._given, self._wanted = given, wanted
        self._shown: dict[type[Settings], tuple[str, dict[str, Any]]] = {}
        """Class -> dotted path under which it was shown, and the defaults there that differed from the class's
        defaults."""

    def describe(
        self, cls: type[Settings], section: Settings | None = None, prefix: str = ""
    ) -> Iterator[str]:
        """Yield the lines of a section. `section`: its default value, or None for the defaults of its class.

        `prefix`: dotted path of the section, with a final dot.
        """
        pad = "  " * prefix.count(".")
        for name, field in cls.written_fields().items():
            path = prefix + name
            if path not in self._wanted:
                continue
            inner = section_class(field)
            about = field.description or (_doc(inner) if inner else "")
            if inner is None:
                about = f"{about} ({_field_type(field)})".strip()
            for line in textwrap.wrap(" ".join(about.split()), _WIDTH - len(pad)):
                yield f"{pad}# {line}"
            default = field.default if section is None else getattr(section, name)
            if inner is None:
                value = self._given.get(path) or _format(field, default)
                yield f"{pad}{name}: {value}".rstrip()
            else:
                # The mere presence of such a section changes the recipe, so it is commented out.
                hidden = field.json_schema_extra == PRESENCE
                yield from self._describe_section(inner, default, path, pad, hidden=hidden)

    def _describe_section(
        self, cls: type[Settings], default: Any, path: str, pad: str, *, hidden: bool
    ) -> Iterator[str]:
        name = path.rpartition(".")[2]
        section = default if isinstance(default, Settings) else None
        said = {} if section is None else section.model_dump(exclude_unset=True)
        mark = "# " if hidden else ""
        if cls in self._shown and (not said or self._shown[cls][1] == said):
            empty = "null" if default is None else "{}"
            yield f"{pad}{mark}{name}: {empty}  # keys as in {self._shown[cls][0]}"
            return
        self._shown[cls] = path, said
        inside = self.describe(cls, section, f"{path}.")
        if default is None or hidden:
            inside = (f"{pad}# {line[len(pad) :]}" for line in inside)
        lines = list(inside)
        if default is None:
            yield f"{pad}{name}: null"
        if lines:
            yield f"{pad}{'# ' if default is None else mark}{name}:"
        elif default is not None:
            yield f"{pad}{mark}{name}: {{}}"
        yield from lines


def _doc(cls: type[Settings]) -> str:
    return " ".join((cls.__doc__ or "").split())


def _format(field: FieldInfo, default: Any) -> str:
    """Format a default as YAML. If there is none but only one value is allowed, format that value."""
    if default is PydanticUndefined:
        options = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        return str(options[0]) if len(options) == 1 else ""
    return json.dumps(default) if not isinstance(default, str) else default


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
