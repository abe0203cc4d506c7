"""A verifier of your own. It scores whether an answer names what its question asks for."""

from collections.abc import Sequence
from itertools import takewhile


def count_common(text: str, word: str) -> int:
    """Count the letters at the start of `text` and `word` that are equal."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(text, word, strict=False))))


def names_one(completions: Sequence[str], accepted: Sequence[Sequence[str]]) -> list[float]:
    """Score each answer: 1 if its first word is accepted, otherwise less.

    If a first word only begins like an accepted word, it scores half the share of letters that match.

    `accepted` is a field of the records. For each completion, it lists the accepted answers to the prompt.
    """
    scores = []
    for text, words in zip(completions, accepted, strict=True):
        said = (text.lower().split() or [""])[0]
        begun = max(count_common(said, word) / len(word) for word in words)
        scores.append(1.0 if said in words else begun / 2)
    return scores
