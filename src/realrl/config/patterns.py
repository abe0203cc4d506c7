"""Regular expressions in recipes."""

import re
from collections import deque
from typing import Annotated

from pydantic import AfterValidator


def find_last(pattern: str | re.Pattern[str], text: str) -> re.Match[str] | None:
    """Find the last match of a regular expression."""
    return next(iter(deque(re.finditer(pattern, text), maxlen=1)), None)


def _check(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
    return pattern


Pattern = Annotated[str, AfterValidator(_check)]
"""Setting that is a regular expression of Python."""
