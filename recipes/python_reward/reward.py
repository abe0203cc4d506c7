"""A reward for prompts with a known answer: 1 if a completion contains it, less a penalty for length."""

from collections.abc import Iterable

LONGEST = 200
"""Number of characters above which a completion loses points."""


def score(completions: list[str], answer: list[str | None]) -> Iterable[float]:
    """Score each completion. `answer` is a field of the records; it is None if a record lacks it."""
    for text, expected in zip(completions, answer, strict=True):
        right = expected is not None and expected.lower() in text.lower()
        yield float(right) - max(0, len(text) - LONGEST) / LONGEST
