"""Activity of a rank: told by the code that does something, read by the threads of its monitor. No torch."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from realrl.runtime.monitor.rank_status import Doing
from realrl.runtime.monitor.sign import Board, Sign, shorten_instruction


@dataclass(frozen=True)
class _Now:
    """Activity of the main thread at one moment: replaced as a whole, so that other threads need no lock."""

    doing: Doing
    instruction: str | None
    call: str | None
    order: int
    position: int
    since: float
    """By the monotonic clock."""


class Activity:
    """Activity of a rank at this moment.

    The main thread and those of functions write, others read; every write is one assignment.
    """

    def __init__(self, rank: int = 0, board: Board | None = None) -> None:
        self.rank, self.host, self.pid = rank, socket.gethostname(), os.getpid()
        self._machine = f"{self.host} {_pid_namespace()}"
        self.step = 0
        """Number of training steps done."""
        self.steps: int | None = None
        """Number of training steps of the run."""
        self.checkpoint: str | None = None
        """Last complete checkpoint, relative to the run's directory."""
        self.phase: str | None = None
        """Part of what is being done, such as a phase of saving."""
        self._board = board
        self._now = _Now("start", None, None, 0, 0, time.monotonic())
        self._progress = 0
        self._beats = 0
        self._finished = 0
        self._functions: dict[str, float] = {}

    def enter(self, doing: Doing) -> None:
        """Begin another part of the run."""
        self._progress += 1
        self._set(_Now(doing, None, None, 0, 0, time.monotonic()))

    @contextmanager
    def part(self, doing: Doing) -> Iterator[None]:
        """Be in another part of the run for a block."""
        before = self._now.doing
        self.enter(doing)
        yield
        self.enter(before)

    def begin(self, instruction: str, call: str | None, order: int, position: int) -> None:
        """Begin an instruction, the one at `position` of its program, of the call at `order` in the graph."""
        self._set(
            _Now(self._now.doing, shorten_instruction(instruction), call, order, position, time.monotonic())
        )

    def advance(self) -> None:
        """Note that something was done: an instruction, a token, a micro-batch, a file."""
        self._progress += 1

    def done(self, step: int) -> None:
        """Note that so many training steps are done."""
        self.step = step
        self._finished += 1
        self.advance()

    @contextmanager
    def function(self, reference: str) -> Iterator[None]:
        """Run code of the user's in a block."""
        self._functions[reference] = time.monotonic()
        try:
            yield
        finally:
            self._functions.pop(reference, None)
            self.advance()

    @property
    def doing(self) -> Doing:
        """Part of the run."""
        return self._now.doing

    @property
    def place(self) -> str:
        """Place in the run, as part of a message."""
        return self.sign().place

    def beat(self) -> Sign:
        """Count a sign of life, and give it."""
        self._beats += 1
        return self.sign()

    def sign(self) -> Sign:
        """Describe the activity now."""
        now = self._now
        functions = self._functions.copy()
        oldest = min(functions, key=functions.__getitem__) if functions else None
        times = os.times()
        return Sign(
            rank=self.rank,
            machine=self._machine,
            pid=self.pid,
            beats=self._beats,
            progress=self._progress,
            cpu_seconds=times.user + times.system,
            step=self.step,
            finished=self._finished,
            doing=now.doing,
            order=now.order,
            position=now.position,
            instruction=now.instruction,
            call=now.call,
            function=oldest,
            function_seconds=0.0 if oldest is None else time.monotonic() - functions[oldest],
            waited=time.monotonic() - now.since,
        )

    def _set(self, now: _Now) -> None:
        self._now = now
        if self._board is not None:
            self._board.note(self.sign())


def _pid_namespace() -> str:
    """Identify the processes that this one can see by their numbers: those of a container, for example."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
