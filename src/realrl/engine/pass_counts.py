"""Counts of the work that one rank does in a call."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from realrl.model.packing import Packing

_Span = tuple[torch.cuda.Event, torch.cuda.Event]
"""CUDA events at the start and the end of a prefill."""


class PassCounts:
    """Counter of the micro-batches and decode steps that one rank executes in a call.

    All counts are known on the host, so counting never waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        # Tests trace the GPU path on fake devices, which have no events.
        self._by_events = device.type == "cuda" and torch.cuda.is_available()
        self.reset()

    def reset(self) -> None:
        self.micro_batches = 0
        """Forward passes of packed sequences."""
        self.tokens = 0
        """Tokens in these passes, without padding. A common beginning of sequences counts once."""
        self.spared = 0
        """Tokens that sequences have in addition, because they share common beginnings."""
        self.squares = 0
        """Sum of the squared sequence lengths. The square of a common beginning counts once."""
        self.padded_tokens = 0
        """Tokens including the padding of attention; 0 if attention does not pad."""
        self.decode_steps = 0
        """Forward passes over one token of each row of a decode batch."""
        self.decode_rows = 0
        """Rows of these passes, finished rows included."""
        self._host_seconds = 0.0
        self._prefills: list[_Span] = []

    def add_micro_batch(self, packing: Packing) -> None:
        self.micro_batches += 1
        spans = packing.spans if packing.shared is None else packing.shared.spans
        tokens = sum(spans.queries)
        self.tokens += tokens
        self.spared += sum(packing.lengths) - tokens
        self.squares += sum(
            keys**2 - (keys - queries) ** 2 for queries, keys in zip(spans.queries, spans.keys, strict=True)
        )
        self.padded_tokens += packing.spans.padded_tokens

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
