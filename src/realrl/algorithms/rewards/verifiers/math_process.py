"""Process in which expressions are compared. No torch.

Reading an expression, and comparing two, may take for ever. math-verify bounds both by alarm signals, which reach
the main thread of a process alone, and the functions of a run are called in others. Run as a module, this is that
process: it answers a line of JSON by another one.
"""

import json
import logging
import os
import selectors
import subprocess
import sys
import time
from typing import Any

_GRACE = 20.0
"""Seconds beyond the bounds of the library, such as for importing it."""


class MathProcess:
    """Process that compares expressions, started at the first one, and again where it does not answer."""

    def __init__(self, seconds: float) -> None:
        """`seconds` bounds reading each expression, and comparing two."""
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, *, text: str, right: str, extracted: bool) -> bool | None:
        """Tell whether two expressions are equal, False where that takes too long; None where `right` is none.

        extracted: whether `text` is an expression alone, and not prose with an expression.
        """
        question = {"text": text, "right": right, "extracted": extracted, "seconds": self._seconds}
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        line = _exchange(self._process, json.dumps(question).encode() + b"\n", 4 * self._seconds + _GRACE)
        if line is None:
            self.close()
            return False
        equal: bool | None = json.loads(line)
        return equal

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _exchange(process: subprocess.Popen[bytes], question: bytes, seconds: float) -> bytes | None:
    """Send a line, and wait for one; None where there is none in time, or the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    deadline, received = time.monotonic() + seconds, b""
    try:
        process.stdin.write(question)
        process.stdin.flush()
    except OSError:
        return None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not received.endswith(b"\n"):
            if not selector.select(max(deadline - time.monotonic(), 0)):
                return None
            part = os.read(process.stdout.fileno(), 4096)
            if not part:
                return None
            received += part
    return received


def _parse(text: str, *, extracted: bool, seconds: int) -> Any:
    """Read the expressions of a text; an empty list where there are none."""
    from math_verify import parse

    marked = any(mark in text for mark in ("$", "\\boxed", "\\(", "\\["))
    # Of plain text the library would take the last number alone: 1 of x^2 + 1.
    found = parse(f"${text}$", parsing_timeout=seconds) if extracted and not marked else []
    return found or parse(text, parsing_timeout=seconds)


def _compare(question: dict[str, Any]) -> bool | None:
    from math_verify import verify

    seconds = max(1, round(question["seconds"]))
    right = _parse(question["right"], extracted=True, seconds=seconds)
    if not right:
        return None
    found = _parse(question["text"], extracted=question["extracted"], seconds=seconds)
    return bool(found) and bool(verify(right, found, timeout_seconds=seconds))


def answer_questions() -> None:
    """Answer until the input ends."""
    logging.disable()
    sys.set_int_max_str_digits(0)
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(_compare(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    answer_questions()
