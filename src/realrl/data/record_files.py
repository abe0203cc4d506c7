"""Readers of files of records: JSON lines, JSON, CSV and Parquet, compressed or not."""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from realrl.config.errors import UserError
from realrl.config.files import reason_of
from realrl.config.json_file import RepeatedKeyError, unique_keys
from realrl.data.rejects import Rejects

Record = tuple[str, dict[str, Any]]
"""Origin of a record, as FILE:LINE (FILE:ROW in tables, counted from 1), and the record."""

COMPRESSED = (".gz", ".zst")
LARGEST_LINE = 256 << 20
"""Maximum bytes of an unpacked line. A small packed file may contain a line larger than memory."""
LARGEST_ARRAY = 8 << 30
"""Maximum bytes of an unpacked .json file, which is read whole."""


def find_ending(path: str) -> str | None:
    """Find the ending that determines a file's format, in lower case, such as `.jsonl`; None if unknown.

    `.gz` or `.zst` may follow this ending. Only text files may be compressed.
    """
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    packed = bool(suffixes) and suffixes[-1] in COMPRESSED
    ending = suffixes[-2 if packed else -1] if len(suffixes) > packed else ""
    return ending if ending in READERS and not (packed and ending == ".parquet") else None


def read_file(file: str, rejects: Rejects) -> Iterator[Record]:
    """Yield the records of a file with a known ending. Raises UserError if it cannot be read."""
    ending = find_ending(file)
    assert ending is not None, "sources are sorted by ending"
    return READERS[ending](file, rejects)


def _read_json_lines(file: str, rejects: Rejects) -> Iterator[Record]:
    with _opened(file) as lines:
        for number, line in enumerate(_lines(file, lines), 1):
            if not line.strip():
                continue
            origin = f"{file}:{number}"
            try:
                value = json.loads(line, object_pairs_hook=unique_keys)
            except RepeatedKeyError as error:
                rejects(origin, str(error))
                continue
            except (ValueError, RecursionError) as error:  # bad UTF-8 is a ValueError too
                rejects(
                    origin, f"not valid JSON ({_describe_error(error)}); every line must be one JSON object"
                )
                continue
            yield from _check_object(origin, value, rejects)


def _read_json(file: str, rejects: Rejects) -> Iterator[Record]:
    """Decode the objects of an array one by one, so that their lines are known. JSON lines are accepted too."""
    with _opened(file) as binary:
        try:
            content = binary.read(LARGEST_ARRAY + 1)
            if len(content) > LARGEST_ARRAY:
                raise UserError(
                    f"{file}: more than {LARGEST_ARRAY >> 30} GiB, unpacked, which are read at once; write its"
                    " records as .jsonl, one JSON object a line"
                )
            text = content.decode("utf-8-sig")
            del content
        except UnicodeDecodeError as error:
            raise UserError(f"cannot read data file {file}: {error}") from None
    position = _skip(text, 0, "")
    if text[position : position + 1] != "[":
        yield from _read_json_lines(file, rejects)
        return
    line, counted = 1, 0
    position = _skip(text, position + 1, "")
    while text[position : position + 1] != "]":
        line += text.count("\n", counted, position)
        counted = position
        try:
            value, end, reason = _decode(text, position)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{file}:{line}: not valid JSON ({_describe_error(error)}); the file must be an array of objects"
            ) from None
        if reason is None:
            yield from _check_object(f"{file}:{line}", value, rejects)
        else:
            rejects(f"{file}:{line}", reason)
        position = _skip(text, end, ",")


def _decode(text: str, position: int) -> tuple[Any, int, str | None]:
    """Decode the JSON value at `position`. Returns the value, its end, and the reason if the value is unusable."""
    try:
        value, end = json.JSONDecoder(object_pairs_hook=unique_keys).raw_decode(text, position)
        return value, end, None
    except RepeatedKeyError as error:
        return None, json.JSONDecoder().raw_decode(text, position)[1], str(error)


def _skip(text: str, position: int, separator: str) -> int:
    """Find the position after white space, at most one separator, and white space."""
    for wanted in ("", separator):
        if wanted and text.startswith(wanted, position):
            position += 1
        while position < len(text) and text[position] in " \t\r\n":
            position += 1
    return position


def _read_csv(file: str, rejects: Rejects) -> Iterator[Record]:
    """Read a table with field names in the first line. Values are text; empty values are absent."""
    with _opened(file) as binary:
        text = io.TextIOWrapper(binary, encoding="utf-8-sig", newline="")
        rows = csv.reader(_lines(file, text), strict=True)
        names: list[str] = []
        while True:
            line = rows.line_num + 1  # a quoted cell may span several lines
            try:
                row = next(rows, None)
            except (csv.Error, UnicodeDecodeError) as error:
                raise UserError(f"{file}:{line}: not valid CSV ({first_line(error)})") from None
            if row is None:
                return
            if not row:
                continue
            if not names:
                names = _check_header(file, row)
            elif len(row) != len(names):
                rejects(f"{file}:{line}", f"{len(row)} cells, where the first line names {len(names)} fields")
            else:
                yield f"{file}:{line}", {name: cell or None for name, cell in zip(names, row, strict=True)}


def _check_header(file: str, names: list[str]) -> list[str]:
    if "" in names or len(set(names)) < len(names):
        raise UserError(f"{file}:1: the first line must have a name for each field, no two alike")
    return names


def _read_parquet(file: str, rejects: Rejects) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            json_columns = [field for field in table.schema_arrow if _has_json(field.type)]
            for rows in table.iter_batches():
                for row in rows.to_pylist():
                    number += 1
                    for field in json_columns:
                        row[field.name] = _decode_json(row[field.name], field.type)
                    yield f"{file}:{number}", row
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise UserError(f"cannot read data file {file} as Parquet: {first_line(error)}") from None


def _has_json(type: Any) -> bool:
    """Check whether an Arrow type contains JSON text, which `datasets` writes for its type `Json`."""
    import pyarrow

    inner = [type.field(i).type for i in range(type.num_fields)]
    return isinstance(type, pyarrow.JsonType) or any(_has_json(part) for part in inner)


def _decode_json(value: Any, type: Any) -> Any:
    import pyarrow

    if value is None or not _has_json(type):
        return value
    if isinstance(type, pyarrow.JsonType):
        return json.loads(value)
    if isinstance(value, dict):
        return {name: _decode_json(inner, type.field(name).type) for name, inner in value.items()}
    if pyarrow.types.is_map(type):
        return [(key, _decode_json(inner, type.item_type)) for key, inner in value]
    return [_decode_json(inner, type.value_type) for inner in value]


def _check_object(origin: str, value: Any, rejects: Rejects) -> Iterator[Record]:
    if isinstance(value, dict):
        yield origin, value
    else:
        rejects(
            origin, f"not a JSON object but {json.dumps(value)[:40]}; every record must be one JSON object"
        )


def _lines(file: str, lines: Any) -> Iterator[Any]:
    """Yield the lines of a text or binary file. Raises UserError for a line that is too long."""
    number = 0
    while line := lines.readline(LARGEST_LINE + 1):
        number += 1
        if len(line) > LARGEST_LINE:
            raise UserError(f"{file}:{number}: a line of more than {LARGEST_LINE >> 20} MiB, unpacked")
        yield line


@contextmanager
def _opened(file: str) -> Iterator[Any]:
    """Open a file for reading and unpack it. Raises UserError on any failure in the block, such as a read error."""
    try:
        with _open(file) as binary:
            yield binary
    except (EOFError, zlib.error) as error:
        raise UserError(f"cannot unpack data file {file}: {first_line(error)}") from None
    except OSError as error:
        reason = reason_of(error) if error.errno else first_line(error)
        raise UserError(f"cannot read data file {file}: {reason}") from None


def _open(file: str) -> Any:
    ending = Path(file).suffix.lower()
    if ending == ".gz":
        return gzip.open(file, "rb")
    if ending == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(file, compression="zstd"))
    return open(file, "rb")


def _describe_error(error: Exception) -> str:
    # A decoder counts lines from the start of one record, which would mislead.
    return (
        f"{error.msg.removesuffix(' at')} in column {error.colno}"
        if isinstance(error, json.JSONDecodeError)
        else first_line(error)
    )


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


READERS: dict[str, Callable[[str, Rejects], Iterator[Record]]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
"""Ending of a file -> its reader."""
