"""JSON files of people and other programs, in which repeated keys are errors, and JSON lines that realrl writes."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from realrl.config.errors import UserError
from realrl.config.files import reason_of, whole_file, write_whole


class RepeatedKeyError(ValueError):
    """A key occurs twice in a JSON object."""


def read_json(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file. Raises UserError with the file's name if the file holds no object."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{file}: no such file") from error
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({reason_of(error)})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not valid JSON ({error})") from error
    content = _parse(text, str(file))
    if not isinstance(content, dict):
        raise UserError(f"{file}: a JSON object is expected")
    return content


def _parse(text: str, where: str) -> Any:
    """Parse JSON text. Raises UserError beginning with `where`."""
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except RecursionError:
        raise UserError(f"{where}: not a valid file (lists or objects are nested too deep)") from None
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON ({error})") from None


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Build a mapping from pairs, as a hook for `json`. Raises RepeatedKeyError for a repeated key."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise RepeatedKeyError(f"key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return found


def write_readable(file: Path, content: Any) -> None:
    """Write JSON atomically, each innermost object or list on a line of its own, so that diff compares files."""
    text = json.dumps(content, indent=1)
    text = re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda match: re.sub(r"\s*\n\s*", " ", match[0]), text)
    write_whole(file, text + "\n")


def read_tail(file: Path, limit: int) -> list[bytes]:
    """Read the complete lines in the last `limit` bytes of a growing file. Empty if the file cannot be read."""
    try:
        start = max(0, file.stat().st_size - limit)
        with file.open("rb") as lines:
            lines.seek(start)
            text = lines.read(limit)
    except OSError:
        return []
    # The first line may be cut, and the last may be incomplete.
    return text[: text.rfind(b"\n") + 1].split(b"\n")[1 if start else 0 : -1]


def parse_rows(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of lines; other lines are skipped."""
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line, atomically. Raises OSError."""
    # A function may return half a surrogate pair, which becomes an escape in valid JSON.
    with whole_file(file) as partial, partial.open("w", encoding="utf-8", errors="backslashreplace") as lines:
        for row in rows:
            lines.write(json.dumps(replace_infinite(row), ensure_ascii=False) + "\n")


def replace_infinite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace infinite numbers and NaN by null."""
    return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in values.items()}


def to_json(value: Any) -> Any:
    """Convert a value of a record to JSON. Infinite numbers become null; dates and similar values become text."""
    if isinstance(value, Mapping):
        return {str(key): to_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(inner) for inner in value]
    if isinstance(value, float):
        return value if isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
