"""Process in which expressions are compared, as seen by the one that asks it. No torch.

Reading an expression, and comparing two, may take for ever. math-verify bounds both by alarm signals, which reach
only the main thread of a process, and a run calls its functions in other threads.
"""

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

PROGRAM = Path(__file__).with_name("math_child.py")
_START_SECONDS = 120.0
"""Bound on importing the library, also from a slow file system."""
_GRACE = 20.0
"""Seconds beyond the bounds of the library."""


class MathProcessError(Exception):
    """A process that does not work. The message follows the name of the verifier."""

    def __init__(self, message: str, words: str = "") -> None:
        """`words`: what the process wrote to its standard error."""
        last = words.strip().rpartition("\n")[2]
        super().__init__(f"{message}{last and ': '}{last}")
        self.words = words


class MathProcess:
    """Process that compares expressions, started at the first one, and again after it has ended."""

    def __init__(self, seconds: float) -> None:
        """`seconds` bounds reading each expression, and comparing two."""
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self.library = ""
        """The file of math-verify that the process has imported."""

    def ask(self, *, text: str, right: str, extracted: bool) -> bool | None:
        """Tell whether two expressions are equal, False if that takes too long; None if `right` is none.

        extracted: whether `text` is an expression alone, and not prose with an expression.
        MathProcessError if the process ends instead of answering, twice in a row.
        """
        question = {"text": text, "right": right, "extracted": extracted, "seconds": self._seconds}
        sent = json.dumps(question).encode() + b"\n"
        # Somebody may have killed the first one between two questions; the second one ends due to this question.
        for last in (False, True):
            process = self._process or self._start()
            try:
                line = _exchange(process, sent, 4 * self._seconds + _GRACE)
            except EOFError:
                if last:
                    raise MathProcessError("lost its process", self._read_end()) from None
                self.close()
                continue
            if line is None:  # the library could not stop it
                self.close()
                return False
            equal: bool | None = json.loads(line)
            return equal
        raise AssertionError("the loop returns or raises")

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the process, and wait until it is ready; MathProcessError if it is not."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the process
        self._process = subprocess.Popen(
            # -P: modules beside the program, such as math.py, are not those of the standard library.
            [sys.executable, "-P", str(PROGRAM)],
            env=_leave_out_working_directory(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        try:
            ready = _exchange(self._process, b"", _START_SECONDS)
        except EOFError:
            raise MathProcessError("cannot start its process", self._read_end()) from None
        if ready is None:
            self.close()
            raise MathProcessError(f"cannot start its process: not ready within {_START_SECONDS:g} s")
        self.library = json.loads(ready)
        return self._process

    def _read_end(self) -> str:
        """Read what the process wrote before it ended, and how it did; forget it."""
        assert self._process is not None and self._errors is not None
        self._process.communicate()
        code, self._process = self._process.returncode, None
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace")
        return (
            words if words.strip() else f"it ended with {f'signal {-code}' if code < 0 else f'status {code}'}"
        )


def _leave_out_working_directory(environment: Mapping[str, str]) -> dict[str, str]:
    """Copy an environment in which Python imports nothing from the working directory, such as a user's sympy.py."""
    here = os.path.realpath(os.curdir)
    listed = environment.get("PYTHONPATH", "").split(os.pathsep)
    kept = [os.path.abspath(entry) for entry in listed if entry and os.path.realpath(entry) != here]
    return {**environment, "PYTHONPATH": os.pathsep.join(kept)}


def _exchange(process: subprocess.Popen[bytes], question: bytes, seconds: float) -> bytes | None:
    """Send a line, and wait for one; None if there is none in time. EOFError if the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    deadline, received = time.monotonic() + seconds, b""
    try:
        process.stdin.write(question)
        process.stdin.flush()
    except OSError:
        raise EOFError from None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not received.endswith(b"\n"):
            if not selector.select(max(deadline - time.monotonic(), 0)):
                return None
            part = os.read(process.stdout.fileno(), 4096)
            if not part:
                raise EOFError
            received += part
    return received
