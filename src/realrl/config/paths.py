"""Whether what a user wrote is a directory of this machine or a name on the Hugging Face hub."""

import os
import re
from pathlib import Path

_HUB_NAME = r"[\w-][\w.-]*(/[\w-][\w.-]*)?"


def local_path(path: str) -> Path:
    """A path with `~` resolved, where there is such a home."""
    return Path(os.path.expanduser(path))


def is_local(path: str) -> bool:
    """Whether this can only be a directory here. The hub is not asked for those: offline, that takes most of
    a minute before it fails."""
    local = local_path(path)
    below_a_directory = len(local.parts) == 2 and local.parent.is_dir()
    return local.exists() or below_a_directory or not re.fullmatch(_HUB_NAME, path)
