"""Boards: ranks publish heartbeats and failures there, and watchdogs read them.

A launcher on this machine reads files. The launcher on a Ray cluster reads the same files through actors
(`runtime/launcher/on_ray.py`). Ranks that torchrun has started use torchrun's store. This module
does not import torch, except in `StoreBoard`.
"""

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from realrl.runtime.supervision.failures import Failure
from realrl.runtime.supervision.heartbeat import Heartbeat

_SIZE = 4096
"""Bytes of a heartbeat in a file. This is one page, so that a killed process leaves no half-written heartbeat."""


class Board(Protocol):
    """The heartbeats and failures of all ranks, as a watchdog reads them. Ranks `publish` their heartbeats."""

    def read_heartbeats(self) -> Mapping[int, Heartbeat]:
        """Read the last heartbeat of every rank that has published one, by rank."""

    def read_failures(self) -> list[Failure]:
        """Read the failures that ranks have reported."""

    def works(self, heartbeat: Heartbeat) -> bool:
        """Return whether a rank's process has used a core since this heartbeat, or waits for one.

        A watchdog calls this repeatedly if the heartbeats of a rank are missing. Returns False if this machine
        cannot find out.
        """


class FileBoard:
    """The board of ranks on one machine.

    Its files are in the launcher's scratch directory, and outlive a killed rank.

    A rank writes its failure without this board (`report_failure`), because the rank has no board before it has
    loaded torch.
    """

    def __init__(self, directory: str | Path, rank: int | None = None) -> None:
        """Open the board; without a rank, it can only be read."""
        self._directory, self._file = Path(directory), None
        self._probe = WorkProbe()
        if rank is not None:
            # The directory no longer exists if the launcher has exited already.
            with suppress(OSError):
                name = self._directory / f"heartbeat-{rank}"
                self._file = os.open(name, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)

    def publish(self, heartbeat: Heartbeat) -> None:
        """Replace this rank's heartbeat. This takes only microseconds, so it is done for every instruction."""
        if self._file is None:
            return
        text = heartbeat.to_text().encode()
        if len(text) > _SIZE:
            # JSON needs six characters for a letter of some alphabets, so the text could be longer than a page.
            text = replace(heartbeat, instruction=None, call=None, function=None).to_text().encode()
        with suppress(OSError):
            os.pwrite(self._file, text.ljust(_SIZE), 0)

    def read_heartbeats(self) -> dict[int, Heartbeat]:
        """Read the last heartbeat of every rank that has published one, by rank."""
        found = {}
        for file in self._directory.glob("heartbeat-*"):
            # The file may be empty at first, or change while it is read, so reading is repeated.
            for _ in range(3):
                with suppress(OSError, ValueError):
                    heartbeat = Heartbeat.parse(file.read_bytes())
                    found[heartbeat.rank] = heartbeat
                    break
        return dict(sorted(found.items()))

    def read_failures(self) -> list[Failure]:
        """Read the failures that ranks have reported."""
        return [Failure.parse(file.read_text()) for file in self._directory.glob("failure-*.json")]

    def works(self, heartbeat: Heartbeat) -> bool:
        """Return whether a rank's process has used a core since this heartbeat, or waits for one."""
        return self._probe.works(heartbeat)


class StoreBoard:
    """The board of ranks that torchrun has started, in the store of their rendezvous."""

    def __init__(self, rank: int, world: int, token: str, timeout: float) -> None:
        """Connect to the store whose address torchrun has given.

        `token` identifies this start of the run, and is equal on all ranks. A request fails after `timeout`
        seconds.
        """
        import torch.distributed as dist

        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
        )
        self._store = dist.PrefixStore(f"realrl/{token}", store)
        self._rank, self._world = rank, world
        self._silent_since: float | None = None
        # Two threads must not use one client of a store at the same time.
        self._lock = threading.Lock()
        self._probe = WorkProbe()
        self._machine = ""

    def publish(self, heartbeat: Heartbeat) -> None:
        """Replace this rank's heartbeat."""
        self._machine = heartbeat.machine
        with self._using():
            self._store.set(f"heartbeat-{self._rank}", heartbeat.to_text())

    def read_heartbeats(self, ranks: Iterable[int] | None = None) -> dict[int, Heartbeat]:
        """Read the last heartbeats of these ranks, all by default."""
        found = {}
        for rank in range(self._world) if ranks is None else ranks:
            with self._using(), suppress(ValueError):
                name = f"heartbeat-{rank}"
                if self._store.check([name]):
                    found[rank] = Heartbeat.parse(self._store.get(name))
        return found

    def report(self, failure: Failure) -> bool:
        """Report the failure that ends the run. Returns False if another rank has already reported one."""
        text = failure.to_text()
        with self._using():
            return bool(self._store.compare_set("failure", "", text).decode() == text)
        return False

    def read_failures(self) -> list[Failure]:
        """Read the failure that ends the run, if one was reported."""
        with self._using():
            if self._store.check(["failure"]):
                return [Failure.parse(self._store.get("failure"))]
        return []

    def works(self, heartbeat: Heartbeat) -> bool:
        """Return whether a rank's process uses a core; False for processes on other machines."""
        return heartbeat.machine == self._machine and self._probe.works(heartbeat)

    @property
    def silent_seconds(self) -> float:
        """Number of seconds for which the store has not answered."""
        return 0.0 if self._silent_since is None else time.monotonic() - self._silent_since

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Use the store in the block, and record whether it answers.

        If it does not, the block ends early without an error.
        """
        with self._lock:
            asked = time.monotonic()
            try:
                yield
            except RuntimeError:
                self._silent_since = self._silent_since or asked
            else:
                self._silent_since = None


class WorkProbe:
    """Asks the operating system whether a process without heartbeats works."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}
        """Number of heartbeats of each process, and its CPU time in ticks, at the last call of `works`."""

    def works(self, heartbeat: Heartbeat) -> bool:
        """Return whether a process of this machine has used a core since its heartbeat, or waits for one.

        Returns False if the system does not provide this information, as on macOS.
        """
        used, runnable = 0, False
        with suppress(OSError, ValueError, IndexError):
            process = Path(f"/proc/{heartbeat.pid}")
            used = sum(map(int, _read_state(process)[11:13]))
            runnable = any(_read_state(thread)[0] == "R" for thread in (process / "task").iterdir())
        # CPU time between the last heartbeat and the first call proves nothing, because the process may have
        # stopped after it.
        beats, before = self._seen.get(heartbeat.pid, (heartbeat.beats, used))
        self._seen[heartbeat.pid] = heartbeat.beats, used
        return runnable or (beats == heartbeat.beats and used > before)


def is_alive(pid: int) -> bool:
    """Return whether a process is running. A zombie is not running."""
    if sys.platform != "linux":
        try:
            os.kill(pid, 0)
        except OSError:
            return False
        return True
    try:
        return _read_state(Path(f"/proc/{pid}"))[0] not in "ZX"
    except OSError:
        return False


def _read_state(process: Path) -> list[str]:
    """Read the fields of /proc/PID/stat, from the process state on."""
    return (process / "stat").read_text().rpartition(")")[2].split()
