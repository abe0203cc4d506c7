"""Readers of records: JSON lines, JSON and Parquet files, and Hugging Face data sets."""

import json
from collections.abc import Iterator
from glob import glob
from itertools import chain
from pathlib import Path
from typing import Any

from realrl.config.errors import UserError
from realrl.config.files import reason_of
from realrl.config.json_file import RepeatedKeyError, unique_keys
from realrl.config.paths import local_path
from realrl.data.rejects import Rejects

Record = tuple[str, dict[str, Any]]
"""Origin of a record, as FILE:LINE (FILE:ROW in tables, counted from 1), and the record."""

ACCEPTED = (
    "a .jsonl, .json or .parquet file (globs allowed), a saved data set directory, or NAME:SPLIT on the hub"
)


def read_records(source: str, rejects: Rejects) -> Iterator[Record]:
    """Yield the records of `source`, in the order of the files and of their lines.

    source: a file or glob, a directory written by `Dataset.save_to_disk` (`DIR`, or `DIR:SPLIT` if it has
    splits), or a hub data set (`NAME:SPLIT` or `NAME:CONFIG:SPLIT`). Lines that are not a JSON object,
    and objects that have a key twice, go to `rejects`. A table has every column in every row, so fields that are
    null count as absent. UserError where the source does not exist or cannot be opened.
    """
    return (
        (origin, {name: value for name, value in record.items() if value is not None})
        for origin, record in _records(source, rejects)
    )


def _records(source: str, rejects: Rejects) -> Iterator[Record]:
    source = str(local_path(source))
    suffix = Path(source).suffix
    if suffix in _READERS:
        files = sorted(glob(source, recursive=True)) or ([source] if Path(source).is_file() else [])
        if not files:
            raise UserError(f"data file {source} does not exist")
        return chain.from_iterable(_READERS[suffix](file, rejects) for file in files)
    directory, _, split = source.rpartition(":")
    if Path(source).is_dir():
        if not any((Path(source) / name).exists() for name in _SAVED):
            raise UserError(_not_saved(source))
        return _saved_data_set(source, None)
    if not directory or Path(directory).is_file():
        raise UserError(_not_understood(source))
    return _saved_data_set(directory, split) if Path(directory).is_dir() else _hub_data_set(directory, split)


def _not_understood(source: str) -> str:
    """Write the error message for a source that is neither a file with a known suffix nor a data set."""
    if not Path(source).exists():
        return f"data source {source!r} does not exist; give {ACCEPTED}"
    suffixes = [suffix.lower() for suffix in Path(source).suffixes]
    if suffixes and suffixes[-1] in _PACKED:
        return f"data file {source} is compressed; unpack it, and give the file inside"
    if suffixes and suffixes[-1] in _READERS:
        return f"data file {source}: write the end of its name in small letters, {suffixes[-1]}"
    return (
        f"data file {source} is of no kind that is read; write its records as .jsonl, one JSON object a line, as"
        " .json, an array of objects, or as .parquet"
    )


def _not_saved(directory: str) -> str:
    """Write the error message for a directory that `Dataset.save_to_disk` has not written."""
    message = f"data source {directory} is a directory that Dataset.save_to_disk has not written"
    suffix = next((suffix for suffix in _READERS if any(Path(directory).glob(f"*{suffix}"))), None)
    accepted = ACCEPTED if suffix is None else f"{directory}/*{suffix} for its files"
    return f"{message}; give {accepted}"


def _json_lines(file: str, rejects: Rejects) -> Iterator[Record]:
    with _open(file) as lines:
        for number, line in enumerate(lines, 1):
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
            yield from _object(origin, value, rejects)


def _json(file: str, rejects: Rejects) -> Iterator[Record]:
    """Decode an array of objects one by one, so that their lines are known; JSON lines pass too."""
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read data file {file}: {error}") from None
    position = _skip(text, 0, "")
    if text[position : position + 1] != "[":
        yield from _json_lines(file, rejects)
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
            yield from _object(f"{file}:{line}", value, rejects)
        else:
            rejects(f"{file}:{line}", reason)
        position = _skip(text, end, ",")


def _decode(text: str, position: int) -> tuple[Any, int, str | None]:
    """Decode the JSON value at `position`: the value, its end, and the reason why it cannot be used, if any."""
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


def _parquet(file: str, rejects: Rejects) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for rows in table.iter_batches():
                for row in rows.to_pylist():
                    number += 1
                    yield f"{file}:{number}", row
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"cannot read data file {file} as Parquet: {_first_line(error)}") from None


def _saved_data_set(directory: str, split: str | None) -> Iterator[Record]:
    import datasets

    try:
        loaded = datasets.load_from_disk(directory)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{directory} is not a saved data set: {_first_line(error)}") from None
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise UserError(
                f"data set {directory} has the splits {', '.join(loaded)}; give one as {directory}:SPLIT"
            )
        loaded = loaded[split]
    elif split is not None:
        raise UserError(f"data set {directory} has no splits; give {directory} alone")
    return _rows(directory if split is None else f"{directory}:{split}", loaded)


def _hub_data_set(name: str, split: str) -> Iterator[Record]:
    import datasets

    path, _, config = name.partition(":")
    try:
        loaded = datasets.load_dataset(path, config or None, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"cannot load data set {name!r}, split {split!r}: {_first_line(error)}") from None
    return _rows(f"{name}:{split}", loaded)


def _rows(name: str, rows: Any) -> Iterator[Record]:
    return ((f"{name}:{number}", dict(row)) for number, row in enumerate(rows, 1))


def _object(origin: str, value: Any, rejects: Rejects) -> Iterator[Record]:
    if isinstance(value, dict):
        yield origin, value
    else:
        rejects(
            origin, f"not a JSON object but {json.dumps(value)[:40]}; every record must be one JSON object"
        )


def _open(file: str) -> Any:
    try:
        return open(file, "rb")
    except OSError as error:
        raise UserError(f"cannot read data file {file}: {reason_of(error)}") from None


def _describe_error(error: Exception) -> str:
    # A decoder's own line numbers count from the start of one record, and would mislead.
    return (
        f"{error.msg.removesuffix(' at')} in column {error.colno}"
        if isinstance(error, json.JSONDecodeError)
        else _first_line(error)
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


_PACKED = (".gz", ".zip", ".bz2", ".xz", ".zst", ".tar", ".tgz")
_SAVED = ("dataset_info.json", "dataset_dict.json", "state.json")
"""Files of which a saved data set has at least one."""
_READERS = {".jsonl": _json_lines, ".json": _json, ".parquet": _parquet}
