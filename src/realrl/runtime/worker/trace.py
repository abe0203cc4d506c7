"""Trace of the instructions of one rank."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from realrl.program.trace import Event, make_event

KEPT = 20_000
"""Maximum slices kept per rank: the latest ones, so that memory stays bounded."""


class Trace:
    """Trace events of this rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.events: deque[Event] = deque(maxlen=KEPT)

    @contextmanager
    def slice(self, name: str, **details: object) -> Iterator[None]:
        """Record the block as one slice."""
        start = time.time_ns()
        try:
            yield
        finally:
            end = time.time_ns()
            self.events.append(make_event(self.rank, name, start / 1000, (end - start) / 1000, details))
