"""Verifier of mathematical equality, by the library math-verify."""

import threading
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import PositiveFloat

from realrl.algorithms.rewards.scoring.scores import RewardFailure, Score
from realrl.algorithms.rewards.verifiers.base import AnswerVerifier, Verification
from realrl.algorithms.rewards.verifiers.extra import require
from realrl.algorithms.rewards.verifiers.math_process import MathProcess, MathProcessError
from realrl.algorithms.rewards.verifiers.numeric import tidy_signs
from realrl.config.errors import UserCodeError, UserError

_KNOWN_PAIRS = ((r"\frac{1}{2}", "0.5", True), (r"\sqrt{4}", "3", False))


class MathEquality(AnswerVerifier):
    """1 for a completion whose answer, in LaTeX or plain, math-verify finds equal to the right one in time."""

    kind: Literal["math"]
    seconds: PositiveFloat = 5.0
    """Bound on reading each of the two expressions, and on comparing them."""

    @property
    def reads_answers(self) -> bool:
        """Whether an expression is cut out of completions."""
        return self.extract is not None

    def read_answer(self, completion: str) -> str | None:
        """Read the expression, without white space; 1/2 and 0.5 are different ones."""
        found = super().read_answer(completion)
        return None if found is None else "".join(found.split())

    def open(self) -> Verification:
        """Start the process, and try it on known pairs; UserError if it does not work."""
        require("math_verify", self.kind)
        comparison = _Comparison(self)
        comparison.try_out()
        return comparison


class _Comparison:
    """The verifier with the process that it keeps."""

    def __init__(self, settings: MathEquality) -> None:
        self._settings = settings
        self._process = MathProcess(settings.seconds)
        self._lock = threading.Lock()

    def try_out(self) -> None:
        """Compare known pairs; UserError if the process ends, or says anything but the truth."""
        for text, right, equal in _KNOWN_PAIRS:
            try:
                answer = self._process.ask(text=text, right=right, extracted=True)
            except MathProcessError as error:
                raise UserCodeError(f"verifier math {error}", error.words) from None
            if answer is not equal:
                said = {True: "equal", False: "not equal", None: "not an expression"}[answer]
                raise UserError(
                    f"verifier math does not work here: math-verify says that {text} and {right} are {said};"
                    f" check the installation, {self._process.library} and antlr4-python3-runtime"
                )

    def verify(self, completions: list[str], fields: Mapping[str, list[Any]]) -> list[Score]:
        """Compare, one after the other."""
        with self._lock:  # one that was abandoned at its time limit may still be at it
            return self._settings.verify_by(self._compare, completions, fields)

    def _compare(self, text: str, right: str) -> Score:
        """Compare as expressions; 0 where that takes too long."""
        settings = self._settings
        try:
            answer = self._process.ask(
                text=tidy_signs(text), right=tidy_signs(right), extracted=settings.extract is not None
            )
        except MathProcessError as error:
            return RewardFailure(str(error), error.words)
        if answer is None:
            return RewardFailure(f"finds no expression in {settings.answer}={right[:40]!r}")
        return float(answer)
