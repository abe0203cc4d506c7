"""Paths that users write: local paths, and names on the Hugging Face hub."""

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from realrl.config.errors import UserError
from realrl.config.explain import shorten

_HUB_NAME = r"[\w-][\w.-]*(/[\w-][\w.-]*)?"
_LONGEST = 255
"""Maximum bytes of a file name in common file systems."""


def local_path(path: str) -> Path:
    """Resolve `~` in a path. Raises UserError for a path that no file system can hold.

    Every path from a recipe or a command line passes through here once.
    """
    found = Path(os.path.expanduser(path))
    if any(len(os.fsencode(part)) > _LONGEST for part in found.parts):
        raise UserError(f"{shorten(path)} is too long for a path: a name has at most {_LONGEST} bytes")
    return found


def is_local(path: str) -> bool:
    """Check whether a path can only be a local directory, so that the hub need not be asked.

    Without a network, a request to the hub takes most of a minute to fail.
    """
    local = local_path(path)
    below_a_directory = len(local.parts) == 2 and local.parent.is_dir()
    return local.exists() or below_a_directory or not re.fullmatch(_HUB_NAME, path)


def make_absolute(path: str) -> str:
    """Make the path of an existing file or directory absolute. Other text, such as a hub name, stays unchanged."""
    local = local_path(path)
    return os.path.abspath(local) if os.path.exists(local) else path


def is_yaml(path: str) -> bool:
    """Check by its ending whether a setting names a YAML file instead of, for example, a preset."""
    return Path(path).suffix in (".yaml", ".yml")


# Absolute paths let the config.yaml of a run work from any directory. A setting that may name a file has one of
# these types, `recipe.sources.SourceList`, `user_code.FunctionReference`, or a validator of its own.
PathOrName = Annotated[str, AfterValidator(make_absolute)]
"""Setting that names a file, a directory, or something else. An existing path becomes absolute."""
YamlOrName = Annotated[str, AfterValidator(lambda value: make_absolute(value) if is_yaml(value) else value)]
"""Setting that names a YAML file or, for example, a preset. The path of an existing file becomes absolute."""
