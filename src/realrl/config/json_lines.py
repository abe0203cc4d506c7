"""Files with a JSON object on each line, which grow."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


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
