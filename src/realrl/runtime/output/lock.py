"""Lock a run's directory, so that two commands never write there at once. Does not import torch."""

import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from realrl.config.errors import UserError
from realrl.config.files import make_private, reason_of
from realrl.config.paths import local_path
from realrl.runtime.processes.environment import restart_count

LOCK = "lock"
"""File of a run directory that the writing rank locks. It contains the id of the rank's process."""
_PATIENCE, _PATIENCE_OF_RESTART = 5.0, 30.0
"""Seconds to wait for a process that is ending. A restarted run waits longer, because its own earlier start
may still be ending."""
_POLL = 0.1


class RunLock:
    """The lock of a run's directory. The system releases it when the process ends, even after a crash."""

    def __init__(self, run_dir: str) -> None:
        self._path = local_path(run_dir)
        self._descriptor: int | None = None

    def take(self, *, make: bool = False) -> None:
        """Lock the directory. Raises UserError if another process has locked it.

        If the directory is missing, it is created with `make`, and not locked without `make`.

        A restarted run never fails here, because the lock of its earlier start may remain after its host is gone.
        On a file system without locks, nothing is locked.
        """
        if self._descriptor is not None or not (make or self._path.is_dir()):
            return
        try:
            make_private(self._path)
            descriptor = os.open(self._path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UserError(f"run_dir={self._path} cannot be written: {reason_of(error)}") from None
        restarted = restart_count() > 0
        if _try_lock(descriptor, fcntl.LOCK_EX, _PATIENCE_OF_RESTART if restarted else _PATIENCE):
            self._descriptor = descriptor
            with suppress(OSError):
                owner = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, owner.encode(), 0)
        else:
            os.close(descriptor)
            if not restarted:
                raise _make_error(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def check_unused(run_dir: str) -> None:
    """Check that no process has locked a run's directory. Raises UserError if one has."""
    path = local_path(run_dir)
    try:
        descriptor = os.open(path / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not _try_lock(descriptor, fcntl.LOCK_SH, _PATIENCE):
            raise _make_error(path)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, kind: int, seconds: float) -> bool:
    """Try for `seconds` to lock a file. Returns False if another process keeps the lock."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL)
        except OSError:
            return True


def _make_error(path: Path) -> UserError:
    owner = "another process"
    with suppress(OSError, ValueError, KeyError, TypeError):
        read = json.loads((path / LOCK).read_bytes())
        owner = f"process {int(read['pid'])} on {read['host']}"
    return UserError(
        f"run_dir={path} is in use: {owner} trains there; wait for its end, end it, or choose another directory"
    )
