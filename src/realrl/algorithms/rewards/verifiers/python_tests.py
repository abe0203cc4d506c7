"""Verifier of generated Python, by unit tests."""

import os
import re
import sys
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from realrl.algorithms.rewards.scoring.limits import map_in_threads
from realrl.algorithms.rewards.scoring.scores import RewardFailure, Score
from realrl.algorithms.rewards.verifiers.base import Verification, Verifier
from realrl.algorithms.rewards.verifiers.sandbox import (
    Limits,
    SandboxError,
    find_not_isolated,
    run_in_sandbox,
)
from realrl.config.errors import UserError

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)


class PythonTests(Verifier):
    """1 for a completion whose Python passes all tests of the record, within limits of time and memory.

    The code is what stands between the last ``` fences, or the whole completion without any. It runs in a process
    of its own, which sees no variable of this one's environment.
    """

    kind: Literal["python_tests"]
    tests: str = "tests"
    """Field of the records with the tests: Python statements such as assertions, a text or a list of texts, each of
    which passes unless it raises. Where a record has none, the reward does not apply."""
    setup: str | None = None
    """Field of the records with Python that comes before the completion's, such as the prompt's first lines."""
    partial: bool = False
    """Score the share of tests passed."""
    seconds: PositiveFloat = 5.0
    """Bound on all tests of a completion together."""
    memory_mb: PositiveInt = 512
    """Bound on memory."""
    output_kb: int = Field(default=64, ge=64)
    """Bound on the size of each file written, where files can be written at all."""
    processes: PositiveInt | None = None
    """Completions that a rank tests at a time; null for as many as it has processor cores."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The tests, and what comes first."""
        return (self.tests,) if self.setup is None else (self.tests, self.setup)

    @property
    def _limits(self) -> Limits:
        return Limits(
            seconds=self.seconds, memory_bytes=self.memory_mb << 20, output_bytes=self.output_kb << 10
        )

    def open(self) -> Verification:
        """Try the sandbox, and note what generated code is not cut off from; UserError if it does not work."""
        try:
            lacking = find_not_isolated()
            tried = run_in_sandbox("x = 1", ["assert x == 1", "assert x == 2"], self._limits)
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
        """Test completions, several at a time."""
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
            passed = run_in_sandbox(code if setup is None else f"{setup}\n{code}", listed, self._limits)
        except SandboxError as error:
            return RewardFailure(str(error))
        return sum(passed) / len(passed) if self.partial else float(all(passed))
