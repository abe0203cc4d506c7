"""Functions of a script or notebook as settings of a recipe, here and in the processes that a run starts. No torch.

A recipe names a function as `module:NAME`. The module `realrl_objects` exists only in memory: it has the functions
that a script has passed to `realrl`. The launcher hands them to the ranks with cloudpickle.
"""

import hashlib
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from realrl.config.errors import UserError
from realrl.runtime.processes.environment import OBJECTS_VARIABLE

MODULE = "realrl_objects"
CALLBACKS = "callbacks"
"""Name of the callbacks of a run in the module, on its ranks."""


def add_function(setting: str, function: Callable[..., Any]) -> str:
    """Add a function to the module, and return the reference of it for a recipe, `realrl_objects:NAME`.

    The name depends on the function's own name and source, so that the same script gives the same recipe again.
    """
    named = getattr(function, "__name__", None) or type(function).__name__
    readable = re.sub(r"\W", "_", named).strip("_") or "function"
    name = f"{readable}_{hashlib.sha256(_read_source(function).encode()).hexdigest()[:8]}"
    setattr(_module(), name, function)
    return f"{MODULE}:{name}"


def find_objects(settings: Any) -> dict[str, Any]:
    """Find the functions of this module that a recipe's settings name, by their names."""
    if isinstance(settings, dict):
        settings = list(settings.values())
    if isinstance(settings, list | tuple):
        return {name: value for part in settings for name, value in find_objects(part).items()}
    if isinstance(settings, str) and settings.startswith(f"{MODULE}:"):
        name = settings.partition(":")[2]
        return {name: vars(_module())[name]}
    return {}


def pack_objects(objects: dict[str, Any]) -> bytes:
    """Pickle functions for ranks. Raises UserError if one of them cannot be pickled."""
    import cloudpickle

    found = {}
    for name, value in objects.items():
        try:
            found[name] = cloudpickle.dumps(value)
        except Exception as error:  # reducing an object runs its own code
            raise UserError(
                f"{name.rpartition('_')[0] or name} cannot be sent to the processes of the run:"
                f" {type(error).__name__}: {error}; define it in a file and name it FILE.py:FUNCTION"
            ) from None
    return bytes(cloudpickle.dumps((sys.path, found)))


def load_objects() -> None:
    """Load the functions that the launcher of this rank was given, if any."""
    file = os.environ.get(OBJECTS_VARIABLE)
    if file is None:
        return
    import pickle

    # The launcher of this rank has just written this file into its own private directory.
    path, objects = pickle.loads(Path(file).read_bytes())
    # Functions may be defined in modules beside the script.
    sys.path += [entry for entry in path if entry not in sys.path]
    for name, value in objects.items():
        setattr(_module(), name, pickle.loads(value))


def find_callbacks() -> list[Any]:
    """Find the callbacks that the launcher of this rank was given."""
    return list(vars(_module()).get(CALLBACKS, ())) if MODULE in sys.modules else []


def _module() -> ModuleType:
    """Return the module of functions; the first call makes it."""
    if MODULE not in sys.modules:
        module = ModuleType(MODULE)
        module.__spec__ = ModuleSpec(MODULE, None)
        module.__file__ = None
        sys.modules[MODULE] = module
    return sys.modules[MODULE]


def _read_source(function: Callable[..., Any]) -> str:
    """Read the source of a function, with bound arguments and closed-over values; without source, its byte code."""
    bound, target = "", function
    while isinstance(target, partial):
        bound += f"{target.args}{target.keywords}"
        target = target.func
    cells = getattr(target, "__closure__", None) or ()
    bound += "".join(repr(cell.cell_contents) for cell in cells)
    for candidate in (target, type(target)):
        try:
            return bound + textwrap.dedent(inspect.getsource(candidate))
        except (OSError, TypeError):
            continue
    code = getattr(target, "__code__", None)
    return f"{bound}{type(target).__qualname__} {code.co_code.hex() if code else ''}"
