"""YAML as people write it: duplicate keys are mistakes, 1e-5 is a number, and a date is text."""

import re
from typing import Any

import yaml

from realrl.config.errors import UserError
from realrl.config.files import reason_of
from realrl.config.paths import local_path

_MOST = 10**20
"""Largest accepted integer. Larger integers are mistakes, and overflow outside Python."""

_DEEPEST = 100
"""Maximum nesting of lists and sections; recipes need about five."""


class _Loader(yaml.SafeLoader):
    """Safe loader that rejects repeated keys, huge numbers, and characters that no file can have."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (filled below)
    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self._depth > _DEEPEST:  # PyYAML takes time that grows with the square of the depth
            raise yaml.MarkedYAMLError(
                problem="lists or sections are nested too deep", problem_mark=self.peek_event().start_mark
            )
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        value = super().construct_yaml_int(node)
        if abs(value) > _MOST:
            raise yaml.MarkedYAMLError(problem="a number above 10^20", problem_mark=node.start_mark)
        return value

    def construct_scalar(self, node: Any) -> Any:
        value = super().construct_scalar(node)
        if isinstance(value, str) and re.search("[\\0\\ud800-\\udfff]", value):
            raise yaml.MarkedYAMLError(
                problem="text with a character that no file can have", problem_mark=node.start_mark
            )
        return value


class _Dumper(yaml.SafeDumper):
    """Safe dumper that quotes text if this loader or a YAML 1.1 loader would read it as another type."""


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)

# PyYAML follows YAML 1.1, which reads 2024-01-01 as a date, 0x2 as 2, 010 as 8 and 1:30 as 90, and accepts only
# 1.0e-5 for the usual 1e-5.
for _kind, _form, _first in (
    ("bool", r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF", "yYnNtTfFoO"),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_form})$"), list(_first))


def dump_yaml(value: Any) -> str:
    """Format a value as YAML that `parse_yaml` reads back equally; keys keep their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_yaml(path: str) -> Any:
    """Read a YAML file; `~` is the home directory. Raises UserError with the file and line of a syntax error."""
    try:
        text = local_path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {reason_of(error)}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} cannot be read: it is not UTF-8 text ({error.reason})") from None
    return parse_yaml(text, path, multiline=True)


def parse_yaml(text: str, where: str, *, multiline: bool = False) -> Any:
    """Parse YAML text. Raises UserError that begins with `where` and, if `multiline`, names the line."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        line = f", line {mark.line + 1}" if mark is not None and multiline else ""
        raise UserError(f"{where}{line}: not valid YAML ({problem})") from None
    except RecursionError:
        raise UserError(f"{where}: not a valid file (lists or sections are nested too deep)") from None
    except (ValueError, OverflowError) as error:  # a number with thousands of digits, an invalid date
        raise UserError(f"{where}: not valid YAML ({error})") from None
