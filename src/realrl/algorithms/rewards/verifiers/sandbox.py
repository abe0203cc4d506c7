"""Generated Python in a process of its own, with limits. No torch."""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("sandbox_process.py")
_SHOWN = 2000
"""Characters of the process's last words that a message repeats."""
KINDS = {"network": "the network", "files": "files (to write them)", "processes": "other processes"}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on generated code."""

    seconds: float
    """Of the clock, and of CPU time."""
    memory_bytes: int
    output_bytes: int
    """Of each file; what it prints goes nowhere."""


class SandboxError(Exception):
    """The sandbox itself does not work, so no code can be judged. The message follows the verifier's name."""


def run_in_sandbox(code: str, tests: list[str], limits: Limits) -> list[bool]:
    """Run code, then each test, one after the other: whether it passes.

    None does if the code ends its process or takes too long. SandboxError if the sandbox itself fails.
    """
    answer = _run(code, tests, limits)
    passed = None if answer is None else answer.get("passed")
    return passed if isinstance(passed, list) and len(passed) == len(tests) else [False] * len(tests)


def find_not_isolated() -> list[str]:
    """Find what this machine does not allow to cut code off from, in words."""
    answer = _run("", [], Limits(seconds=30, memory_bytes=1 << 30, output_bytes=1 << 16))
    isolated: dict[str, bool] = {} if answer is None else answer["isolated"]
    return [words for kind, words in KINDS.items() if not isolated.get(kind)]


def _run(code: str, tests: list[str], limits: Limits) -> dict[str, Any] | None:
    token = secrets.token_hex()
    job = {
        "code": code,
        "tests": tests,
        "token": token,
        "cpu_seconds": max(1, round(limits.seconds)),
        "memory_bytes": limits.memory_bytes,
        "output_bytes": limits.output_bytes,
    }
    # Without the variables of this process, which may hold keys.
    environment = {"PATH": os.defpath, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    # The answer goes into a file, whose size is limited, and not through a pipe, which code could flood.
    with (
        tempfile.TemporaryDirectory(prefix="realrl-tests-") as directory,
        tempfile.TemporaryFile() as answers,
    ):
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(PROGRAM)],
            cwd=directory,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=answers,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            # Starting Python takes time, too.
            _, errors = process.communicate(json.dumps(job).encode(), timeout=limits.seconds + 5)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        # Code can kill the process that waits for it, but not make it end with a status of its own.
        if process.returncode > 0:
            words = errors.decode(errors="replace").strip()[-_SHOWN:]
            raise SandboxError(f"cannot run tests: exit status {process.returncode}; {words}")
        answers.seek(0)
        output = answers.read()
    try:
        answer = json.loads(output)
    except ValueError:
        return None
    # Code that answers in place of the tests does not know the token, unless it searches this process for it.
    return answer if isinstance(answer, dict) and answer.get("token") == token else None
