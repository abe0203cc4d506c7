"""Lists of words in messages."""

from collections.abc import Sequence


def join(words: Sequence[str]) -> str:
    """Join words as text: `a`, `a and b`, `a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
