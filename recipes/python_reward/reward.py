"""Rewards for prompts with a known answer: whether a completion says it, and briefly."""

from collections.abc import Iterable

LONGEST = 200
"""Characters from which on a completion loses a point."""


def score(completions: list[str], answer: list[str | None]) -> Iterable[float]:
    """One number per completion. `answer` is a field of the records; None where a record has none."""
    for text, expected in zip(completions, answer, strict=True):
        right = expected is not None and expected.lower() in text.lower()
        yield float(right) - max(0, len(text) - LONGEST) / LONGEST
