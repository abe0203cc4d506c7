"""Let threads sleep at OpenMP barriers while other busy processes compete for the cores."""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from realrl.model.cpu.rows import load_openmp
from realrl.runtime.prepare.host import free_group_threads

INTERVAL = 0.1
"""Seconds between two checks of how long threads have waited for a core."""
CONTENDED = 0.2
"""Cores count as contended if all threads together wait for more than this many seconds per second.

Two threads on two cores wait 0.5 s or more if another process is busy, and less than 0.1 s on a quiet machine.
"""
QUIET = 20
"""Number of consecutive checks without contention after which threads spin again."""


class BarrierWatch:
    """A thread that chooses how the OpenMP threads of this process wait for each other at barriers.

    By default they spin for some milliseconds before they sleep. On a quiet machine this is fastest, because a
    training step has thousands of short parallel regions. If another process is busy, spinning is very slow: a
    thread spins through its whole time slice while the thread for which it waits has no core. `relax` lets threads
    sleep at once. The number of threads does not change, so results stay the same bit for bit.
    """

    def __init__(
        self, read_waits: Callable[[], Mapping[int, int]], relax: Callable[[], "Relaxed | None"]
    ) -> None:
        """`read_waits` works like `read_thread_waits`. `relax` returns None if threads must spin as before."""
        self._read_waits = read_waits
        self._relax = relax
        self._relaxed: Relaxed | None = None
        self._quiet = 0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._waits = read_waits()
        self._time = time.monotonic()

    @property
    def relaxed(self) -> bool:
        """Whether threads currently sleep at barriers."""
        return self._relaxed is not None

    def look(self, now: float) -> None:
        """Let threads sleep or spin, depending on how long they have waited for cores since the last call.

        `now`: time in seconds.
        """
        waits = self._read_waits()
        # Threads that have ended are left out. A new thread counts from its start.
        waited = sum(wait - self._waits.get(thread, 0) for thread, wait in waits.items())
        contended = waited / 1e9 > CONTENDED * (now - self._time)
        self._waits, self._time = waits, now
        self._quiet = 0 if contended else self._quiet + 1
        if contended and self._relaxed is None:
            self._relaxed = self._relax()
        elif self._quiet >= QUIET:
            self._spin_again()

    def start(self) -> None:
        """Start a thread that calls `look` every 0.1 s."""
        self._thread = threading.Thread(target=self._run, name="barrier-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, and let OpenMP threads spin at barriers as before."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        self._spin_again()

    def _spin_again(self) -> None:
        if self._relaxed is not None:
            self._relaxed.end()
            self._relaxed = None

    def _run(self) -> None:
        while not self._closed.wait(INTERVAL):
            self.look(time.monotonic())


class Relaxed:
    """Lets threads sleep at barriers after they have spun for about a microsecond, until `end` is called.

    GNU's OpenMP library shortens the spinning of all threads while it manages more threads than there are cores.
    This object therefore keeps a team of more threads than cores, which only sleep. No function changes the time of
    spinning directly, because the library reads GOMP_SPINCOUNT and OMP_WAIT_POLICY only once, when torch loads it.
    """

    def __init__(self, openmp: ctypes.CDLL) -> None:
        self._over = threading.Event()
        ready = threading.Event()
        self._thread = threading.Thread(
            target=self._keep_team, args=(openmp, ready), name="openmp-team", daemon=True
        )
        self._thread.start()
        ready.wait()

    def _keep_team(self, openmp: ctypes.CDLL, ready: threading.Event) -> None:
        # Each thread of the team calls this function once. It is a C function, because Python needs the
        # interpreter's lock.
        nothing = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)
        openmp.GOMP_parallel(nothing, None, openmp.omp_get_num_procs() + 1, 0)
        ready.set()
        # The team exists as long as the thread that created it.
        self._over.wait()

    def end(self) -> None:
        """Let threads spin at barriers as before."""
        self._over.set()
        self._thread.join()


def watch_barriers(threads: int) -> BarrierWatch | None:
    """Watch the barriers of this process's OpenMP threads from now on, if it computes with several threads.

    Returns None unless this is Linux with GNU's OpenMP library, which torch's packages contain. Also returns None
    if the user has set GOMP_SPINCOUNT or OMP_WAIT_POLICY.
    """
    openmp = load_openmp()
    chosen = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()
    if threads == 1 or openmp is None or chosen or sys.platform != "linux" or not read_thread_waits():
        return None

    def relax() -> Relaxed | None:
        # Leave enough threads: the OpenMP library ends the process if it cannot start one, and every local rank
        # starts some.
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        left = free_group_threads()
        enough = left is None or left > ranks * (openmp.omp_get_num_procs() + 2)
        return Relaxed(openmp) if enough else None

    watch = BarrierWatch(read_thread_waits, relax)
    watch.start()
    return watch


def read_thread_waits(tasks: Path = Path("/proc/self/task")) -> dict[int, int]:
    """Read how many nanoseconds each thread of this process has waited for a core. Keys are thread ids.

    The result is empty if the kernel does not count this time (CONFIG_SCHED_INFO).
    """
    waits: dict[int, int] = {}
    try:
        threads = os.listdir(tasks)
    except OSError:
        return waits
    for thread in threads:
        try:
            waits[int(thread)] = int((tasks / thread / "schedstat").read_text().split()[1])
        except (OSError, IndexError):
            # The thread has ended, or the kernel does not count.
            continue
    return waits
