"""YAML as people write it: duplicate keys are mistakes and 1e-5 is a number."""

import re
from pathlib import Path
from typing import Any

import yaml

from realrl.config.errors import UserError


class _Loader(yaml.SafeLoader):
    """Safe loader that refuses a key given twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


# YAML 1.1, which PyYAML follows, wants 1.0e-5; everybody else, and everybody's recipes, write 1e-5.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def read_yaml(path: str) -> Any:
    """Content of a YAML file; UserError naming the file, and the line of a syntax error."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    return parse_yaml(text, path, multiline=True)


def parse_yaml(text: str, where: str, *, multiline: bool = False) -> Any:
    """Value of YAML text; UserError starting with `where`, and the line if `multiline`."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        line = f", line {mark.line + 1}" if mark is not None and multiline else ""
        raise UserError(f"{where}{line}: not valid YAML ({problem})") from None
