"""Commands as processes of their own, and what becomes of theirs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = 200.0
"""Seconds after which a command that should have ended is taken to hang, on a machine with much else to do."""


def heed_interrupts() -> None:
    """For a child process: tests that run in the background, or outlast a terminal, ignore interrupts or the end of
    that, and so would what they start."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start(*arguments: str, module: str = "realrl", **variables: str) -> "subprocess.Popen[str]":
    """Start `python -m MODULE ARGUMENTS` in a process group of its own, with more environment variables."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )


def end(process: "subprocess.Popen[str]", starts: int = 1) -> tuple[int, str]:
    """Exit status and standard error of a command, which must end soon, after so many starts of its processes."""
    try:
        _, error = process.communicate(timeout=PATIENCE * starts)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, error


def until(condition: Callable[[], object]) -> None:
    """Wait until something holds, which it must soon."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether a process runs; one that is only waiting to be collected does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def ranks(launcher: int) -> dict[int, int]:
    """Rank -> process id of the ranks that a launcher has started."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and alive(int(entry.name)):
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                variables = (entry / "environ").read_text().split("\0") if parent == launcher else []
            except OSError:
                continue
            found |= {int(v[5:]): int(entry.name) for v in variables if v.startswith("RANK=")}
    return found
