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
    def slice(self, name: str, **details: object) -> Iterator[None]:
        """Record what happens inside as one slice."""
        start = time.time_ns()
        try:
            yield
        finally:
            end = time.time_ns()
            self.events.append(make_event(self.rank, name, start / 1000, (end - start) / 1000, details))
