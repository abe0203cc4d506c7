"""Rewards for prompts with a known answer: a completion should contain it, and be short."""

from collections.abc import Iterable

LONGEST = 200
"""A longer completion loses one point per this many characters beyond this length."""


def score(completions: list[str], answer: list[str | None]) -> Iterable[float]:
    """Score each completion. `answer` is a column of the records; None for a record without it."""
    for text, expected in zip(completions, answer, strict=True):
        right = expected is not None and expected.lower() in text.lower()
        yield float(right) - max(0, len(text) - LONGEST) / LONGEST
