"""Atomic writes of files, and checks of paths that will be written."""

import io
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from realrl.config.errors import UserError

PARTIAL = ".*.partial"
"""Pattern of the names of `partial_path`."""


def partial_path(path: Path) -> Path:
    """Name a file or directory while it is incomplete."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to. It replaces `path` if the block succeeds, and is removed otherwise.

    The directory is created if necessary. A special file, such as /dev/stdout, is written directly.
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
    """Write a UTF-8 text file atomically: a reader sees the old or the new content. Raises OSError."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_all(file: io.RawIOBase, data: memoryview) -> None:
    """Write all bytes to an unbuffered file, which may accept only some at a time. Raises OSError."""
    while data:
        data = data[file.write(data) :]


def as_os_error(error: BaseException) -> OSError | None:
    """Find the operating system's error that caused an exception; None if there is none.

    The Rust code of safetensors and tokenizers raises its own exceptions, with the error number in the text.
    """
    if isinstance(error, OSError):
        return error
    found = re.search(r"\(os error (\d+)\)", str(error))
    return None if found is None else OSError(int(found[1]), os.strerror(int(found[1])))


def reason_of(error: OSError) -> str:
    """Format the operating system's reason for an error message: `No space left on device`."""
    return error.strerror or str(error) or type(error).__name__


def make_private(directory: Path) -> None:
    """Make a directory that only this user can read; an existing directory keeps its mode. Raises OSError.

    Parents are created with the user's umask.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    # The umask can only remove bits from the mode.
    directory.mkdir(mode=0o700, exist_ok=True)


def check_file(name: str, path: Path) -> None:
    """Check that a file and its directory can be written. Raises UserError beginning with `name`."""
    if path.is_dir():
        raise UserError(f"{name}: this is a directory; name a file in it")
    if path.exists() and not os.access(path, os.W_OK):
        raise UserError(f"{name}: this file cannot be written")
    if not _is_special(path):
        check_directory(name, path.parent)


def check_directory(name: str, path: Path) -> None:
    """Check that a directory can be created and written, but leave no file in it.

    Raises UserError beginning with `name`.
    """
    nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    try:
        if not nearest.is_dir():
            raise NotADirectoryError(None, f"{nearest} is a file")
        # For root, network file systems and /proc, permissions do not show whether a write succeeds; a try does.
        with tempfile.NamedTemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise UserError(f"{name} cannot be written: {reason_of(error)}") from None


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()
