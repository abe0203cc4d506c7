"""Record a trace of the instructions of one rank, and write it to files."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from realrl.program.trace_file import Event, make_event, merge_rank_traces, write_rank_trace

KEPT = 20_000
"""Maximum number of slices to keep per rank; the latest are kept. Without this limit, long evaluations would fill
the memory."""


class Trace:
    """Trace events of the last steps of this rank."""

    def __init__(self, rank: int, steps: int = 1) -> None:
        """Keep the last `steps` complete steps, and everything after these steps."""
        self.rank = rank
        self._events: deque[Event] = deque(maxlen=KEPT)
        self._starts: deque[float] = deque(maxlen=steps + 1)
        """Start times of the kept steps, in microseconds."""
        self._lock = threading.Lock()

    def begin_step(self) -> None:
        """Begin a training step, and forget everything before the kept steps."""
        with self._lock:
            self._starts.append(time.time_ns() / 1000)
            if len(self._starts) == self._starts.maxlen:
                while self._events and self._events[0]["ts"] < self._starts[0]:
                    self._events.popleft()

    @property
    def events(self) -> list[Event]:
        """The kept slices, in the order in which they ended."""
        with self._lock:
            return list(self._events)

    @contextmanager
    def slice(self, name: str, *, host: bool = False, **details: object) -> Iterator[dict[str, object]]:
        """Record the block as one slice, an event with a duration. The block may add details to the slice.

        `host`: whether the slice is a function, which may run at the same time as other slices. This method is
        thread-safe.
        """
        start = time.time_ns()
        try:
            yield details
        except BaseException as error:
            details["error"] = type(error).__name__
            raise
        finally:
            seconds = time.time_ns() - start
            event = make_event(self.rank, name, start / 1000, seconds / 1000, details, host=host)
            with self._lock:
                self._events.append(event)


_WRITE_EVERY = 2.0
"""Minimum seconds between two writes during a run."""
_REST = 100
"""Minimum time between two writes, as a multiple of the time of one write. Writes thus cost at most 1 % of a
run."""


class TraceFiles:
    """Writes the trace of one rank into the run's directory. A failed write never ends a run."""

    def __init__(self, run_dir: Path, trace: Trace) -> None:
        self._run_dir, self._trace = run_dir, trace
        self._next = 0.0

    def refresh(self) -> None:
        """Write the last steps of this rank, unless the previous write is recent."""
        if time.monotonic() >= self._next:
            self.write()

    def write(self) -> None:
        """Write the last steps of this rank."""
        start = time.monotonic()
        with suppress(OSError):
            write_rank_trace(self._run_dir, self._trace.rank, self._trace.events)
        end = time.monotonic()
        self._next = end + max(_WRITE_EVERY, _REST * (end - start))

    def merge(self) -> None:
        """Write `trace.json` from the files of all ranks. Called on one rank."""
        with suppress(OSError):
            merge_rank_traces(self._run_dir)
