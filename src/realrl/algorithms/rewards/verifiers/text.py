"""Verifiers of texts: equality, and regular expressions."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from realrl.algorithms.rewards.scoring.scores import Score
from realrl.algorithms.rewards.verifiers.base import AnswerVerifier, Verifier
from realrl.config.values import Pattern


class ExactMatch(AnswerVerifier):
    """1 for a completion that is the right answer, character by character."""

    kind: Literal["exact_match"]
    strip: bool = True
    """Leave out white space at both ends."""
    ignore_case: bool = False
    """Take capital and small letters for the same."""

    def read_answer(self, completion: str) -> str | None:
        """Read the text that is compared."""
        found = super().read_answer(completion)
        return None if found is None else self._normalize(found)

    def compare(self, text: str, right: str) -> Score:
        """Compare as texts."""
        return float(self._normalize(text) == self._normalize(right))

    def _normalize(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text


class Regex(Verifier):
    """1 for a completion in which a regular expression is found."""

    kind: Literal["regex"]
    pattern: Pattern
    """The expression."""
    whole: bool = False
    """Whether it must match the whole completion."""

    def verify(self, completions: list[str], fields: Mapping[str, list[Any]]) -> list[Score]:
        """Search in each completion."""
        compiled = re.compile(self.pattern, re.DOTALL)
        find = compiled.fullmatch if self.whole else compiled.search
        return [float(find(text) is not None) for text in completions]
