"""Scratch directory of a launcher, and the end of its processes when it has gone in any way. Does not import torch."""

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
"""Environment variable with the directory in which ranks of our launchers leave heartbeats, failures and logs."""

_PREFIX = "realrl-ranks-"
_LOCK = "lock"
_PR_SET_PDEATHSIG = 1
_MOMENT = 60.0
"""Seconds that a new launcher has to take its lock."""


class Scratch:
    """Scratch directory of a launcher, which is removed after it.

    The launcher holds a lock in it. If the launcher is killed, its ranks remove the directory. If they are killed
    too, the next launcher does, which finds that nobody holds the lock.
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
    """End this process when the launcher has gone, and clean up after it."""
    if sys.platform == "linux":
        # SIGCONT wakes a rank that is stopped, which then notices, too.
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        scratch = os.environ.get(SCRATCH_VARIABLE)
        if scratch is not None:
            # Before the kills, since ranks may kill each other; and after, for files that others have written.
            shutil.rmtree(scratch, ignore_errors=True)
            kill_ranks(Path(scratch))
            shutil.rmtree(scratch, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def kill_ranks(scratch: Path) -> None:
    """Kill the other processes of a launcher: ranks and their children."""
    for pid in find_ranks(scratch):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def find_ranks(scratch: Path) -> list[int]:
    """Find the other processes of a launcher.

    They have its scratch directory in a variable. A process without variables works in a directory there.
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
