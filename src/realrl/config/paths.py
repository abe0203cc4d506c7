"""Paths that users write: local ones, and names on the Hugging Face hub."""

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from realrl.config.errors import UserError
from realrl.config.explain import shorten

_HUB_NAME = r"[\w-][\w.-]*(/[\w-][\w.-]*)?"
_LONGEST = 255
"""Maximum bytes of a file name in every usual file system; longer ones raise errors of their own."""


def local_path(path: str) -> Path:
    """Resolve `~` in a path, where there is such a home; UserError where no file system could hold it.

    Every path from a recipe or a command line passes through here, once.
    """
    found = Path(os.path.expanduser(path))
    if any(len(os.fsencode(part)) > _LONGEST for part in found.parts):
        raise UserError(f"{shorten(path)} is too long for a path: a name has at most {_LONGEST} bytes")
    return found


def is_local(path: str) -> bool:
    """Check whether this can only be a local directory, so that the hub is not asked.

    Offline, asking takes most of a minute before it fails.
    """
    local = local_path(path)
    below_a_directory = len(local.parts) == 2 and local.parent.is_dir()
    return local.exists() or below_a_directory or not re.fullmatch(_HUB_NAME, path)


def make_absolute(path: str) -> str:
    """Make the path of a file or directory that exists absolute; any other text, such as a hub name, stays."""
    local = local_path(path)
    return os.path.abspath(local) if os.path.exists(local) else path


def is_yaml(path: str) -> bool:
    """Check by its ending whether a setting that also takes other names names a YAML file."""
    return Path(path).suffix in (".yaml", ".yml")


def _make_yaml_absolute(value: str) -> str:
    return make_absolute(value) if is_yaml(value) else value


# The config.yaml of a run then works from any directory. Every setting that may name a file has one of these types,
# `recipe.sources.SourceList`, `user_function.FunctionReference`, or a validator of its own that resolves the path.
PathOrName = Annotated[str, AfterValidator(make_absolute)]
"""Setting that names a file or directory, or something else; absolute once it is read if it exists here."""
YamlOrName = Annotated[str, AfterValidator(_make_yaml_absolute)]
"""Setting that names a YAML file, or a preset and the like; likewise."""
