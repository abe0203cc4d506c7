"""Values as people write them: sizes in bytes, numbers of devices, regular expressions."""

import re
from collections import deque
from typing import Annotated, Any

from pydantic import AfterValidator

from realrl.config.errors import UserError
from realrl.config.explain import brief

_UNITS = {
    "B": 1,
    **{f"{letter}iB": 1024 ** (i + 1) for i, letter in enumerate("KMGT")},
    **{f"{letter}B": 1000 ** (i + 1) for i, letter in enumerate("KMGT")},
}

_TOO_MANY = 2**60
"""Sizes in bytes must be below this number, which no machine reaches."""


def parse_bytes(text: str) -> int:
    """Parse a size such as `80GiB` or `512 MB` into bytes. Raises UserError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B)", text.strip())
    if match is None or match[2] not in _UNITS or not 1 <= float(match[1]) * _UNITS[match[2]] < _TOO_MANY:
        raise UserError(
            f"{brief(text)} is not a size; write a number and a unit, for example 80GiB or 512MiB"
        )
    return int(float(match[1]) * _UNITS[match[2]])


def check_size(value: Any) -> Any:
    """Check a size before its type is validated. Raises UserError for wrong text or a number without a unit."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        example = value if 1 <= value < 10**6 else 80
        raise UserError(f"{brief(value)} has no unit; write for example {example}GiB")
    if isinstance(value, str):
        parse_bytes(value)
    return value


def format_bytes(number: float) -> str:
    """Format bytes with three significant digits and a binary unit: `12.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 999.5 or unit == "TiB":
            break
        number /= 1024
    digits = 0 if unit == "B" or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:.{digits}f} {unit}"


def not_devices(value: Any) -> str:
    return f"{brief(value)} is not understood; write nodes x devices per node, for example 1x2 or 2x8+1x4"


def check_cluster(value: Any) -> Any:
    """Check a cluster before its type is validated. Raises UserError unless it is text."""
    if not isinstance(value, str):
        raise UserError(not_devices(value))
    return value


def find_last(pattern: str | re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(deque(re.finditer(pattern, text), maxlen=1)), None)


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return pattern


Pattern = Annotated[str, AfterValidator(_check_pattern)]
"""Setting with a regular expression of Python."""
