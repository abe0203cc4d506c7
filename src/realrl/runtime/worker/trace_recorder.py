"""Trace of the instructions of one rank."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from realrl.program.trace_file import Event, make_event

KEPT = 20_000
"""Maximum slices kept per rank: the latest ones, so that memory stays bounded."""


class Trace:
    """Trace events of this rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.events: deque[Event] = deque(maxlen=KEPT)

    @contextmanager
    def slice(self, name: str, *, host: bool = False, **details: object) -> Iterator[dict[str, object]]:
        """Record the block as one slice, to whose details it may add; `host`: of a function, which runs beside the
        others. May be used by several threads."""
        start = time.time_ns()
        try:
            yield details
        finally:
            seconds = time.time_ns() - start
            event = make_event(self.rank, name, start / 1000, seconds / 1000, details, host=host)
            self.events.append(event)
