"""Verifier of numbers."""

import math
import re
from fractions import Fraction
from typing import Literal

from pydantic import NonNegativeFloat

from realrl.algorithms.base.scoring import RewardFailure, Score
from realrl.algorithms.rewards.verifiers.verifier import AnswerVerifier
from realrl.config.values import find_last

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_NUMBER = rf"(?<![\w.])[-+]?\$?(?:{_DIGITS}(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
"""An integer, in which commas may separate thousands, or a decimal or scientific number. A dollar sign may precede
it."""
_NO_NUMBER = "\ufffc"
"""Replaces a LaTeX expression that is not a number, such as \\frac{a}{2}."""
_QUOTIENT = re.compile(rf"({_NUMBER})(?:\s*/\s*({_NUMBER}))?\s*(%?)|{_NO_NUMBER}")

_DASHES = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-"))
"""Hyphens, the en dash, and minus signs, as models and authors write them."""
_SIGN = re.compile(
    r"(\A\s*|[=(\[{:,;<>≈$#][^\S\n]*|\b(?:is|equals)[^\S\n]+)"  # text that may precede a sign, but not an operator
    r"([-+])\s*(?=[\d.$\\{])"
)
_BRACED = re.compile(rf"([-+])\s*{{\s*({_DIGITS}(?:\.\d*)?|\.\d+)\s*}}")
_GROUP = r"\{((?:[^{}]|\{[^{}]*\})*)\}"
_PART = rf"(?:{_GROUP}|(\d)|\\[A-Za-z]+|[A-Za-z])"
_BLANKS = r"(?:[^\S\n]|~|\\[,;: ]){0,4}"
_LATEX = re.compile(
    rf"((?<![\w.])[-+])?(?:(?<![\w.])({_DIGITS}){_BLANKS})?"
    rf"\\(?:[dtc]?frac\s*{_PART}\s*{_PART}|sqrt\s*(?:\[[^\]]*\])?\s*{_PART}"
    rf"|[dtc]?frac\s*(?:{_PART}\s*)?\{{[^}}]{{0,400}}\Z)"
)
"""A fraction (with or without a sign and a whole number), a root, or a fraction that is cut off."""
_UNIT = re.compile(
    r"\s*(?:(?:\\(?:text|mathrm|rm)\s*\{[^{}]*\}|[A-Za-z]++)(?:\^(?:\d|\{-?\d\}))?(?:\s|\\cdot\b|\\[,;: ])*+)++"
)
"""Numerator or denominator of a unit: km, \\text{km}, s^2, N \\cdot m."""
_NUMBER_BEFORE = re.compile(rf"\d{_BLANKS}\Z")
_REACH = 9
"""Characters that `_NUMBER_BEFORE` may match: a digit, and four blanks of at most two characters."""
_LONGEST = 400
"""Maximum characters of a number. Only broken models write longer numbers."""


class Numeric(AnswerVerifier):
    """1 for a completion whose last number equals the right number, within tolerances.

    Numbers look like -3, 1,234.5, 2.5e-3, 3/4, \\frac{3}{4}, $12 and 7 % (0.07 with `percent: fraction`).
    """

    kind: Literal["numeric"]
    abs_tolerance: NonNegativeFloat = 0.0
    """Maximum distance from the right number."""
    rel_tolerance: NonNegativeFloat = 1e-9
    """Maximum distance as a fraction of the right number. The larger of the two limits counts."""
    percent: Literal["ignore", "fraction"] = "ignore"
    """Ignore a percent sign (`ignore`), or divide the number before it by 100 (`fraction`)."""

    def read_answer(self, completion: str) -> str | None:
        found = super().read_answer(completion)
        number = None if found is None else find_number(found, self.percent)
        return None if number is None else repr(number)

    def compare(self, text: str, right: str) -> Score:
        expected = find_number(right, self.percent)
        if expected is None:
            return RewardFailure(f"finds no number in {self.answer}={right[:40]!r}")
        found = find_number(text, self.percent)
        if found is None:
            return 0.0
        close = math.isclose(found, expected, rel_tol=0.0, abs_tol=self.abs_tolerance)
        return float(close or abs(found - expected) <= self.rel_tolerance * abs(expected))


def find_number(text: str, percent: Literal["ignore", "fraction"] = "ignore") -> float | None:
    """Find the last number of a text; None if there is no number, or if it is not finite."""
    plain = tidy_signs(text).replace("\\$", "$").replace("\\%", "%").replace("{,}", ",")
    last = find_last(_QUOTIENT, _LATEX.sub(_write_quotient, plain))
    if last is None or last.group() == _NO_NUMBER or len(last.group()) > _LONGEST:
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


def tidy_signs(text: str) -> str:
    """Write every minus in ASCII, directly before its number: -3 for `- 3`, `-{3}` and `−3`. Drop plus signs."""
    text = _BRACED.sub(r"\1\2", text.translate(_DASHES))
    return _SIGN.sub(lambda found: found[1] + found[2].strip("+"), text)


def _write_quotient(found: re.Match[str]) -> str:
    """Write a LaTeX fraction of two numbers as a quotient such as -3/4. Replace other fractions and roots.

    Their replacement is `_NO_NUMBER`.

    A unit directly after a number, as in 20\\frac{km}{h}, is left out. Any letters count as a unit.
    """
    parts = [found[3] or found[4] or "", found[5] or found[6] or ""]
    whole = found[2] or ""
    if max(map(len, (whole, *parts))) > _LONGEST:
        return f" {_NO_NUMBER} "
    if not all(re.fullmatch(rf"\s*{_NUMBER}\s*", part) for part in parts):
        unit = all(_UNIT.fullmatch(part) for part in parts)
        start = found.start()
        if unit and (whole or _NUMBER_BEFORE.search(found.string, max(0, start - _REACH), start)):
            return f"{found[1] or ''}{whole} "
        return f" {_NO_NUMBER} "
    above, below = (_read(part.strip()) for part in parts)
    if below == 0:
        return f" {_NO_NUMBER} "
    value = _read(whole or "0") + above / below
    value = -value if found[1] == "-" else value
    return f" {value.numerator}/{value.denominator} "


def _read(text: str) -> Fraction:
    plain = text.replace(",", "").replace("$", "")
    exponent = plain.lower().partition("e")[2]
    if abs(int(exponent or 0)) > _LONGEST:  # computing the exact value would take too long
        return Fraction(0) if exponent.startswith("-") else Fraction(10) ** _LONGEST
    return Fraction(plain)
