"""Timer of the steps of one rank: times of each instruction, and its peak memory."""

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
    """Allocations of a block of code."""

    def __init__(self) -> None:
        self.peak = 0
        """Peak bytes of live tensors that the block has allocated, up to the last `fold`."""
        self._alive: dict[int, int] = {}
        self._addresses: list[int] = []
        """Addresses of live allocations, sorted."""
        self._now = 0

    def fold(self) -> None:
        """Count the allocations so far, and discard their events."""
        self._finish()
        self._start()

    def _start(self) -> None:
        # The profiler records allocations in any scope, but operators only in this scope, which never occurs.
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
        """Count an allocation of `size` bytes at an address; a negative size is a release."""
        if size <= 0:
            # The release of an older allocation does not count.
            if address in self._alive:
                self._drop(bisect_left(self._addresses, address))
            return
        # If an address is used again, another thread (of a collective) has released it.
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
    """Count exactly this thread's allocations for tensors in the block. No other profiler may be active.

    Memory that another thread releases after a collective counts until its address is used again. An allocation is
    not slowed down; each takes 2 kB until the block ends or folds, and 4 µs then. torch itself counts on GPUs only,
    and a process's resident memory may include freed memory.
    """
    found = Allocations()
    found._start()
    try:
        yield found
    finally:
        found._finish()


_ROUNDS = 10
"""Number of message exchanges that compare the clocks of nodes."""


@dataclass(frozen=True)
class TimedSpan:
    """One call or reallocation on one rank, or its wait for a function. Seconds of its monotonic clock."""

    name: str
    """Name of the call, text of the reallocation, or `waiting_for` the function."""
    start: float
    end: float
    bytes: int | None = None
    """Peak bytes of tensors during the call and the moves before it."""
    alone: bool = False
    """Whether ranks run it independently, like a function."""
    work: WorkDone | None = None
    """Work of the rank in a model's call; None if it is unknown, and for everything else."""


@dataclass(frozen=True)
class StepTimes:
    """Times of one step on one rank."""

    start: float
    end: float
    spans: tuple[TimedSpan, ...]
    copying: float = 0.0
    """Seconds of copies between device and host memory, outside calls."""
    tokens: int | None = None
    """Tokens of all prompts and answers of the step; set on one rank."""


def wait_for(device: torch.device) -> None:
    """Synchronize the host with a GPU, so that an instruction ends with its work.

    This costs some tens of microseconds, while the device waits for new work. Nearly all calls read their metrics
    back at their end anyway.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class StepTimer:
    """Measures time and memory of the steps of one rank.

    Peak memory comes from torch's allocator on a GPU, in every step. On a CPU, `count_allocations` plus the buffers
    of roles measure it in the first step only, whose times do not count.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        held: Callable[[], int],
        staged: Callable[[], int],
        kept_beside: Callable[[str], int] = lambda _: 0,
    ) -> None:
        """held: current bytes of the buffers of roles. No plan counts staged bytes (in message buffers), or the
        bytes that other calls keep beside a call."""
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
        """Peak bytes that torch's allocator reserved on a GPU."""

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
        """Remove and return the steps since the last call."""
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
        """Register the work of the current call; it is read after the device has finished."""
        self._read_work = read_work

    def function(self, call: str, start: float, end: float, *, waited: tuple[float, float]) -> None:
        """Register a function that ran beside other instructions, and the interval in which the rank waited."""
        self._spans.append(TimedSpan(call, start, end, alone=True))
        self._spans.append(TimedSpan(waiting_for(call), *waited, alone=True))

    def fold_allocations(self) -> None:
        """Fold the allocations of a decode step, or of a micro-batch's pass in one direction, into their peak.

        A pass makes about 140 allocations per layer; the events of a whole call would take too much memory.
        """
        if self._allocations is not None:
            self._allocations.fold()

    def _peak(self, found: Allocations | None, call: str) -> int | None:
        """Find the peak since the previous call. Moves after the last call do not count."""
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
    """Measure the seconds by which each rank's monotonic clock is ahead of rank 0's. All ranks call this together.

    The processes of one node share a clock, so the result is 0. Between nodes, the precision is the latency of
    messages: no rank leaves an exchange before all ranks have entered it.
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
    """Estimate how far another clock is ahead, from the times of arrival and departure at both ends."""
    least = max(b - a for b, a in zip(their_came, went, strict=True))
    most = min(b - a for b, a in zip(their_went, came, strict=True))
    return (least + most) / 2
