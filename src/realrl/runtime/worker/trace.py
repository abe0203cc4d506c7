"""The slices of one rank while it works."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from realrl.program.trace import Event, make_event

KEPT = 20_000
"""Slices kept per rank: of a long run the last ones, so that memory stays bounded."""


class Trace:
    """What this rank has done, as events of a trace file."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.events: deque[Event] = deque(maxlen=KEPT)

    @contextmanager
    def slice(self, name: str, *, host: bool = False, **details: object) -> Iterator[dict[str, object]]:
        """Record what happens inside as one slice, to whose details may be added; `host`: beside what the rank
        does. May be used by several threads."""
        start = time.time_ns()
        try:
            yield details
        finally:
            seconds = time.time_ns() - start
            event = make_event(self.rank, name, start / 1000, seconds / 1000, details, host=host)
            self.events.append(event)
