"""Timelines of every rank's instructions, measured or predicted, in files for Perfetto (ui.perfetto.dev)."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from realrl.config.files import partial_path, write_whole

Source = Literal["measured", "predicted"]
"""Origin of the times. It names the group of rows, so that Perfetto can show measured and predicted times side by
side."""

_GROUPS: dict[Source, int] = {"measured": 1, "predicted": 2}

Event = dict[str, Any]
"""A slice in the Chrome trace format: `name`, `ts` and `dur` in microseconds, `args`, and `tid`, the row of its
rank or of the rank's host."""

TRACE, TRACES = "trace.json", "traces"
"""In a run directory, the file with the last steps of all ranks, and the folder with one file per rank."""

_HOST = 1_000_000
"""Row of rank 0's host; the host of rank r has row `_HOST + r`."""


def make_event(
    rank: int,
    name: str,
    start_us: float,
    duration_us: float,
    details: Mapping[str, object],
    *,
    host: bool = False,
) -> Event:
    """Make the slice of one instruction. `host` means that the instruction is a function, which runs at the same
    time as the rank's other instructions."""
    return {
        "name": name,
        "ph": "X",
        "ts": start_us,
        "dur": duration_us,
        "tid": _HOST + rank if host else rank,
        "args": dict(details),
    }


def write_trace(path: Path, ranks: Sequence[Iterable[Event]], source: Source) -> None:
    """Write the events of all ranks, shifted so that the first one starts at 0."""
    write_whole(path, json.dumps(make_trace(dict(enumerate(ranks)), source)))


def make_trace(ranks: Mapping[int, Iterable[Event]], source: Source) -> dict[str, Any]:
    """Make the content of a trace file. Each rank has a row, and a second row for its host if the host runs
    functions. Times are shifted so that the first event starts at 0."""
    events = [event for rank in ranks.values() for event in rank]
    origin = min((event["ts"] for event in events), default=0.0)
    rows = _list_rows(ranks, events, source)
    shifted = [{**event, "pid": _GROUPS[source], "ts": event["ts"] - origin} for event in events]
    return {"traceEvents": rows + shifted, "displayTimeUnit": "ms"}


def _list_rows(ranks: Iterable[int], events: Iterable[Event], source: Source) -> list[Event]:
    """Make the metadata events that name and order the rows of a trace."""
    group = _GROUPS[source]
    document: list[Event] = [{"name": "process_name", "ph": "M", "pid": group, "args": {"name": source}}]
    used = {event["tid"] for event in events}
    for rank in ranks:
        rows = [(rank, f"rank {rank}"), *[(_HOST + rank, f"rank {rank} host")] * (_HOST + rank in used)]
        for order, (row, title) in enumerate(rows):
            for name, args in (
                ("thread_name", {"name": title}),
                ("thread_sort_index", {"sort_index": 2 * rank + order}),
            ):
                document.append({"name": name, "ph": "M", "pid": group, "tid": row, "args": args})
    return document


def find_rank(event: Event) -> int:
    """Find the rank of an event, which may be in the row of the rank's host."""
    row: int = event["tid"]
    return row % _HOST


def is_host(event: Event) -> bool:
    """Check whether an event is in the row of a rank's host."""
    return bool(event["tid"] >= _HOST)


def write_rank_trace(run_dir: Path, rank: int, events: Sequence[Event]) -> None:
    """Write the events of one rank of a run, with unshifted times. Raises OSError."""
    slices = [{**event, "pid": _GROUPS["measured"]} for event in events]
    document = {"traceEvents": [*_list_rows([rank], events, "measured"), *slices], "displayTimeUnit": "ms"}
    file = _rank_file(run_dir, rank)
    # `write_whole` would recreate a run directory that somebody has deleted.
    file.parent.mkdir(exist_ok=True)
    partial_path(file).write_text(json.dumps(document), encoding="utf-8")
    partial_path(file).replace(file)


def read_rank_traces(
    run_dir: Path, most: int | None = None, limit: int | None = None
) -> dict[int, list[Event]]:
    """Read the events of each rank of a run; ranks without readable events are left out. At most `most` ranks are
    read. Reading stops before the files exceed `limit` bytes in total, but the first file is always read."""
    names = (file.stem.removeprefix("rank-") for file in (run_dir / TRACES).glob("rank-*.json"))
    ranks = sorted(int(name) for name in names if name.isdecimal())
    found: dict[int, list[Event]] = {}
    total = 0
    for rank in ranks[:most]:
        with suppress(OSError):
            total += _rank_file(run_dir, rank).stat().st_size
        if limit is not None and total > limit and found:
            break
        events = read_events(_rank_file(run_dir, rank))
        if events:
            found[rank] = events
    return found


def read_events(file: Path) -> list[Event]:
    """Read the slices of a trace file; empty if the file is absent or malformed."""
    try:
        return read_slices(json.loads(file.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


def read_slices(document: Any) -> list[Event]:
    """Read the slices in the content of a trace file. Raises KeyError, ValueError, TypeError or AttributeError if
    it is not the content of a trace file."""
    return [
        {"name": str(e["name"]), "tid": int(e["tid"]), "ts": float(e["ts"]), "dur": float(e["dur"])}
        | {"ph": "X", "args": dict(e.get("args", {}))}
        for e in document["traceEvents"]
        if e["ph"] == "X"
    ]


def merge_rank_traces(run_dir: Path) -> None:
    """Write `trace.json` from the files of a run's ranks, if any of them is newer. Raises OSError."""
    ranks = read_rank_traces(run_dir)
    whole = run_dir / TRACE
    newest = max((_rank_file(run_dir, rank).stat().st_mtime_ns for rank in ranks), default=0)
    if ranks and (not whole.exists() or whole.stat().st_mtime_ns < newest):
        write_whole(whole, json.dumps(make_trace(ranks, "measured")))


def _rank_file(run_dir: Path, rank: int) -> Path:
    return run_dir / TRACES / f"rank-{rank}.json"


PREDICTED = "predicted.json"


@dataclass(frozen=True, kw_only=True)
class PredictedMemory:
    """Predicted memory of one device."""

    rank: int
    capacity_bytes: int
    """Bytes that a plan may use."""
    resting_bytes: int
    """Bytes held between steps."""
    peak_bytes: int
    during: str
    """Call during which the peak occurs."""


@dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """Predicted timeline and memory of a step: `predicted.json` in a run directory, which Perfetto can show beside
    `trace.json`."""

    seconds: float
    """Steady-state seconds per step."""
    ranks: Sequence[Sequence[Event]]
    """Slices of one step, for each rank."""
    memory: tuple[PredictedMemory, ...]
    """Memory of each device."""

    def save(self, run_dir: Path) -> None:
        """Write `predicted.json` in a run directory. Raises OSError."""
        document = make_trace(dict(enumerate(self.ranks)), "predicted")
        document |= {"seconds": self.seconds, "memory": [asdict(device) for device in self.memory]}
        write_whole(run_dir / PREDICTED, json.dumps(document))

    @classmethod
    def load(cls, run_dir: Path) -> Self | None:
        """Read `predicted.json` in a run directory; None if it is absent or malformed."""
        try:
            document = json.loads((run_dir / PREDICTED).read_bytes())
            memory = tuple(PredictedMemory(**device) for device in document["memory"])
            return cls(seconds=float(document["seconds"]), ranks=[read_slices(document)], memory=memory)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
