"""Atomic writes of files, and error messages for paths that cannot be written."""

import io
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from realrl.config.errors import UserError

PARTIAL = ".*.partial"
"""Pattern of the names that `partial_path` gives."""


def partial_path(path: Path) -> Path:
    """Name the place of a file or directory until it is complete."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to; it replaces `path` if the block ends well, else it is removed.

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
    """Write a UTF-8 text file atomically: a reader sees the old content or the new. OSError."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_all(file: io.RawIOBase, data: memoryview) -> None:
    """Write all bytes to an unbuffered file, which takes some of them at a time. OSError."""
    while data:
        data = data[file.write(data) :]


def as_os_error(error: BaseException) -> OSError | None:
    """Find the operating system's error behind an exception; None where there is none.

    The Rust code of safetensors and tokenizers knows only its own exceptions, and puts the number into their text.
    """
    if isinstance(error, OSError):
        return error
    found = re.search(r"\(os error (\d+)\)", str(error))
    return None if found is None else OSError(int(found[1]), os.strerror(int(found[1])))


def reason_of(error: OSError) -> str:
    """Format the operating system's reason for an error message: `No space left on device`."""
    return error.strerror or str(error) or type(error).__name__


def make_private(directory: Path) -> None:
    """Make a directory that only this user can look into; one that is there keeps its mode. OSError.

    Directories above it are made as the user's umask says.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    # A mode given to mkdir is still subject to the umask, which can only take away.
    directory.mkdir(mode=0o700, exist_ok=True)


def check_file(name: str, path: Path) -> None:
    """Check that a file could be written, making its directory if need be; UserError beginning with `name`."""
    if path.is_dir():
        raise UserError(f"{name}: this is a directory; name a file in it")
    if path.exists() and not os.access(path, os.W_OK):
        raise UserError(f"{name}: this file cannot be written")
    if not _is_special(path):
        check_directory(name, path.parent)


def check_directory(name: str, path: Path) -> None:
    """Check that a directory could be made and written, leaving nothing behind; UserError beginning with `name`."""
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
