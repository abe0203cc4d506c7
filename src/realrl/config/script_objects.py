"""Use functions of a script or notebook in a recipe, here and in the processes that a run starts.

A recipe names a function as `module:NAME`. The module `realrl_objects` exists only in memory, and contains the
functions that a script has passed to `realrl`. The launcher sends these functions to the ranks with cloudpickle.
This module does not import torch.
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
from realrl.config.user_code import SCRIPT_MODULE

OBJECTS_VARIABLE = "REALRL_OBJECTS"
"""Environment variable with the path of the file that has the functions of a script."""
CALLBACKS = "callbacks"
"""Name of the variable in `realrl_objects` that holds the callbacks of a run, on its ranks."""


def add_function(setting: str, function: Callable[..., Any]) -> str:
    """Add a function to the module `realrl_objects`. Returns its reference for a recipe, `realrl_objects:NAME`.

    The name depends on the function's own name and source, so that the same script gives the same recipe again.
    """
    named = getattr(function, "__name__", None) or type(function).__name__
    readable = re.sub(r"\W", "_", named).strip("_") or "function"
    name = f"{readable}_{hashlib.sha256(_read_source(function).encode()).hexdigest()[:8]}"
    setattr(_module(), name, function)
    return f"{SCRIPT_MODULE}:{name}"


def find_objects(settings: Any) -> dict[str, Any]:
    """Find the functions of `realrl_objects` that a recipe's settings name. Returns the functions by name."""
    if isinstance(settings, dict):
        settings = list(settings.values())
    if isinstance(settings, list | tuple):
        return {name: value for part in settings for name, value in find_objects(part).items()}
    if isinstance(settings, str) and settings.startswith(f"{SCRIPT_MODULE}:"):
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
    """Load the functions that the launcher has sent to this rank, if any."""
    file = os.environ.get(OBJECTS_VARIABLE)
    if file is None:
        return
    import pickle

    # Unpickling is safe: the launcher of this rank has just written this file into its own private directory.
    path, objects = pickle.loads(Path(file).read_bytes())
    # Functions may import modules from the script's directory.
    sys.path += [entry for entry in path if entry not in sys.path]
    for name, value in objects.items():
        setattr(_module(), name, pickle.loads(value))


def find_callbacks() -> list[Any]:
    """Return the callbacks that the launcher has sent to this rank."""
    return list(vars(_module()).get(CALLBACKS, ())) if SCRIPT_MODULE in sys.modules else []


def _module() -> ModuleType:
    """Return the module `realrl_objects`. The first call creates it."""
    if SCRIPT_MODULE not in sys.modules:
        module = ModuleType(SCRIPT_MODULE)
        module.__spec__ = ModuleSpec(SCRIPT_MODULE, None)
        module.__file__ = None
        sys.modules[SCRIPT_MODULE] = module
    return sys.modules[SCRIPT_MODULE]


def _read_source(function: Callable[..., Any]) -> str:
    """Return the source of a function, with its bound arguments and closed-over values.

    If there is no source, return its byte code instead.
    """
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
