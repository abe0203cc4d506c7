"""Templates of pages; what they insert is escaped."""

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template


@cache
def _environment() -> Environment:
    loader = PackageLoader("realrl.cli.page", "templates")
    return Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )


def find_template(name: str) -> Template:
    """Find a template by the name of its file."""
    return _environment().get_template(name)
