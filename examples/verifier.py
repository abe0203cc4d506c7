"""A custom verifier: does an answer name what its question asks for?"""

from collections.abc import Sequence
from itertools import takewhile


def count_common(text: str, word: str) -> int:
    """Count the letters of the common prefix."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(text, word, strict=False))))


def names_one(completions: Sequence[str], accepted: Sequence[Sequence[str]]) -> list[float]:
    """Score 1 for an accepted first word, and half the matching fraction if the word only starts correctly.

    `accepted` is a field of the records: for each completion, the words that its prompt accepts.
    """
    scores = []
    for text, words in zip(completions, accepted, strict=True):
        said = (text.lower().split() or [""])[0]
        begun = max(count_common(said, word) / len(word) for word in words)
        scores.append(1.0 if said in words else begun / 2)
    return scores
