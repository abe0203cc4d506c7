"""A timeline of the instructions of every rank, for Perfetto (ui.perfetto.dev)."""

import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KEPT = 20_000
"""Slices kept per rank: of a long run the last ones, so that memory stays bounded."""


class Trace:
    """Slices of one rank, in the Chrome trace format: times in microseconds."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.events: deque[dict[str, Any]] = deque(maxlen=KEPT)

    @contextmanager
    def slice(self, name: str, **details: object) -> Iterator[None]:
        """Record what happens inside as one slice."""
        start = time.time_ns()
        try:
            yield
        finally:
            end = time.time_ns()
            self.events.append(
                {
                    "name": name,
                    "ph": "X",
                    "ts": start / 1000,
                    "dur": (end - start) / 1000,
                    "pid": 0,
                    "tid": self.rank,
                    "args": details,
                }
            )


def write_trace(path: Path, ranks: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Write the events of all ranks, one row per rank, the first event at time 0."""
    events = [event for rank in ranks for event in rank]
    origin = min((event["ts"] for event in events), default=0.0)
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(len(ranks))
    ]
    shifted = [{**event, "ts": event["ts"] - origin} for event in events]
    path.write_text(json.dumps({"traceEvents": names + shifted, "displayTimeUnit": "ms"}))
