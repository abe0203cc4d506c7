"""Error messages for validation errors, one line each."""

import difflib
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from realrl.config.base import Settings
from realrl.config.errors import UserError

_KEY = "[key]"
"""Last part of pydantic's location if the key itself is wrong."""

CONSEQUENCE = "consequence"
"""Error type of a field that cannot be read because of another field's error. Such errors are not shown."""

_LONG = 80
"""Maximum characters of a value that an error message repeats."""

_DEEPEST = 10
"""Maximum depth of an unknown section that suggestions look into."""

_KNOWN = "; known keys are "
"""Text before the list of a section's keys. An error message contains each such list only once."""

MOST_MISTAKES = 5
"""Maximum number of mistakes in an error message."""


@dataclass(frozen=True)
class OtherName:
    """A setting's name in other tools."""

    targets: tuple[str, ...]
    """Dotted paths of our settings. The first path that exists in a recipe counts."""
    about: str = ""
    """Sentence on the difference from our setting. Without targets, it says why there is no such setting."""
    accepted: bool = False
    """Whether recipes may use the name, because it has the meaning of our setting."""
    values: Mapping[Any, Any] = field(default_factory=dict)
    """Values with other names: value of the other tool -> our value."""


_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "timestamp": "text",
    "model": "a section of keys",
    "dict": "a section of keys",
    "tuple": "a list",
    "list": "a list",
    "finite": "a finite number",
}

_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Find the entry of `names` that is most similar to `name`; None if no entry is similar."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)), None)


def brief(value: Any) -> str:
    """Format a value as YAML on one line, shortened if it is long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return _BRIEF.repr(value)


def shorten(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."


class _Brief(reprlib.Repr):
    """Short representation of any value, however large, deep or recursive."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxtuple = 2, 3, 3, 3
        self.maxstring = _LONG
        self.maxlong = 40
        self.maxother = 60

    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, date):
            return str(x)
        return brief(x) if x is None or isinstance(x, bool) else super().repr1(x, level)


_BRIEF = _Brief()


def section_class(field: FieldInfo) -> type[Settings] | None:
    """Find the settings class that a field holds, optional or not; None for a plain value."""
    for candidate in (field.annotation, *get_args(field.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Settings):
            return candidate
    return None


def find_settings(name: str, base: type[Settings] = Settings) -> type[Settings] | None:
    """Find the class named `name` among the direct and indirect subclasses of `base`; None if there is none."""
    for cls in base.__subclasses__():
        found = cls if cls.__name__ == name else find_settings(name, cls)
        if found is not None:
            return found
    return None


def explain(
    error: ValidationError,
    cls: type[Settings],
    *,
    most: int = MOST_MISTAKES,
    other_names: Mapping[str, OtherName] | None = None,
) -> str:
    """Describe up to `most` mistakes, one per line. The first line is the mistake to fix first.

    cls: the validated class. other_names: names of settings in other tools. Suggestions come from the fields of
    `cls` and from `other_names`.
    """
    # A misspelt key often also appears as a missing key; only the spelling must be fixed.
    mistakes = [e for e in error.errors() if e["type"] != CONSEQUENCE]
    mistakes.sort(key=lambda e: e["type"] not in ("extra_forbidden", "invalid_key"))
    names = other_names or {}
    renamed = [_suggest(e, cls, names)[0] for e in mistakes if e["type"] == "extra_forbidden"]
    mistakes = [e for e in mistakes if e["type"] != "missing" or _join_path(e["loc"]) not in renamed]
    messages, listed = [], set()
    for mistake in mistakes:
        message, known, keys = _message(mistake, cls, names).partition(_KNOWN)
        messages.append(message if keys in listed else f"{message}{known}{keys}")
        listed.add(keys)
    return join_mistakes(messages, most=most)


def join_mistakes(messages: Sequence[str], *, most: int = MOST_MISTAKES) -> str:
    """Join messages: one line for each of the first `most` messages, then the number of remaining messages."""
    others = len(messages) - most
    text = "\n  ".join(messages[:most])
    if others <= 0:
        return text
    between = " " if most == 1 else "\n  "
    return f"{text}{between}(and {others} more mistake{'s' if others > 1 else ''})"


def _message(error: ErrorDetails, cls: type[Settings], other_names: Mapping[str, OtherName]) -> str:
    location = error["loc"]
    if location and location[-1] == _KEY:
        key = brief(location[-2])
        return f"{_join_path(location[:-2])}: {key} is not text, so it cannot be a key"
    path = _join_path(location)
    problem = _describe_problem(error, cls, other_names)
    if path and problem.startswith(f"{location[-1]}="):  # the message already names the field and the value
        return path.removesuffix(str(location[-1])) + problem
    return f"{path}: {problem}" if path else problem


def _join_path(location: Iterable[int | str]) -> str:
    return ".".join(map(_show_part, location))


def _show_part(part: int | str) -> str:
    """Format a part of a location. Only an unreadable key is changed."""
    text = str(part)
    return text if text.strip() and text.isprintable() and len(text) <= _LONG else brief(part)


def _describe_problem(error: ErrorDetails, cls: type[Settings], other_names: Mapping[str, OtherName]) -> str:
    kind, value, location = error["type"], error["input"], error["loc"]
    context = error.get("ctx", {})
    if kind == "extra_forbidden":
        return "; ".join(filter(None, ("unknown key", _suggest(error, cls, other_names)[1])))
    if kind == "missing":
        if isinstance(location[-1], int):
            return "missing; the list has too few entries"
        field = _field(location, cls)
        description = " ".join((field.description or "").split()) if field else ""
        about = f" ({description.split('. ')[0].rstrip('.')})" if description else ""
        return f"missing{about}"
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        hint = nearest(str(value), re.findall(r"'([^']*)'", context["expected"]))
        return f"{brief(value)} is not {context['expected']}" + (f"; did you mean {hint}?" if hint else "")
    if kind in _BOUNDS:
        words, limit = _BOUNDS[kind]
        return f"{brief(value)} must be {words} {_number(context[limit])}"
    if kind == "string_too_short":
        return "must not be empty"
    if kind in ("too_short", "too_long"):
        least = kind == "too_short"
        limit = (
            f"at least {context['min_length']} are needed"
            if least
            else f"at most {context['max_length']} can be used"
        )
        return f"{brief(value)} has {context['actual_length']} entries; {limit}"
    if kind == "invalid_key":
        return f"{brief(location[-1])} is not text, so it cannot be a key"
    if kind == "recursion_loop":
        return "this contains itself"
    wanted = _WANTED.get(kind.split("_")[0])
    if kind == "string_type" and isinstance(value, int | float):
        wanted = "text; in quotes it would be"
    return f"{brief(value)} is not {wanted}" if wanted else error["msg"]


def _number(limit: float) -> str:
    """Format a bound as people write it: 1000000000, 0.01."""
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


def _section(location: tuple[int | str, ...], cls: type[Settings]) -> type[Settings] | None:
    """Find the class that the section at `location` is read into."""
    for part in location:
        if isinstance(part, int):  # an index into a list; `section_class` of a list is the class of its items
            continue
        field = cls.model_fields.get(str(part))
        inner = section_class(field) if field else None
        if inner is None:
            return None
        cls = inner
    return cls


def _field(location: tuple[int | str, ...], cls: type[Settings]) -> FieldInfo | None:
    section = _section(location[:-1], cls)
    return section.model_fields.get(str(location[-1])) if section and location else None


def _suggest(
    error: ErrorDetails, cls: type[Settings], other_names: Mapping[str, OtherName]
) -> tuple[str | None, str]:
    """Find the dotted path of the key that the user may have meant, if any, and the text of a suggestion.

    The order of precedence is: another tool's name, a similar key in the same section, a key with this name
    elsewhere. An unknown section may belong to another tool, and is looked up together with its first key, as in
    `actor_rollout_ref.rollout.n`. Inside a table with free keys, the text is empty.
    """
    location, value = error["loc"], error["input"]
    section = _section(location[:-1], cls)
    if section is None:
        return None, ""
    *place, key = map(str, location)
    inside = [key]
    while isinstance(value, Mapping) and value and len(inside) < _DEEPEST:
        inside.append(str(first := next(iter(value))))
        value = value[first]
    path = [*place, *inside]
    found = translate_name(path, place, cls, other_names)
    if found is not None:
        return found if len(inside) == 1 else (found[0], f"for {_join_path(path)}, {found[1]}")
    near = nearest(key, section.written_fields())
    elsewhere = next((known for known in list_paths(cls) if known.split(".")[-1] == key), None)
    meant = elsewhere if near is None else _join_path([*location[:-1], near])
    if meant is not None:
        return meant, f"did you mean {meant}?"
    return None, f"known keys are {', '.join(section.written_fields())}"


def translate_name(
    path: Sequence[str], place: Sequence[str], cls: type[Settings], other_names: Mapping[str, OtherName]
) -> tuple[str | None, str] | None:
    """Find the setting that other tools name by the last parts of `path`, with a suggestion; None if unknown."""
    for other, target in _find_targets(path, place, cls, other_names):
        if target is None:
            return None, other.about
        return target, " ".join(filter(None, (f"did you mean {target}?", other.about)))
    return None


def accept_name(
    path: Sequence[str], place: Sequence[str], cls: type[Settings], other_names: Mapping[str, OtherName]
) -> tuple[OtherName, str] | None:
    """Find the setting that recipes may give by another tool's name, the last part of `path`; None if unknown."""
    for other, target in _find_targets(path[-1:], place, cls, other_names):
        return (other, target) if target is not None and other.accepted else None
    return None


def _find_targets(
    path: Sequence[str], place: Sequence[str], cls: type[Settings], other_names: Mapping[str, OtherName]
) -> Iterator[tuple[OtherName, str | None]]:
    """Find the settings that the last parts of `path` may name, the best first; None for a name without a setting.

    place: path of the surrounding section. Its settings are preferred, so `models.critic.learning_rate` is the
    critic's.
    """
    for length in (3, 2, 1):
        other = other_names.get(".".join(path[-length:]))
        if other is None:
            continue
        if not other.targets:
            yield other, None
        for target in other.targets:
            parts = target.split(".")
            for depth in range(len(place), -1, -1):
                for start in range(len(parts) if depth else 1):
                    candidate = (*place[:depth], *parts[start:])
                    if _field(candidate, cls) is not None:
                        yield other, ".".join(candidate)


def list_paths(cls: type[Settings], prefix: str = "") -> Iterable[str]:
    for name, info in cls.written_fields().items():
        yield prefix + name
        inner = section_class(info)
        if inner is not None:
            yield from list_paths(inner, f"{prefix}{name}.")


@contextmanager
def mistakes_in(where: str, cls: type[Settings]) -> Iterator[None]:
    """Turn mistakes in the block, which validates `cls`, into one UserError that begins with `where`."""
    try:
        yield
    except ValidationError as error:
        raise UserError(f"{where}: {explain(error, cls)}") from None
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
