"""Imports that run at the first use of a name, so that importing the description of an algorithm loads no torch."""

import ast
import inspect
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any


def reexport(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the `__getattr__` and `__dir__` of a module from its imports under `if TYPE_CHECKING:`.

    Type checkers and editors read these imports as they stand. At run time each name is imported at its first use,
    so that `import realrl.algorithms` loads no torch.
    """

    @cache
    def list_sources() -> dict[str, str]:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
        return {
            alias.name: node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module is not None
            for alias in node.names
            if alias.asname == alias.name
        }

    def find(name: str) -> Any:
        source = None if name.startswith("__") else list_sources().get(name)
        if source is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(source), name)

    return find, lambda: sorted({*vars(sys.modules[module]), *list_sources()})


def import_later(reference: str) -> Callable[..., Any]:
    """Make a function that imports `module:FUNCTION` when it is called, and calls it."""

    def call(*arguments: Any) -> Any:
        module, _, name = reference.partition(":")
        return getattr(import_module(module), name)(*arguments)

    return call
