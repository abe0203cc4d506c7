"""Keep a launcher's scratch directory, and end its processes when the launcher is gone. Does not import torch."""

import ctypes
import fcntl
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

SCRATCH_VARIABLE = "REALRL_SCRATCH"
"""Environment variable with the directory in which ranks of realrl's launchers write heartbeats, failures and
logs."""

_PREFIX = "realrl-ranks-"
_LOCK = "lock"
_PR_SET_PDEATHSIG = 1
_MOMENT = 60.0
"""Seconds that a new launcher gets to take its lock."""


class Scratch:
    """The scratch directory of a launcher, which is removed when the launcher ends.

    The launcher holds a lock in the directory. If the launcher is killed, its ranks remove the directory. If the
    ranks are killed too, the next launcher finds that no process holds the lock, and removes the directory.
    """

    def __init__(self) -> None:
        _remove_old(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_old(directory: Path) -> None:
    for path in directory.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            status = path.stat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < _MOMENT:
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def end_with_launcher(launcher: int) -> None:
    """End this process when the launcher is gone, and clean up after the launcher."""
    if sys.platform == "linux":
        # SIGCONT also wakes a rank that is stopped, so that it notices the end of the launcher.
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        scratch = os.environ.get(SCRATCH_VARIABLE)
        if scratch is not None:
            # Remove files before killing, because ranks may kill each other, and again afterwards, for files
            # written since.
            shutil.rmtree(scratch, ignore_errors=True)
            kill_ranks(Path(scratch))
            shutil.rmtree(scratch, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def kill_ranks(scratch: Path) -> None:
    """Kill all processes of a launcher except this one: ranks and their children."""
    for pid in find_ranks(scratch):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def find_ranks(scratch: Path) -> list[int]:
    """Find all processes of a launcher except this one.

    Such a process has `scratch` in an environment variable, or works in a directory inside `scratch`.
    """
    variable = f"{SCRATCH_VARIABLE}={scratch}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            inside = Path(os.readlink(entry / "cwd")).is_relative_to(scratch)
            started = inside or variable in (entry / "environ").read_bytes().split(b"\0")
            if started and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found
