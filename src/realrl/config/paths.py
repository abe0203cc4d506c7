"""What a user wrote as a path: where it is on this machine, or whether it is a name on the Hugging Face hub."""

import os
import re
from pathlib import Path

from realrl.config.errors import UserError
from realrl.config.explain import shorten

_HUB_NAME = r"[\w-][\w.-]*(/[\w-][\w.-]*)?"


_LONGEST = 255
"""Bytes of a name, in every usual file system; asking about a longer one is an error of its own."""


def local_path(path: str) -> Path:
    """A path with `~` resolved, where there is such a home: every path from a recipe or a command line goes through
    here, once. UserError where no file system could hold it."""
    found = Path(os.path.expanduser(path))
    if any(len(os.fsencode(part)) > _LONGEST for part in found.parts):
        raise UserError(f"{shorten(path)} is too long for a path: a name has at most {_LONGEST} bytes")
    return found


def is_local(path: str) -> bool:
    """Whether this can only be a directory here. The hub is not asked for those: offline, that takes most of
    a minute before it fails."""
    local = local_path(path)
    below_a_directory = len(local.parts) == 2 and local.parent.is_dir()
    return local.exists() or below_a_directory or not re.fullmatch(_HUB_NAME, path)
