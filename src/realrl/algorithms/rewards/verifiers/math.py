"""Verifier of mathematical equality, which runs the library math-verify in a separate process.

Reading an expression, and comparing two expressions, may never end. math-verify limits the time by alarm signals,
so it only works in the main thread of a process. A run calls its rewards in other threads. This module does not
import torch.
"""

import json
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import PositiveFloat

from realrl.algorithms.base.scoring import RewardFailure, Score
from realrl.algorithms.rewards.verifiers.numeric import tidy_signs
from realrl.algorithms.rewards.verifiers.verifier import AnswerVerifier, Verification, require
from realrl.config.errors import UserCodeError, UserError

PROGRAM = Path(__file__).with_name("math_child.py")
_START_SECONDS = 120.0
"""Maximum seconds for importing the library, which may be on a slow file system."""
_GRACE = 20.0
"""Seconds beyond the library's own time limits after which the process is killed."""
_KNOWN_PAIRS = ((r"\frac{1}{2}", "0.5", True), (r"\sqrt{4}", "3", False))


class MathEquality(AnswerVerifier):
    """1 for a completion whose answer, in LaTeX or plain text, equals the right answer according to math-verify."""

    kind: Literal["math"]
    seconds: PositiveFloat = 5.0
    """Maximum seconds for reading each of the two expressions, and for comparing them. After that, they count as
    not equal."""

    @property
    def reads_answers(self) -> bool:
        return self.extract is not None

    def read_answer(self, completion: str) -> str | None:
        """Read the expression, without white space. 1/2 and 0.5 count as different answers."""
        found = super().read_answer(completion)
        return None if found is None else "".join(found.split())

    def open(self) -> Verification:
        """Start the process, and try it on known pairs. Raises UserError if it does not work."""
        require("math_verify", self.kind)
        comparison = _Comparison(self)
        comparison.try_out()
        return comparison


class MathProcessError(Exception):
    """Failure of the separate process. The message follows the name of the verifier."""

    def __init__(self, message: str, words: str = "") -> None:
        """words: text that the process wrote to its standard error."""
        last = words.strip().rpartition("\n")[2]
        super().__init__(f"{message}{last and ': '}{last}")
        self.words = words


class _Comparison:
    """The verifier and its process. If the process is not running, the next question starts it."""

    def __init__(self, settings: MathEquality) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._library = ""
        """The file of math-verify that the process has imported."""

    def try_out(self) -> None:
        """Compare known pairs. Raises UserError if the process ends, or returns a wrong answer."""
        for text, right, equal in _KNOWN_PAIRS:
            try:
                answer = self._ask(text, right, extracted=True)
            except MathProcessError as error:
                raise UserCodeError(f"verifier math {error}", error.words) from None
            if answer is not equal:
                said = {True: "equal", False: "not equal", None: "not an expression"}[answer]
                raise UserError(
                    f"verifier math does not work here: math-verify says that {text} and {right} are {said};"
                    f" check the installation, {self._library} and antlr4-python3-runtime"
                )

    def verify(self, completions: list[str], fields: Mapping[str, list[Any]]) -> list[Score]:
        with self._lock:  # a call that was abandoned at its time limit may still run
            return self._settings.verify_by(self._compare, completions, fields)

    def _compare(self, text: str, right: str) -> Score:
        """Compare two texts as expressions. The score is 0 if that takes too long."""
        settings = self._settings
        try:
            answer = self._ask(tidy_signs(text), tidy_signs(right), extracted=settings.extract is not None)
        except MathProcessError as error:
            return RewardFailure(str(error), error.words)
        if answer is None:
            return RewardFailure(f"finds no expression in {settings.answer}={right[:40]!r}")
        return float(answer)

    def _ask(self, text: str, right: str, *, extracted: bool) -> bool | None:
        """Ask the process whether two expressions are equal.

        Returns False if the answer takes too long, and None if `right` is not an expression. extracted: whether
        `text` is an expression alone, and not prose with an expression. Raises MathProcessError if the process ends
        twice in a row instead of answering.
        """
        seconds = self._settings.seconds
        question = {"text": text, "right": right, "extracted": extracted, "seconds": seconds}
        sent = json.dumps(question).encode() + b"\n"
        # The first process may have been killed between two questions. If the second process ends too, this
        # question is the cause.
        for last in (False, True):
            process = self._process or self._start()
            try:
                line = _exchange(process, sent, 4 * seconds + _GRACE)
            except EOFError:
                if last:
                    raise MathProcessError("lost its process", self._read_end()) from None
                self._end()
                continue
            if line is None:  # the library could not stop its computation
                self._end()
                return False
            equal: bool | None = json.loads(line)
            return equal
        raise AssertionError("the loop returns or raises")

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the process, and wait until it is ready. Raises MathProcessError if it is not."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the process
        self._process = subprocess.Popen(
            # Without -P, Python would import modules of the program's directory, such as this math.py, in place of
            # modules of the standard library.
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
            self._end()
            raise MathProcessError(f"cannot start its process: not ready within {_START_SECONDS:g} s")
        self._library = json.loads(ready)
        return self._process

    def _read_end(self) -> str:
        """Return the error output of the ended process or, if it is empty, the exit status; forget the process."""
        assert self._process is not None and self._errors is not None
        self._process.communicate()
        code, self._process = self._process.returncode, None
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace")
        return (
            words if words.strip() else f"it ended with {f'signal {-code}' if code < 0 else f'status {code}'}"
        )


def _leave_out_working_directory(environment: Mapping[str, str]) -> dict[str, str]:
    """Copy an environment so that Python imports nothing from the working directory, such as a user's sympy.py."""
    here = os.path.realpath(os.curdir)
    listed = environment.get("PYTHONPATH", "").split(os.pathsep)
    kept = [os.path.abspath(entry) for entry in listed if entry and os.path.realpath(entry) != here]
    return {**environment, "PYTHONPATH": os.pathsep.join(kept)}


def _exchange(process: subprocess.Popen[bytes], question: bytes, seconds: float) -> bytes | None:
    """Send a line, and return the line that the process answers; None if it does not answer in time.

    Raises EOFError if the process has ended.
    """
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
