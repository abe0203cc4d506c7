"""Whether a file or a directory can be written, asked before the work whose result it is to hold."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from realrl.config.errors import UserError


def check_file(option: str, path: str) -> Path:
    """The file that an option names; UserError where it cannot be written. Its directory must exist."""
    file = Path(path)
    with _refused(option, path):
        if not file.parent.is_dir():
            raise UserError(f"{option} {path}: there is no directory {file.parent}")
        if file.is_dir():
            raise UserError(f"{option} {path}: this is a directory; name a file in it")
        _try_out(file if file.exists() else file.parent)
    return file


def check_directory(option: str, path: str) -> Path:
    """The directory that an option names, which may have to be made; UserError where that, or writing into it, is
    not possible."""
    directory = Path(path)
    with _refused(option, path):
        above = directory
        while not above.exists() and above != above.parent:
            above = above.parent
        if not above.is_dir():
            raise UserError(f"{option} {path}: {above} is a file, not a directory")
        _try_out(above)
    return directory


def _try_out(path: Path) -> None:
    """Open a file to write to it, or make one in a directory. What permissions say is not enough: a read-only
    or special file system refuses even those who may do everything."""
    if path.is_dir():
        TemporaryFile(dir=path, prefix=".realrl-").close()
    else:
        path.open("ab").close()


@contextmanager
def _refused(option: str, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{option} {path}: this cannot be written ({error.strerror})") from None
