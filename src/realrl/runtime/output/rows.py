"""Rows of JSON lines."""

import json
from collections.abc import Iterable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from realrl.config.files import whole_file


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line, atomically. OSError."""
    # Half a surrogate pair, which a function may give, becomes its escape, which JSON has as well.
    with (
        whole_file(file) as partial,
        partial.open("w", encoding="utf-8", errors="backslashreplace") as lines,
    ):
        for row in rows:
            lines.write(json.dumps(replace_infinite(row), ensure_ascii=False) + "\n")


def replace_infinite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace numbers that JSON does not have by null."""
    return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in values.items()}


def to_json(value: Any) -> Any:
    """Convert a value of a record to what JSON has: infinite numbers become null, dates and the like text."""
    if isinstance(value, Mapping):
        return {str(key): to_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(inner) for inner in value]
    if isinstance(value, float):
        return value if isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
