"""Clock of a device."""

import time
from itertools import pairwise

import torch

Moment = float | torch.cuda.Event
"""Point in time: on a GPU, when the device gets there, not when the host has launched the work."""


class Clock:
    """Moments on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> Moment:
        """Record the present moment."""
        if self.device.type != "cuda":
            return time.perf_counter()
        # Captured in a graph, an event is recorded at every replay.
        event = torch.cuda.Event(enable_timing=True, external=torch.cuda.is_current_stream_capturing())
        event.record()
        return event

    def between(self, *moments: Moment) -> list[float]:
        """Compute the seconds from each moment to the next."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return [_seconds(a, b) for a, b in pairwise(moments)]


def _seconds(begin: Moment, end: Moment) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        assert isinstance(begin, float) and isinstance(end, float), "moments are of one clock"
        return end - begin
    return begin.elapsed_time(end) / 1000
