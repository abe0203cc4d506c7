"""A verifier of one's own: whether an answer names what its question asks for."""

from collections.abc import Sequence
from itertools import takewhile


def count_common(text: str, word: str) -> int:
    """Count the letters that both begin with."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(text, word, strict=False))))


def names_one(completions: Sequence[str], accepted: Sequence[Sequence[str]]) -> list[float]:
    """Score 1 for an answer that begins with an accepted word; half the share of one that it begins to spell.

    `accepted` is a field of the records: for each completion, the words that its prompt accepts.
    """
    scores = []
    for text, words in zip(completions, accepted, strict=True):
        said = (text.lower().split() or [""])[0]
        begun = max(count_common(said, word) / len(word) for word in words)
        scores.append(1.0 if said in words else begun / 2)
    return scores
