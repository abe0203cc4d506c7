"""Ends processes and removes files of a local launcher that has gone, in whatever way. No torch."""

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

from realrl.runtime.processes.environment import SCRATCH_VARIABLE

_PREFIX = "realrl-ranks-"
_LOCK = "lock"
_PR_SET_PDEATHSIG = 1
_MOMENT = 60.0
"""Seconds that a new launcher has for taking its lock."""


class Scratch:
    """Scratch directory of a launcher, which is removed after it whatever ends it.

    Its lock is free once the launcher has gone: its ranks then remove the directory, or, where they have been
    killed too, the next launcher does.
    """

    def __init__(self) -> None:
        _sweep(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _sweep(directory: Path) -> None:
    """Remove the scratch directories of launchers that were killed along with all their ranks."""
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
    """End this process when the launcher is gone, in whatever way, and clean up after it."""
    if sys.platform == "linux":
        # A rank that was stopped would stay for ever; woken up, it notices, too.
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        scratch = os.environ.get(SCRATCH_VARIABLE)
        if scratch is not None:
            # Before, since ranks that notice at once end each other; and after, for what others have written.
            shutil.rmtree(scratch, ignore_errors=True)
            for sibling in find_ranks(scratch):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(sibling, signal.SIGKILL)
            shutil.rmtree(scratch, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def find_ranks(scratch: str) -> list[int]:
    """Find the other processes of a launcher: ranks and what they have started.

    They have its scratch directory in a variable, or, where they have no variables, they work in a directory there.
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
