"""Trace files of a running run: one per rank, kept fresh without other ranks, and the one that has them all."""

import time
from contextlib import suppress
from pathlib import Path

from realrl.program.trace_file import merge_rank_traces, write_rank_trace
from realrl.runtime.worker.trace_recorder import Trace

_SECONDS = 2.0
"""Minimum seconds between two writes in the course of a run."""
_REST = 100
"""Ratio of the time between writes to the time of one, so that they cost a run at most a hundredth of its time."""


class TraceFiles:
    """Writer of the trace of one rank into the run's directory. What cannot be written never ends a run."""

    def __init__(self, run_dir: Path, trace: Trace) -> None:
        self._run_dir, self._trace = run_dir, trace
        self._next = 0.0

    def refresh(self) -> None:
        """Write the last steps of this rank, unless that was done a moment ago."""
        if time.monotonic() >= self._next:
            self.write()

    def write(self) -> None:
        """Write the last steps of this rank."""
        start = time.monotonic()
        with suppress(OSError):
            write_rank_trace(self._run_dir, self._trace.rank, self._trace.events)
        end = time.monotonic()
        self._next = end + max(_SECONDS, _REST * (end - start))

    def merge(self) -> None:
        """Write `trace.json` from what all ranks have written, on one of them."""
        with suppress(OSError):
            merge_rank_traces(self._run_dir)
