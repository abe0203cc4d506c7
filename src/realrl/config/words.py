"""Words as sentences need them."""

from collections.abc import Sequence


def join(words: Sequence[str], last: str = "and") -> str:
    """`a`, `a and b`, `a, b and c`, or with another word before the last one."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
