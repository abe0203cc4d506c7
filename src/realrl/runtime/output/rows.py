"""Rows of JSON lines."""

import json
from collections.abc import Iterable, Iterator, Mapping
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


def read_tail(file: Path, limit: int) -> list[bytes]:
    """Read the whole lines in the last `limit` bytes of a file that may grow; none where it cannot be read."""
    try:
        start = max(0, file.stat().st_size - limit)
        with file.open("rb") as lines:
            lines.seek(start)
            text = lines.read(limit)
    except OSError:
        return []
    # The first line may have lost its beginning, the last one may lack its end.
    return text[: text.rfind(b"\n") + 1].split(b"\n")[1 if start else 0 : -1]


def parse_rows(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of lines; those that have none are left out."""
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row


def replace_infinite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace numbers that JSON does not have by null."""
    return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in values.items()}
