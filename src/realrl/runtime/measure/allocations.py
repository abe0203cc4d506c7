"""Host memory that tensors take while a block of code runs."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._C._profiler import (
    ProfilerActivity,
    ProfilerConfig,
    ProfilerState,
    RecordScope,
    _ExperimentalConfig,
    _ExtraFields_Allocation,
)


class Allocations:
    """Allocations of a block of code."""

    def __init__(self) -> None:
        self.peak = 0
        """Maximum bytes of tensors, allocated in the block, that were alive at a time, up to the last `fold`."""
        self._alive: dict[int, int] = {}
        self._addresses: list[int] = []
        """Addresses of live allocations, sorted."""
        self._now = 0

    def fold(self) -> None:
        """Count what was allocated so far, and forget the events."""
        self._finish()
        self._start()

    def _start(self) -> None:
        # The profiler records allocations in any scope, and operators only in this one, which never occurs.
        config = ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig())
        torch.autograd._prepare_profiler(config, {ProfilerActivity.CPU})
        never = {RecordScope.LITE_INTERPRETER}
        torch.autograd._enable_profiler(config, {ProfilerActivity.CPU}, never)  # type: ignore[call-arg]

    def _finish(self) -> None:
        for event in torch.autograd._disable_profiler().experimental_event_tree():
            about = event.extra_fields
            assert isinstance(about, _ExtraFields_Allocation), "nothing else is asked for"
            self.count(about.ptr, about.alloc_size)

    def count(self, address: int, size: int) -> None:
        """Count an allocation of `size` bytes at an address, or its release where `size` is negative."""
        if size <= 0:
            # What was there before the block does not count when it goes.
            if address in self._alive:
                self._drop(bisect_left(self._addresses, address))
            return
        # Where memory is given out a second time, another thread, of a collective, has given it back.
        last = bisect_left(self._addresses, address + size) - 1
        while last >= 0 and self._addresses[last] + self._alive[self._addresses[last]] > address:
            self._drop(last)
            last -= 1
        self._alive[address] = size
        insort(self._addresses, address)
        self._now += size
        self.peak = max(self.peak, self._now)

    def _drop(self, number: int) -> None:
        self._now -= self._alive.pop(self._addresses.pop(number))


@contextmanager
def count_allocations() -> Iterator[Allocations]:
    """Count, exactly, what this thread allocates for tensors inside the block. No other profiler may be at work.

    What another thread gives back, after a collective, counts until any of its place is given out again.
    Allocations take as long as ever; each costs 4 µs, and until then 2 kB, when the block ends or folds. torch
    itself counts for GPUs only, and a process's resident memory says too much: what was freed may stay in it.
    """
    found = Allocations()
    found._start()
    try:
        yield found
    finally:
        found._finish()
