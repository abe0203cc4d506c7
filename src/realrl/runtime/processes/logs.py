"""Log files of ranks, and the screen. Does not import torch."""

import io
import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from realrl.config.files import whole_file
from realrl.config.redaction import redact
from realrl.runtime.processes.environment import restart_count
from realrl.runtime.supervision.orphans import SCRATCH_VARIABLE

LOGS = "logs"
"""Name of the subdirectory of a run directory with the log of each rank."""


class _Screen(io.FileIO):
    """A file whose writes never fail. Output is lost if its reader or the terminal is gone."""

    def write(self, data: Any, /) -> int:
        with suppress(OSError):
            written = super().write(data)
            if written is not None:
                return written
        return len(data)


def open_screen(descriptor: int, *, owned: bool = True) -> io.TextIOWrapper:
    """Open a file descriptor for messages, which are written line by line.

    `owned`: close the descriptor with the file.
    """
    screen = io.BufferedWriter(_Screen(descriptor, "w", closefd=owned))
    return io.TextIOWrapper(screen, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def name_log_file(scratch: str | Path, rank: int) -> Path:
    """Return the path of a rank's log file."""
    return Path(scratch) / f"rank-{rank}.log"


def divert_errors() -> None:
    """Redirect the output of native libraries in the first rank to its log.

    Native libraries write to the file descriptor 2. Messages from Python still reach the screen. All output of
    other ranks goes to their logs anyway.
    """
    scratch = os.environ.get(SCRATCH_VARIABLE)
    if scratch is None or int(os.environ["RANK"]) != 0:
        return
    sys.stderr.flush()
    screen = open_screen(os.dup(2))
    with name_log_file(scratch, 0).open("ab") as log:
        os.dup2(log.fileno(), 2)
    # rich reads the width of the terminal from `sys.__stderr__`.
    sys.stderr = sys.__stderr__ = screen  # type: ignore[misc]


def move_log(rank: int, directory: Path) -> None:
    """From now on, write this rank's log in `directory`, after the logs of earlier starts of the run.

    Under torchrun, Python's own standard error stays on the screen. On a full disk, nothing changes.
    """
    scratch = os.environ.get(SCRATCH_VARIABLE)
    if scratch is None and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        sys.stderr.flush()
        sys.stdout.flush()
        with (directory / f"rank-{rank}.log").open("ab", buffering=0) as log:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            log.write(f"{stamp} rank {rank} is process {os.getpid()}, start {restart_count() + 1}\n".encode())
            before = None if scratch is None else name_log_file(scratch, rank)
            if before is None:
                screen = open_screen(os.dup(2))
                sys.stderr = sys.__stderr__ = screen  # type: ignore[misc]
            elif before.exists():
                log.write(before.read_bytes())
                before.unlink()
            os.dup2(log.fileno(), 2)
            if rank != 0 and scratch is not None:
                os.dup2(log.fileno(), 1)


def keep_logs(scratch: Path, directory: Path | None) -> Path | None:
    """Append the logs in `scratch` to those in `directory`. Returns the directory with the run's logs, or None.

    Also replaces secrets in all logs of the run, to which no process writes any more. Without a directory, or on a
    full disk, the logs go to a new temporary directory.
    """
    files = [file for file in sorted(scratch.glob("rank-*.log")) if file.stat().st_size]
    if directory is not None and (_appended(files, directory) or not files):
        for file in directory.glob("rank-*.log"):
            with suppress(OSError):
                _redact_file(file)
        return directory if directory.is_dir() else None
    if not files:
        return None
    with suppress(OSError):
        other = Path(tempfile.mkdtemp(prefix="realrl-logs-"))
        if _appended(files, other):
            return other
    return None


def _appended(files: list[Path], directory: Path) -> bool:
    """Append each file to the file with the same name in `directory`. Returns whether this has succeeded."""
    try:
        if files:
            directory.mkdir(exist_ok=True)
        for file in files:
            with (directory / file.name).open("ab") as log, file.open("rb") as source:
                log.writelines(map(_redact_line, source))
    except OSError:
        return False
    return True


def _redact_file(file: Path) -> None:
    """Replace secrets in a log, which native libraries and the user's code have also written. Raises OSError."""
    with file.open("rb") as lines:
        if all(_redact_line(line) == line for line in lines):
            return
    with whole_file(file) as partial, partial.open("wb") as log, file.open("rb") as lines:
        log.writelines(map(_redact_line, lines))


def _redact_line(line: bytes) -> bytes:
    return redact(line.decode(errors="surrogateescape")).encode(errors="surrogateescape")
