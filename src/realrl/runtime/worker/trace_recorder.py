"""Trace of the instructions of one rank."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from realrl.program.trace_file import Event, make_event

KEPT = 20_000
"""Maximum slices kept per rank: the latest ones, so that memory stays bounded however long an evaluation is."""


class Trace:
    """Trace events of the last steps of this rank."""

    def __init__(self, rank: int, steps: int = 1) -> None:
        """Keep the last `steps` steps that have ended, and what follows them."""
        self.rank = rank
        self._events: deque[Event] = deque(maxlen=KEPT)
        self._starts: deque[float] = deque(maxlen=steps + 1)
        """Starts of the kept steps, in microseconds."""
        self._lock = threading.Lock()

    def begin_step(self) -> None:
        """Begin a training step, and forget what was before the last ones."""
        with self._lock:
            self._starts.append(time.time_ns() / 1000)
            if len(self._starts) == self._starts.maxlen:
                while self._events and self._events[0]["ts"] < self._starts[0]:
                    self._events.popleft()

    @property
    def events(self) -> list[Event]:
        """Slices so far, in the order of their ends."""
        with self._lock:
            return list(self._events)

    @contextmanager
    def slice(self, name: str, *, host: bool = False, **details: object) -> Iterator[dict[str, object]]:
        """Record the block as one slice, to whose details it may add; `host`: of a function, which runs beside the
        others. May be used by several threads."""
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
