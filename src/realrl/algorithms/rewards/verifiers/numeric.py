"""Verifier of numbers."""

import math
import re
from fractions import Fraction
from typing import Literal

from pydantic import NonNegativeFloat

from realrl.algorithms.rewards.scoring.scores import RewardFailure, Score
from realrl.algorithms.rewards.verifiers.base import AnswerVerifier
from realrl.config.patterns import find_last

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_NUMBER = rf"(?<![\w.])[-+]?\$?(?:{_DIGITS}(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
"""An integer, perhaps with commas between thousands, a decimal or scientific number, perhaps of dollars."""
_QUOTIENT = re.compile(rf"({_NUMBER})(?:\s*/\s*({_NUMBER}))?\s*(%?)")
_LONGEST = 400
"""Characters of a number that is read: more would be the work of a model that has gone astray."""


class Numeric(AnswerVerifier):
    """1 for a completion whose last number is the right one, within tolerances.

    Numbers are such as -3, 1,234.5, 2.5e-3, 3/4, $12 and 7 % (which is 0.07 with `percent: fraction`).
    """

    kind: Literal["numeric"]
    abs_tolerance: NonNegativeFloat = 0.0
    """Distance from the right number that is still right."""
    rel_tolerance: NonNegativeFloat = 1e-9
    """That distance as a part of the right number; the larger of both counts."""
    percent: Literal["ignore", "fraction"] = "ignore"
    """Whether a sign of percent says nothing, or divides by 100."""

    def read_answer(self, completion: str) -> str | None:
        """Read the last number."""
        found = super().read_answer(completion)
        number = None if found is None else find_number(found, self.percent)
        return None if number is None else repr(number)

    def compare(self, text: str, right: str) -> Score:
        """Compare as numbers."""
        expected = find_number(right, self.percent)
        if expected is None:
            return RewardFailure(f"finds no number in {self.answer}={right[:40]!r}")
        found = find_number(text, self.percent)
        if found is None:
            return 0.0
        close = math.isclose(found, expected, rel_tol=0.0, abs_tol=self.abs_tolerance)
        return float(close or abs(found - expected) <= self.rel_tolerance * abs(expected))


def find_number(text: str, percent: Literal["ignore", "fraction"] = "ignore") -> float | None:
    """Find the last number of a text; None where there is none, or none that is finite."""
    last = find_last(_QUOTIENT, text.replace("−", "-").replace("\\$", "$"))
    if last is None or len(last.group()) > _LONGEST:
        return None
    number, divisor = _read(last.group(1)), _read(last.group(2) or "1")
    if divisor == 0:
        return None
    number /= divisor
    try:
        value = float(number / 100 if last.group(3) and percent == "fraction" else number)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


def _read(text: str) -> Fraction:
    plain = text.replace(",", "").replace("$", "")
    exponent = plain.lower().partition("e")[2]
    if abs(int(exponent or 0)) > _LONGEST:  # whose exact value would take for ever
        return Fraction(0) if exponent.startswith("-") else Fraction(10) ** _LONGEST
    return Fraction(plain)
