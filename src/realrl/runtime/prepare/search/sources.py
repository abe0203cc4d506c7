"""Source code and tables that a plan may depend on: this package's, extensions', and the user's own. No torch."""

import os
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.resources import as_file, files
from pathlib import Path
from types import FunctionType, ModuleType

from realrl.families import registry as families
from realrl.recipe import registry as algorithms

EXTENSIONS = (algorithms.GROUP, families.GROUP)
"""Groups of entry points by which other packages extend this one."""
_PACKAGES = {"site-packages", "dist-packages"}
"""Names of directories into which packages are installed."""


def read_sources() -> Iterator[str]:
    """Read all of it, in the same order in every process: whatever a plan may depend on is among it."""
    with as_file(files("realrl")) as package:
        for file in sorted([*package.rglob("*.py"), *package.rglob("*.json")]):
            yield file.read_text(encoding="utf-8")
        for file in _user_files(package.resolve()):
            yield f"{file}\n{file.read_text(encoding='utf-8')}"
    for group in EXTENSIONS:
        for point in sorted(entry_points(group=group)):
            version = point.dist.version if point.dist is not None else None
            yield f"{group} {point.name} {point.value} {version}"


def _user_files(package: Path) -> list[Path]:
    """Files of loaded modules that are not ours but may decide about plans: algorithms and families, and what these
    import. Of installed ones only those that use something of ours."""
    found = set()
    for module in list(sys.modules.values()):
        source = getattr(module, "__file__", None)
        if source is None or not source.endswith(".py"):
            continue
        if _is_installed(source) and not _extends(module):
            continue
        file = Path(source).resolve()
        if file.is_file() and not file.is_relative_to(package):
            found.add(file)
    return sorted(found)


def _is_installed(source: str) -> bool:
    """Check whether a source file belongs to Python or to an installed package, of any environment on the path."""
    prefixes = tuple(str(Path(prefix)) + os.sep for prefix in (sys.prefix, sys.base_prefix))
    return source.startswith(prefixes) or not _PACKAGES.isdisjoint(Path(source).parts)


def _extends(module: ModuleType) -> bool:
    """Check whether a module names a class or a function of this package."""
    # Not `isinstance`, which asks objects that only warn or load something when they are asked.
    definitions = [
        value for value in list(vars(module).values()) if issubclass(type(value), (type, FunctionType))
    ]
    return any(str(value.__module__).partition(".")[0] == "realrl" for value in definitions)
