"""Log files of the processes of the local launcher, and where they are kept. No torch."""

import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from realrl.config.secrets.redaction import redact
from realrl.runtime.processes.environment import SCRATCH_VARIABLE


def name_log_file(scratch: str | Path, rank: int) -> Path:
    """Name the log file of a rank."""
    return Path(scratch) / f"rank-{rank}.log"


def divert_errors() -> None:
    """Redirect output of native libraries in the first rank to its log, away from the screen.

    They write to the file descriptor; our own messages still reach standard error. Other ranks have been started
    with a log in place of both.
    """
    scratch = os.environ.get(SCRATCH_VARIABLE)
    if scratch is None or int(os.environ["RANK"]) != 0:
        return
    sys.stderr.flush()
    screen = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    with name_log_file(scratch, 0).open("ab") as log:
        os.dup2(log.fileno(), 2)
    # rich asks the second one how wide the terminal is.
    sys.stderr = sys.__stderr__ = screen  # type: ignore[misc]


def keep_logs(scratch: Path, directory: Path | None) -> Path | None:
    """Copy logs that are not empty to `directory`, without secrets; return where they are, or None.

    Where there is no directory, or no room in it, they go to a new one for temporary files.
    """
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
    """Copy all files; return False, leaving none behind, where that fails."""
    try:
        directory.mkdir(exist_ok=True)
        for file in files:
            text = file.read_bytes().decode(errors="surrogateescape")
            (directory / file.name).write_bytes(redact(text).encode(errors="surrogateescape"))
    except OSError:
        shutil.rmtree(directory, ignore_errors=True)
        return False
    return True
