"""Handle Ctrl-C, the SIGTERM that schedulers and containers send, and terminals that close."""

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from realrl.runtime.processes.environment import is_writer, under_launcher

SIGNALS = (signal.SIGINT, signal.SIGTERM)

PATIENCE = 10.0
"""Seconds that a process may take to end by itself. It may be in native code, or wait for a rank that is gone."""

ECHO = 2.0
"""Seconds after SIGTERM in which a second SIGTERM counts as the same request. Under torchrun, so does a second
SIGINT.

Slurm sends SIGTERM to every process of a job, including torchrun, which passes it on. Ctrl-C reaches all processes
of the terminal, and torchrun passes it on as well.
"""
SAVING = (
    "note: interrupted; the run ends with a checkpoint after this step, and at once after another Ctrl-C\n"
)
"""Note that a run prints when Ctrl-C has asked it to end."""

_interruption: "Interrupted | None" = None
"""The exception that a signal handler has raised in this process."""


@dataclass
class _Deferral:
    """State of a process in which signals do not take effect at once."""

    grace: float | None = None
    """Seconds that the process may take to end; None if signals interrupt it at once."""
    requested: int = 0
    """Number of the first signal that has arrived; 0 if none has."""
    handled: bool = False
    """Whether `raise_signals` was called."""


_deferral = _Deferral()


class Interrupted(BaseException):
    """Raised when a signal requests that the process ends.

    This is not a KeyboardInterrupt, because the command line's library handles KeyboardInterrupt itself. `saved`
    describes the saved files.
    """

    def __init__(self, number: int, saved: str = "") -> None:
        super().__init__(number, saved)
        self.number = signal.Signals(number)
        self.saved = saved

    @property
    def status(self) -> int:
        """Exit status as in a shell: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + self.number

    @property
    def message(self) -> str:
        """Message to print. It is empty if nothing is known about saved files."""
        verb = "interrupted" if self.number == signal.SIGINT else "ended by SIGTERM"
        return f"{verb} {self.saved}" if self.saved else ""


def handles_signals() -> bool:
    """Return whether this process is a command that has called `raise_signals`, and not a notebook or a test."""
    return _deferral.handled


def find_interruption() -> Interrupted | None:
    """Return the exception that a signal has raised in this process, if any.

    The caller may see another exception, because libraries may replace this one.
    """
    return _interruption


def forget_interruption() -> None:
    """Forget the signal that has ended a run. The process itself continues, as a notebook does."""
    global _interruption
    _interruption, _deferral.requested = None, 0


@contextmanager
def deferred_termination(grace: float, note: str = "") -> Iterator[None]:
    """Within the block, SIGTERM and Ctrl-C only set a flag, which `stop_requested` returns.

    If `raise_signals` was called, the next signal ends the process at once. Without another signal, the process has
    `grace` + PATIENCE seconds to end. With a grace of 0, nothing is deferred. `note` is printed after the first
    Ctrl-C.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    heeded = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    if not grace or threading.current_thread() is not threading.main_thread():
        yield
        return

    def request(number: int, frame: FrameType | None) -> None:
        if not _deferral.requested and number == signal.SIGINT and note and is_writer():
            with suppress(OSError):  # if the reader is gone
                os.write(2, b"\n" * os.isatty(2) + note.encode())
        _deferral.requested = _deferral.requested or number

    before_grace, _deferral.grace = _deferral.grace, grace
    for number in heeded:
        signal.signal(number, request)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])
        _deferral.grace = before_grace


def stop_requested() -> bool:
    """Return whether a signal has asked this process to save and end. To end, call `end_by_signal`."""
    return bool(_deferral.requested)


def end_by_signal() -> NoReturn:
    """Raise Interrupted for the signal that this process has received.

    If only another rank has received a signal, the exception is that of SIGTERM.
    """
    global _interruption
    if _interruption is None:
        _interruption = Interrupted(_deferral.requested or signal.SIGTERM)
    raise _interruption


def raise_signals() -> None:
    """From now on, raise Interrupted in the main thread at the first signal. SIGHUP counts as SIGTERM.

    The next signal, or a timeout of PATIENCE seconds, ends the process at once.

    A signal that this process inherits as ignored stays ignored, as in a shell's background job.
    """
    _deferral.handled = True
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # Python's handlers run only between Python instructions, but this pipe receives a signal at once.
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def interrupt(number: int, _: FrameType | None) -> None:
        global _interruption
        if _interruption is None:
            _interruption = Interrupted(number)
            raise _interruption

    sys.unraisablehook = _pass_over_interruption
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup` ignores it
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    threading.Thread(target=_end_at_last, args=(reader,), daemon=True).start()
    # Without this, a forked child would write into the same pipe.
    os.register_at_fork(after_in_child=forget_signals)


def forget_signals() -> None:
    """Restore the default handling of signals."""
    signal.set_wakeup_fd(-1)
    for number in (*SIGNALS, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def show_cursor() -> None:
    """Restore the cursor of the terminal, on a new line, after a process with a progress bar was killed."""
    if os.isatty(2):
        os.write(2, b"\x1b[?25h\n")


def _end_at_last(reader: int) -> None:
    first = _await_signal(reader, None)
    grace = _deferral.grace
    echoes = grace is not None and (first == signal.SIGTERM or under_launcher())
    if not echoes or not _await_signal(reader, ECHO, but=first):
        _await_signal(reader, PATIENCE + (grace or 0.0))
    show_cursor()
    if is_writer():
        message = (
            f"realrl: ended at once by {signal.Signals(first).name}, before it could say what was saved\n"
        )
        os.write(2, message.encode())
    os._exit(128 + first)


def _await_signal(reader: int, seconds: float | None, but: int = 0) -> int:
    """Wait for the next signal other than `but`. Returns its number, or 0 if none has come in `seconds`."""
    while select.select([reader], [], [], seconds)[0]:
        number = os.read(reader, 1)[0]
        if number in SIGNALS and number != but:
            return number
    return 0


def _pass_over_interruption(unraisable: "sys.UnraisableHookArgs") -> None:
    """Suppress the traceback if a signal interrupts a destructor. `find_interruption` still finds the exception."""
    if not isinstance(unraisable.exc_value, Interrupted):
        sys.__unraisablehook__(unraisable)
