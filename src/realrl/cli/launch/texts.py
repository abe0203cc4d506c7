"""Texts by which jobs of several nodes are started, from templates."""

import json
import shlex
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def fill_template(name: str, **values: Any) -> str:
    """Fill a template of this package."""
    return _environment().get_template(name).render(**values)


@cache
def _environment() -> Environment:
    # Neither shells nor YAML are what escaping for HTML is about; every value goes through a filter of its own.
    environment = Environment(
        loader=PackageLoader("realrl.cli.launch"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters |= {
        "sh": shlex.quote,
        "json": json.dumps,
        "kubernetes": _keep_dollars,
        "line": _join_lines,
    }
    return environment


def _keep_dollars(text: str) -> str:
    """Write a text so that Kubernetes finds no variable in it."""
    return text.replace("$(", "$$(")


def _join_lines(text: str) -> str:
    """Write a text on one line, for a comment."""
    return " ".join(text.split())
