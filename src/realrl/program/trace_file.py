"""Timeline of the instructions of every rank, measured or predicted, for Perfetto (ui.perfetto.dev)."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from realrl.config.files import write_whole

Source = Literal["measured", "predicted"]
"""Origin of the times; names the group of rows, so that both files can be opened side by side."""

_GROUPS: dict[Source, int] = {"measured": 1, "predicted": 2}

Event = dict[str, Any]
"""A slice in the Chrome trace format: `name`, `tid` (the row: the rank, or its host's), `ts` and `dur` in
microseconds, and `args`."""

_HOST = 1_000_000
"""Number of the row of rank 0's host; of other ranks so many more."""


def make_event(
    rank: int,
    name: str,
    start_us: float,
    duration_us: float,
    details: Mapping[str, object],
    *,
    host: bool = False,
) -> Event:
    """Make the slice of an instruction on one rank; `host`: of a function, which runs beside the others."""
    return {
        "name": name,
        "ph": "X",
        "ts": start_us,
        "dur": duration_us,
        "tid": _HOST + rank if host else rank,
        "args": dict(details),
    }


def write_trace(path: Path, ranks: Sequence[Iterable[Event]], source: Source) -> None:
    """Write the events of all ranks, a row for each rank, and one for its host if that calls functions; the first
    event at time 0."""
    group = _GROUPS[source]
    events = [event for rank in ranks for event in rank]
    origin = min((event["ts"] for event in events), default=0.0)
    document = [{"name": "process_name", "ph": "M", "pid": group, "args": {"name": source}}]
    used = {event["tid"] for event in events}
    for rank in range(len(ranks)):
        rows = [(rank, f"rank {rank}"), *[(_HOST + rank, f"rank {rank} host")] * (_HOST + rank in used)]
        for order, (row, title) in enumerate(rows):
            for name, args in (
                ("thread_name", {"name": title}),
                ("thread_sort_index", {"sort_index": 2 * rank + order}),
            ):
                document.append({"name": name, "ph": "M", "pid": group, "tid": row, "args": args})
    document += [{**event, "pid": group, "ts": event["ts"] - origin} for event in events]
    write_whole(path, json.dumps({"traceEvents": document, "displayTimeUnit": "ms"}))
