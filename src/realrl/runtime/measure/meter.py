"""When one rank executed what, and how much device memory that took."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from realrl.planner.calibration.comparison import waiting_for
from realrl.program.instructions import Instruction, Load, Offload, Reallocate, Run
from realrl.program.text import format_instruction
from realrl.runtime.measure.allocations import Allocations, allocations
from realrl.runtime.processes.process import Process

_ROUNDS = 10
"""Of messages, by which clocks of several nodes are compared."""


@dataclass(frozen=True)
class Span:
    """One call or reallocation on one rank, or what it waited for a function. Times are seconds of its monotonic
    clock."""

    name: str
    """The call, or the reallocation in its text form; of waiting, `waiting_for` the call."""
    start: float
    end: float
    bytes: int | None = None
    """Most that tensors took during the call and while parameters were moved before it."""
    alone: bool = False
    """Whether the rank did not wait for others to begin, as with a function."""


@dataclass(frozen=True)
class StepTimes:
    """One step on one rank."""

    start: float
    end: float
    spans: tuple[Span, ...]


def wait_for(device: torch.device) -> None:
    """Let the host wait for what it has handed a GPU, so that an instruction ends when its work has ended.

    Costs some tens of microseconds, since the device has nothing to do until the host hands it more; nearly all
    calls read their figures back at their end anyway.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class Meter:
    """Measures the steps of one rank.

    Peak memory: on a GPU in each step, by torch's allocator; on a CPU in the first step only, whose times do not
    count, by `allocations` in addition to the buffers of roles.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        held: Callable[[], int],
        staged: Callable[[], int],
    ) -> None:
        """held: bytes of the buffers of roles now. staged: bytes of message buffers, which no plan counts."""
        self._device, self._held, self._staged = device, held, staged
        self._cuda = device.type == "cuda"
        self._spans: list[Span] = []
        self._steps: list[StepTimes] = []
        self._begun = 0
        self._moving = 0
        self._counting: Allocations | None = None
        self.reserved = 0
        """Most bytes that torch's allocator held on a GPU."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """A block that is one step."""
        self._spans, self._moving, self._begun = [], 0, self._begun + 1
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        start = time.monotonic()
        yield
        wait_for(self._device)
        self._steps.append(StepTimes(start, time.monotonic(), tuple(self._spans)))

    def take(self) -> list[StepTimes]:
        """The steps since the last time."""
        steps, self._steps = self._steps, []
        return steps

    @contextmanager
    def instruction(self, instruction: Instruction) -> Iterator[None]:
        """A block that is one instruction of the step."""
        start = time.monotonic()
        if isinstance(instruction, Run):
            assert instruction.role is not None, "functions measure themselves"
            counting = None if self._cuda or self._begun > 1 else allocations()
            with counting or nullcontext() as self._counting:
                yield
                wait_for(self._device)
                end = time.monotonic()
            self._spans.append(Span(instruction.call, start, end, self._peak(self._counting)))
            self._counting = None
        elif isinstance(instruction, Reallocate):
            yield
            wait_for(self._device)
            self._spans.append(Span(format_instruction(instruction), start, time.monotonic()))
            self._moving = max(self._moving, self._held())
        else:
            yield
            if isinstance(instruction, Load | Offload):
                wait_for(self._device)
                self._moving = max(self._moving, self._held())

    def function(self, call: str, start: float, end: float, *, waited: tuple[float, float]) -> None:
        """A function has run beside other instructions; then the rank has waited for it from and until."""
        self._spans.append(Span(call, start, end, alone=True))
        self._spans.append(Span(waiting_for(call), *waited, alone=True))

    def turn(self) -> None:
        """A token has been generated, or a micro-batch has gone through the model one way. Each makes some 140
        allocations per layer; those of a whole call would take too much memory until its end."""
        if self._counting is not None:
            self._counting.fold()

    def _peak(self, found: Allocations | None) -> int | None:
        """Since the call before. What is moved after the last call counts to none."""
        moving, self._moving = self._moving, 0
        if self._cuda:
            peak = torch.cuda.max_memory_allocated(self._device) - self._staged()
            self.reserved = max(self.reserved, torch.cuda.max_memory_reserved(self._device))
            torch.cuda.reset_peak_memory_stats(self._device)
            return peak
        return None if found is None else max(moving, self._held() + found.peak)


def clock_offsets(process: Process, nodes: int) -> list[float]:
    """By rank, how many seconds its monotonic clock is ahead of that of rank 0. All ranks call this together.

    On one node 0, since its processes share a clock. Else as near as messages travel fast: nobody leaves an
    exchange of messages before everybody has come.
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
    return [offset(came[0], went[0], *theirs) for theirs in zip(came, went, strict=True)]


def offset(
    came: Sequence[float], went: Sequence[float], their_came: Sequence[float], their_went: Sequence[float]
) -> float:
    """How far another clock is ahead, from when either side came to several exchanges and when it left them."""
    least = max(b - a for b, a in zip(their_came, went, strict=True))
    most = min(b - a for b, a in zip(their_went, came, strict=True))
    return (least + most) / 2
