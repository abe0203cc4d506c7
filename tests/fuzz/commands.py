"""Commands on damaged input: they end soon, with status 0 or one error message."""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from realrl.cli.app import run_app
from tests.cli.mistakes import is_message

SECONDS = 60
"""Time after which a command is taken to hang. Most take a hundredth of a second."""
TIMES = int(os.environ.get("REALRL_FUZZ", "1"))
"""Examples are so many times as many, and others each time, where this is more than 1."""


def fuzz(examples: int) -> settings:
    """Settings of a test with this many examples, the same each time unless REALRL_FUZZ asks for more."""
    return settings(
        max_examples=examples * TIMES,
        derandomize=TIMES == 1,
        database=None,
        deadline=None,
        # The fixtures are files that no example changes.
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
        ],
    )


@contextmanager
def ends_soon() -> Iterator[None]:
    """Fail the test where the block takes too long; a hang in native code is for the test runner to find."""

    def fail(_: int, frame: FrameType | None) -> None:
        pytest.fail(f"no end after {SECONDS} s, at {frame}")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check_command(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> int:
    """Run a command: it must end with status 0, or with 2 and one error message; return its status."""
    with ends_soon():
        status = run_app(list(arguments))
    said: Any = capsys.readouterr()
    shown = f"realrl {' '.join(arguments)}: status {status}\n{said.err[-3000:]}"
    assert status in (0, 2), shown
    assert "Traceback" not in said.err and "Traceback" not in said.out, shown
    if status:
        _, *messages = f"\n{said.err}".split("\nrealrl: ")
        assert len(messages) == 1 and is_message(f"realrl: {messages[0]}"), shown
    sys.stdout.flush()
    return status
