"""Source code that a plan may depend on: this package's, installed extensions', and the user's own. No torch."""

import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.resources import as_file, files
from pathlib import Path

from realrl.recipe.registry import GROUP

EXTENSIONS = (GROUP, "realrl.families")
"""Groups of entry points by which other packages extend this one."""


def read_sources() -> Iterator[str]:
    """All of it, the same in every process: whatever a plan may depend on is among it."""
    with as_file(files("realrl")) as package:
        for file in sorted(package.rglob("*.py")):
            yield file.read_text(encoding="utf-8")
        for file in _user_files(package.resolve()):
            yield f"{file}\n{file.read_text(encoding='utf-8')}"
    for group in EXTENSIONS:
        for point in sorted(entry_points(group=group)):
            version = point.dist.version if point.dist is not None else None
            yield f"{group} {point.name} {point.value} {version}"


def _user_files(package: Path) -> list[Path]:
    """Files of modules that are loaded and neither ours nor installed: a user's own algorithms and families, and
    what these import."""
    installed = [Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)]
    found = set()
    for module in list(sys.modules.values()):
        source = getattr(module, "__file__", None)
        if source is None or not source.endswith(".py"):
            continue
        file = Path(source).resolve()
        if file.is_file() and not any(file.is_relative_to(folder) for folder in (package, *installed)):
            found.add(file)
    return sorted(found)
