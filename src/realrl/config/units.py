"""Sizes in bytes, as people write and read them."""

import re

from realrl.config.errors import UserError

_UNITS = {
    "B": 1,
    **{f"{letter}iB": 1024 ** (i + 1) for i, letter in enumerate("KMGT")},
    **{f"{letter}B": 1000 ** (i + 1) for i, letter in enumerate("KMGT")},
}


def parse_bytes(text: str) -> int:
    """The number that text such as `80GiB` or `512 MB` stands for; UserError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B)", text.strip())
    if match is None or match[2] not in _UNITS or float(match[1]) == 0:
        raise UserError(f"{text!r} is no size; write a number and a unit, for example 80GiB or 512MiB")
    return int(float(match[1]) * _UNITS[match[2]])


def format_bytes(number: float) -> str:
    """Three significant digits with a binary unit, for example `12.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 999.5 or unit == "TiB":
            break
        number /= 1024
    digits = 0 if unit == "B" or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:.{digits}f} {unit}"
