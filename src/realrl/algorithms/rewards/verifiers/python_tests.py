"""Verifier that runs unit tests on generated Python in a sandbox, which is a separate process with limits."""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from realrl.algorithms.base.scoring import RewardFailure, Score, map_in_threads
from realrl.algorithms.rewards.verifiers.verifier import Verification, Verifier
from realrl.config.errors import UserError

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)


class PythonTests(Verifier):
    """1 for a completion whose Python passes all tests of the record, within limits of time and memory.

    The code is the last block between ``` fences, or the whole completion if there are no fences. The code runs in
    a separate process, which does not see the environment variables of this process.
    """

    kind: Literal["python_tests"]
    tests: str = "tests"
    """Column with the tests: Python statements such as assertions, as one text or a list of texts. A text passes
    unless it raises. The reward does not apply to records without this column."""
    setup: str | None = None
    """Column with Python code that runs before the completion, such as the first lines of the prompt."""
    partial: bool = False
    """Score the share of tests that pass, instead of 1 if all tests pass and 0 otherwise."""
    seconds: PositiveFloat = 5.0
    """Maximum seconds for all tests of a completion together."""
    memory_mb: PositiveInt = 512
    """Memory limit in MiB."""
    output_kb: int = Field(default=64, ge=64)
    """Size limit in KiB of each written file, if files can be written at all."""
    processes: PositiveInt | None = None
    """Number of completions that a rank tests at the same time. null takes the number of its processor cores."""

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.tests,) if self.setup is None else (self.tests, self.setup)

    def open(self) -> Verification:
        """Try the sandbox, and note what it cannot isolate. Raises UserError if it does not work."""
        try:
            lacking = find_not_isolated()
            tried = run_in_sandbox("x = 1", ["assert x == 1", "assert x == 2"], self)
        except SandboxError as error:
            raise UserError(f"verifier python_tests {error}") from None
        if tried != [True, False]:
            raise UserError(
                f"verifier python_tests does not work here: of 'x = 1', {sum(tried)} of the tests x == 1 and"
                f" x == 2 passed; seconds={self.seconds:g} and memory_mb={self.memory_mb} may be too few"
            )
        if lacking and os.environ.get("RANK", "0") == "0":
            print(
                f"note: verifier python_tests: this machine does not allow to isolate generated code from"
                f" {' and '.join(lacking)}; limits on time and memory hold",
                file=sys.stderr,
            )
        return self

    def verify(self, completions: list[str], fields: Mapping[str, list[Any]]) -> list[Score]:
        setups = [None] * len(completions) if self.setup is None else fields[self.setup]
        most = self.processes or len(os.sched_getaffinity(0))
        jobs = list(zip(completions, fields[self.tests], setups, strict=True))
        return map_in_threads(self._check, jobs, most)

    def _check(self, job: tuple[str, Any, Any]) -> Score:
        completion, tests, setup = job
        if tests is None:
            return None
        listed = [tests] if isinstance(tests, str) else tests
        if not isinstance(listed, list) or not listed or not all(isinstance(test, str) for test in listed):
            return RewardFailure(f"needs a text or a list of texts as {self.tests}")
        fenced = _FENCED.findall(completion)
        code = fenced[-1] if fenced else completion
        try:
            passed = run_in_sandbox(code if setup is None else f"{setup}\n{code}", listed, self)
        except SandboxError as error:
            return RewardFailure(str(error))
        return sum(passed) / len(passed) if self.partial else float(all(passed))


PROGRAM = Path(__file__).with_name("sandbox_process.py")
_SHOWN = 2000
"""Maximum characters of the process's error output that a message repeats."""
KINDS = {"network": "the network", "files": "files (to write them)", "processes": "other processes"}


class SandboxError(Exception):
    """The sandbox itself does not work, so no code can be judged. The message follows the verifier's name."""


def run_in_sandbox(code: str, tests: list[str], limits: PythonTests) -> list[bool]:
    """Run code, then one test after the other, and return whether each test passes.

    No test passes if the code ends its process or takes too long. Raises SandboxError if the sandbox itself fails.
    """
    answer = _run(code, tests, limits)
    passed = None if answer is None else answer.get("passed")
    return passed if isinstance(passed, list) and len(passed) == len(tests) else [False] * len(tests)


def find_not_isolated() -> list[str]:
    """List what this machine cannot isolate code from, as words for a message."""
    answer = _run("", [], PythonTests(kind="python_tests", seconds=30.0, memory_mb=1024))
    isolated: dict[str, bool] = {} if answer is None else answer["isolated"]
    return [words for kind, words in KINDS.items() if not isolated.get(kind)]


def _run(code: str, tests: list[str], limits: PythonTests) -> dict[str, Any] | None:
    token = secrets.token_hex()
    job = {
        "code": code,
        "tests": tests,
        "token": token,
        "cpu_seconds": max(1, round(limits.seconds)),
        "memory_bytes": limits.memory_mb << 20,
        "output_bytes": limits.output_kb << 10,
    }
    # The variables of this process are left out, because they may hold keys.
    environment = {"PATH": os.defpath, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    # The answer goes into a file, whose size is limited, because code could flood a pipe.
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
            # 5 more seconds, because Python needs time to start.
            _, errors = process.communicate(json.dumps(job).encode(), timeout=limits.seconds + 5)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        # Code can kill the process that waits for it, but cannot choose that process's exit status.
        if process.returncode > 0:
            words = errors.decode(errors="replace").strip()[-_SHOWN:]
            raise SandboxError(f"cannot run tests: exit status {process.returncode}; {words}")
        answers.seek(0)
        output = answers.read()
    try:
        answer = json.loads(output)
    except ValueError:
        return None
    # Code that writes its own answer does not know the token, unless it searches this process for it.
    return answer if isinstance(answer, dict) and answer.get("token") == token else None
