"""JSON files written by people or other programs, where repeated keys are errors, and our own of JSON lines."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from realrl.config.errors import UserError
from realrl.config.files import reason_of


class RepeatedKeyError(ValueError):
    """A key that occurs twice in a JSON object."""


def read_json(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file; UserError naming the file if there is none."""
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
    """Parse JSON text; UserError starting with `where`."""
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except RecursionError:
        raise UserError(f"{where}: not a valid file (lists or objects are nested too deep)") from None
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON ({error})") from None


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Build a mapping from pairs, as a hook for `json`; RepeatedKeyError where a key comes twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise RepeatedKeyError(f"key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return found


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
