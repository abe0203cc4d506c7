"""Verifier of mathematical equality, by the library math-verify."""

import threading
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import PositiveFloat, PrivateAttr

from realrl.algorithms.rewards.scoring.scores import RewardFailure, Score
from realrl.algorithms.rewards.verifiers.base import AnswerVerifier
from realrl.algorithms.rewards.verifiers.extra import require
from realrl.algorithms.rewards.verifiers.math_process import MathProcess


class MathEquality(AnswerVerifier):
    """1 for a completion whose answer, in LaTeX or plain, math-verify finds equal to the right one in time."""

    kind: Literal["math"]
    seconds: PositiveFloat = 5.0
    """Bound on reading each of the two expressions, and on comparing them."""
    _process: MathProcess | None = PrivateAttr(default=None)
    _lock: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    def load(self) -> None:
        """Check that the library is installed."""
        require("math_verify", self.kind)

    def verify(self, completions: list[str], fields: Mapping[str, list[Any]]) -> list[Score]:
        """Compare, one after the other, in the process that is kept for it."""
        with self._lock:  # one that was abandoned at its time limit may still be at it
            if self._process is None:
                self._process = MathProcess(self.seconds)
            return super().verify(completions, fields)

    def compare(self, text: str, right: str) -> Score:
        """Compare as expressions; 0 where that takes too long."""
        assert self._process is not None, "started by verify"
        answer = self._process.ask(text=text, right=right, extracted=self.extract is not None)
        if answer is None:
            return RewardFailure(f"finds no expression in {self.answer}={right[:40]!r}")
        return float(answer)
