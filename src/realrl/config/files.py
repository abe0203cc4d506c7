"""Whether a file or a directory can be written, asked before the work whose result it is to hold."""

import os
import tempfile
from pathlib import Path

from realrl.config.errors import UserError


def reason_of(error: OSError) -> str:
    """Why a file could not be written, for a sentence: `No space left on device`."""
    return error.strerror or str(error) or type(error).__name__


def check_file(name: str, path: Path) -> None:
    """UserError, beginning with `name`, if a file could not be written, in a directory that may have to be made."""
    if path.is_dir():
        raise UserError(f"{name}: this is a directory; name a file in it")
    if path.exists() and not os.access(path, os.W_OK):
        raise UserError(f"{name}: this file cannot be written")
    if not _is_special(path):
        check_directory(name, path.parent)


def check_directory(name: str, path: Path) -> None:
    """UserError, beginning with `name`, if a directory could not be made or written; leaves nothing behind."""
    nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    try:
        if not nearest.is_dir():
            raise NotADirectoryError(None, f"{nearest} is a file")
        # Permissions do not tell: of root, of network and of virtual file systems. /proc can only be tried.
        with tempfile.NamedTemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise UserError(f"{name} cannot be written: {reason_of(error)}") from None


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()
