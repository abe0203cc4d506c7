"""Files that appear whole or not at all, and error messages for those that cannot be written."""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from realrl.config.errors import UserError

PARTIAL = ".*.partial"
"""Pattern for the names that `partial_path` gives."""


def partial_path(path: Path) -> Path:
    """Where a file or directory lies until it is whole."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to in the block, which takes the place of `path` if the block ends well, else is removed.

    The directory is made if need be. What is no file of its own, such as /dev/stdout, is written to as it is.
    """
    if _is_special(path):
        yield path
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(path)
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text file in UTF-8; a reader sees the old one or the new one, whatever happens. OSError."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def as_os_error(error: BaseException) -> OSError | None:
    """The operating system's refusal that an exception stands for; None where it is something else.

    The Rust code of safetensors and tokenizers knows only its own exceptions, and puts the number into their text.
    """
    if isinstance(error, OSError):
        return error
    found = re.search(r"\(os error (\d+)\)", str(error))
    return None if found is None else OSError(int(found[1]), os.strerror(int(found[1])))


def reason_of(error: OSError) -> str:
    """The operating system's reason, for an error message: `No space left on device`."""
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
