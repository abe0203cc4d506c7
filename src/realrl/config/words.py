"""Lists of words in messages."""

from collections.abc import Sequence


def join(words: Sequence[str], last: str = "and") -> str:
    """Join words as text: `a`, `a and b`, `a, b and c`; `last` stands before the last one."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
