"""Measure the steps of one rank: the time and peak memory of each instruction."""

import math
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch._C._profiler import (
    ProfilerActivity,
    ProfilerConfig,
    ProfilerState,
    RecordScope,
    _ExperimentalConfig,
    _ExtraFields_Allocation,
)

from realrl.planner.report.comparison import waiting_for
from realrl.program.instructions import Instruction, Load, Offload, Reallocate, Run
from realrl.program.text import format_instruction
from realrl.runtime.measure.work_done import WorkDone
from realrl.runtime.processes.process import Process


class Allocations:
    """The memory allocations of a block of code."""

    def __init__(self) -> None:
        self.peak = 0
        """Peak bytes of the block's live allocations, up to the last `fold`."""
        self._alive: dict[int, int] = {}
        self._addresses: list[int] = []
        """Sorted addresses of live allocations."""
        self._now = 0

    def fold(self) -> None:
        """Count the allocations so far, and discard their events."""
        self._finish()
        self._start()

    def _start(self) -> None:
        # The profiler records allocations in every scope. It would record operators only in this scope, which never
        # occurs.
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
        """Count an allocation of `size` bytes at an address. A size of 0 or less means a release."""
        if size <= 0:
            # Ignore the release of memory that was allocated before the block.
            if address in self._alive:
                self._drop(bisect_left(self._addresses, address))
            return
        # If an address is used again, another thread (of a collective) has released it in the meantime.
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
    """Count all tensor allocations of this thread in the block. No other profiler may be active.

    Memory that another thread releases after a collective counts until its address is used again. Allocations are
    not slowed down. Each allocation leaves a record of 2 kB until the block ends or calls `fold`. To process the
    record then takes 4 µs.

    No simpler measurement exists on a CPU: torch itself counts only on GPUs, and the resident memory of a process
    may include freed memory.
    """
    found = Allocations()
    found._start()
    try:
        yield found
    finally:
        found._finish()


_ROUNDS = 10
"""Number of message exchanges in a comparison of the clocks of nodes."""


@dataclass(frozen=True)
class TimedSpan:
    """One call or reallocation on one rank, or its wait for a function.

    Times are seconds of the rank's monotonic clock.
    """

    name: str
    """Name of the call, text of the reallocation, or the result of `waiting_for(function)`."""
    start: float
    end: float
    bytes: int | None = None
    """Peak bytes of tensors during the call, and during the reallocations and copies before it."""
    alone: bool = False
    """Whether each rank runs this independently of other ranks. This holds for functions, and for waits."""
    work: WorkDone | None = None
    """Work of the rank in the call of a model. None if it is unknown, and for all other spans."""


@dataclass(frozen=True)
class StepTimes:
    """Times of one step on one rank."""

    start: float
    end: float
    spans: tuple[TimedSpan, ...]
    copying: float = 0.0
    """Seconds spent on copies between device and host memory, outside calls."""
    tokens: int | None = None
    """Number of tokens of all prompts and answers of the step. Only one rank sets it."""


def wait_for(device: torch.device) -> None:
    """Synchronize the host with a GPU, so that an instruction ends when its work on the GPU ends.

    This costs tens of microseconds, in which the device waits for new work. Nearly all calls wait at their end
    anyway, to read their metrics.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class StepTimer:
    """Measures time and memory of the steps of one rank.

    On a GPU, torch's allocator measures the peak memory of every step. On a CPU, the
    peak is the sum of `count_allocations` and the buffers of roles. It is measured only in the first step, whose
    times do not count.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        held: Callable[[], int],
        staged: Callable[[], int],
        kept_beside: Callable[[str], int] = lambda _: 0,
    ) -> None:
        """`held` returns the current bytes of parameters, gradients and optimizers.

        `staged` returns the bytes in message buffers. `kept_beside` takes the name of a call, and returns the bytes
        that other calls keep meanwhile. Neither counts towards the peak, because plans do not predict them.
        """
        self._device = device
        self._held = held
        self._staged = staged
        self._kept_beside = kept_beside
        self._cuda = device.type == "cuda"
        self._spans: list[TimedSpan] = []
        self._steps: list[StepTimes] = []
        self._begun = 0
        self._moving_peak = 0
        self._copying = 0.0
        self._read_work: Callable[[], WorkDone] | None = None
        self._allocations: Allocations | None = None
        self.reserved = 0
        """Peak bytes that torch's allocator has reserved on a GPU."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure the block as one step."""
        self._spans = []
        self._moving_peak = 0
        self._copying = 0.0
        self._begun += 1
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        start = time.monotonic()
        yield
        wait_for(self._device)
        self._steps.append(StepTimes(start, time.monotonic(), tuple(self._spans), copying=self._copying))

    def take(self) -> list[StepTimes]:
        """Return the steps since the last call of this method, and forget them."""
        steps = self._steps
        self._steps = []
        return steps

    @contextmanager
    def instruction(self, instruction: Instruction) -> Iterator[None]:
        """Measure the block as one instruction of the step."""
        start = time.monotonic()
        if isinstance(instruction, Run):
            assert instruction.role is not None, "functions measure themselves"
            counting = None if self._cuda or self._begun > 1 else count_allocations()
            with counting or nullcontext() as self._allocations:
                yield
                wait_for(self._device)
                end = time.monotonic()
            peak, self._allocations = self._peak(self._allocations, instruction.call), None
            read_work, self._read_work = self._read_work, None
            work = None if read_work is None else read_work()
            self._spans.append(TimedSpan(instruction.call, start, end, peak, work=work))
        elif isinstance(instruction, Reallocate):
            yield
            wait_for(self._device)
            self._spans.append(TimedSpan(format_instruction(instruction), start, time.monotonic()))
            self._moving_peak = max(self._moving_peak, self._held())
        else:
            yield
            if isinstance(instruction, Load | Offload):
                wait_for(self._device)
                self._copying += time.monotonic() - start
                self._moving_peak = max(self._moving_peak, self._held())

    def worked(self, read_work: Callable[[], WorkDone]) -> None:
        """Register the work of the current call. `read_work` returns this work once the device has finished."""
        self._read_work = read_work

    def function(self, call: str, start: float, end: float, *, waited: tuple[float, float]) -> None:
        """Register a function that ran at the same time as other instructions.

        `waited`: start and end of the time for which the rank waited for the function.
        """
        self._spans.append(TimedSpan(call, start, end, alone=True))
        self._spans.append(TimedSpan(waiting_for(call), *waited, alone=True))

    def fold_allocations(self) -> None:
        """Add the allocations of a decode step, or of a micro-batch's forward or backward pass, to the peak.

        A pass makes about 140 allocations per layer, so keeping the events of a whole call would take too much
        memory.
        """
        if self._allocations is not None:
            self._allocations.fold()

    def _peak(self, found: Allocations | None, call: str) -> int | None:
        """Return the peak bytes since the previous call.

        Reallocations and copies after the last call of a step do not count.
        """
        moving = self._moving_peak
        self._moving_peak = 0
        if self._cuda:
            apart = self._staged() + self._kept_beside(call)
            peak = torch.cuda.max_memory_allocated(self._device) - apart
            self.reserved = max(self.reserved, torch.cuda.max_memory_reserved(self._device))
            torch.cuda.reset_peak_memory_stats(self._device)
            return peak
        return None if found is None else max(moving, self._held() + found.peak)


def measure_clock_offsets(process: Process, nodes: int) -> list[float]:
    """Measure by how many seconds each rank's monotonic clock is ahead of rank 0's. All ranks call this together.

    With one node, all results are 0, because its processes share a clock. Between nodes, the precision is the
    latency of messages, because no rank leaves an exchange before all ranks have entered it.
    """
    if nodes == 1:
        return [0.0] * process.world
    left = math.inf
    marks = []
    for _ in range(_ROUNDS + 1):
        marks.append(process.gather((left, time.monotonic())))
        left = time.monotonic()
    came = [[mark[rank][1] for mark in marks[:-1]] for rank in range(process.world)]
    went = [[mark[rank][0] for mark in marks[1:]] for rank in range(process.world)]
    return [estimate_offset(came[0], went[0], *theirs) for theirs in zip(came, went, strict=True)]


def estimate_offset(
    came: Sequence[float], went: Sequence[float], their_came: Sequence[float], their_went: Sequence[float]
) -> float:
    """Estimate how many seconds another rank's clock is ahead of this rank's clock.

    `came` and `went`: times at which this rank entered and left each exchange, on its own clock. `their_came` and
    `their_went`: the times of the other rank, on the other clock.
    """
    least = max(b - a for b, a in zip(their_came, went, strict=True))
    most = min(b - a for b, a in zip(their_went, came, strict=True))
    return (least + most) / 2
