"""Where processes of the local launcher print what is not for the screen, and where that is kept. No torch."""

import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from realrl.runtime.processes.environment import SCRATCH_VARIABLE


def log_file(scratch: str | Path, rank: int) -> Path:
    """The file for what a rank prints."""
    return Path(scratch) / f"rank-{rank}.log"


def divert_errors() -> None:
    """In the first rank, leave standard error to what we print ourselves: native libraries, which write to the file
    descriptor, get the log. Other ranks have been started with a log in place of both."""
    scratch = os.environ.get(SCRATCH_VARIABLE)
    if scratch is None or int(os.environ["RANK"]) != 0:
        return
    sys.stderr.flush()
    screen = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    with log_file(scratch, 0).open("ab") as log:
        os.dup2(log.fileno(), 2)
    # rich asks the second one how wide the terminal is.
    sys.stderr = sys.__stderr__ = screen  # type: ignore[misc]


def keep_logs(scratch: Path, directory: Path | None) -> Path | None:
    """Copy logs that are not empty to `directory`, or where there is none, or no room in it, to a new one for
    temporary files; where they are, or None."""
    files = [file for file in sorted(scratch.glob("rank-*.log")) if file.stat().st_size]
    if not files:
        return None
    if directory is not None and _copied(files, directory):
        return directory
    with suppress(OSError):
        other = Path(tempfile.mkdtemp(prefix="realrl-logs-"))
        if _copied(files, other):
            return other
    return None


def _copied(files: list[Path], directory: Path) -> bool:
    """Whether all files could be copied; if not, none is left."""
    try:
        directory.mkdir(exist_ok=True)
        for file in files:
            shutil.copyfile(file, directory / file.name)
    except OSError:
        shutil.rmtree(directory, ignore_errors=True)
        return False
    return True
