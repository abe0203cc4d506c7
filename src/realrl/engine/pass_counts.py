"""Counts of the work of a call."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from realrl.engine.micro_batches import MicroBatch

_Span = tuple[torch.cuda.Event, torch.cuda.Event]
"""CUDA events at the start and the end of a prefill."""


class PassCounts:
    """Counter of the micro-batches of a rank and its context-parallel peers in a call, or of its decode steps.

    All counts are known on the host, so counting never waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        # Tests trace the GPU path on fake devices, which have no events.
        self._by_events = device.type == "cuda" and torch.cuda.is_available()
        self.reset()

    def reset(self) -> None:
        self.micro_batches = 0.0
        """Micro-batches. One that only some context-parallel ranks divide counts in proportion."""
        self.tokens = 0
        """Tokens in them, without padding. A common beginning of sequences counts once."""
        self.spared = 0
        """Tokens that sequences have in addition, because they share common beginnings."""
        self.squares = 0
        """Sum of the squared sequence lengths. The square of a common beginning counts once."""
        self.padded_tokens = 0
        """Tokens including the padding of attention; 0 if attention does not pad, or if several
        context-parallel ranks share the work."""
        self.decode_steps = 0
        """Forward passes over one token of each row of a decode batch."""
        self.decode_rows = 0
        """Rows of these passes, finished rows included."""
        self._host_seconds = 0.0
        self._prefills: list[_Span] = []

    def add_micro_batches(self, found: Sequence[MicroBatch], ranks: int) -> None:
        """Count the micro-batches of `ranks` context-parallel ranks, each of which counts the work of all."""
        for micro_batch in found:
            self.micro_batches += len(micro_batch.ranks) / ranks
            self.tokens += micro_batch.tokens
            self.spared += micro_batch.spared
            self.squares += micro_batch.squares

    def add_decode_step(self, rows: int) -> None:
        self.decode_steps += 1
        self.decode_rows += rows

    @contextmanager
    def prefill(self) -> Iterator[None]:
        """Measure the time of the prefill that runs inside this context. On a GPU, events in its stream measure it,
        without waiting."""
        if self._by_events:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            yield
            events[1].record()
            self._prefills.append(events)
        else:
            start = time.monotonic()
            yield
            self._host_seconds += time.monotonic() - start

    @property
    def prefill_seconds(self) -> float:
        """Total seconds of all prefills. On a GPU, the value is valid only after the stream has finished them."""
        return self._host_seconds + sum(start.elapsed_time(end) / 1000 for start, end in self._prefills)
