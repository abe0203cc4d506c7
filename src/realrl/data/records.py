"""Sources of records: files, directories of files, and Hugging Face data sets."""

import re
from collections.abc import Callable, Iterator
from glob import glob
from itertools import chain
from pathlib import Path
from typing import Any

from realrl.config.errors import UserError, join
from realrl.config.paths import local_path
from realrl.data.record_files import Record, find_ending, first_line, read_file
from realrl.data.rejects import Rejects
from realrl.recipe.sources import is_glob, split_source

ACCEPTED = (
    "a .jsonl, .json, .csv or .parquet file (globs allowed; .gz or .zst too), a directory of such files or of a"
    " saved data set, or NAME:SPLIT on the hub"
)
_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
"""First words of file names in a directory with several splits."""

RecordReader = Callable[[str, Rejects], Iterator[Record]]
"""Function that yields the records of a source, such as `read_records`."""


def read_records(source: str, rejects: Rejects) -> Iterator[Record]:
    """Yield the records of `source`, in the order of the files and of their lines.

    source: a file or glob; a directory of files of one ending, or a directory written by `Dataset.save_to_disk`
    (`DIR`, or `DIR:SPLIT` if it has splits); or a hub data set (`NAME:SPLIT`, `NAME/CONFIG:SPLIT` or
    `NAME:CONFIG:SPLIT`). Lines that are not a JSON object, and objects with a repeated key, go to `rejects`. A
    table has every column in every row, so null fields count as absent. Raises UserError if the source does not
    exist or cannot be opened.
    """
    return (
        (origin, {name: value for name, value in record.items() if value is not None})
        for origin, record in _records(source, rejects)
    )


def _records(source: str, rejects: Rejects) -> Iterator[Record]:
    source = str(local_path(source))
    path, split = split_source(source)
    if Path(source).is_dir():
        return _read_directory(source, None, rejects)
    if path and Path(path).is_dir():
        return _read_directory(path, split, rejects)
    if find_ending(source) is not None or is_glob(source) or Path(source).is_file():
        return chain.from_iterable(read_file(file, rejects) for file in _find_files(source))
    if not path or Path(path).is_file() or find_ending(path) is not None:
        raise UserError(f"data source {source!r} does not exist; give {ACCEPTED}")
    return _read_hub(path, split)


def _find_files(source: str) -> list[str]:
    """List the files of a name or glob. Raises UserError if there is none, or for a file of unknown kind."""
    files = [file for file in sorted(glob(source, recursive=True)) if Path(file).is_file()]
    files = files or ([source] if Path(source).is_file() else [])
    if not files:
        raise UserError(f"data file {source} does not exist")
    unknown = next((file for file in files if find_ending(file) is None), None)
    if unknown is not None:
        raise UserError(_not_understood(unknown))
    return files


def _not_understood(file: str) -> str:
    suffix = Path(file).suffix.lower()
    if suffix in (".zip", ".bz2", ".xz", ".tar", ".tgz", ".gz", ".zst"):
        return (
            f"data file {file} has an unsupported compression; unpack it, or give it as .jsonl.gz or"
            " .jsonl.zst (.json and .csv likewise)"
        )
    return (
        f"data file {file} has an unsupported format; write its records as .jsonl, one JSON object a line, as"
        " .json, an array of objects, as .csv, or as .parquet"
    )


def _read_directory(directory: str, split: str | None, rejects: Rejects) -> Iterator[Record]:
    """Read a saved data set, or the files of a directory: all, or the files whose name begins with the split."""
    if any((Path(directory) / name).exists() for name in _SAVED):
        return _read_saved(directory, split)
    found = (str(path) for path in Path(directory).rglob("*") if path.is_file())
    hidden = re.compile(r"(^|/)\.")
    files = sorted(
        file for file in found if find_ending(file) and not hidden.search(file[len(directory) :].lstrip("/"))
    )
    if not files:
        raise UserError(f"data source {directory} is a directory without records; give {ACCEPTED}")
    splits = sorted({_find_split(file) for file in files} - {""})
    if split is not None:
        files = [file for file in files if _find_split(file) == split.lower()]
        if not files:
            known = f"there are {join(splits)}" if splits else f"give {directory} alone"
            raise UserError(f"directory {directory} has no files whose name begins with {split!r}; {known}")
    elif len(splits) > 1:
        raise UserError(
            f"directory {directory} has files of the splits {', '.join(splits)}; give one as {directory}:SPLIT"
        )
    endings = sorted({str(find_ending(file)) for file in files})
    if len(endings) > 1:
        raise UserError(
            f"directory {directory} has files that end with {join(endings)}; give those with records, as in"
            f" {directory}/*{endings[0]}"
        )
    return chain.from_iterable(read_file(file, rejects) for file in files)


def _find_split(file: str) -> str:
    """Find the split at the beginning of a file name such as `train-00000-of-00002.parquet`; empty if none."""
    first = re.match(r"[a-z]*", Path(file).name.lower())
    assert first is not None, "the pattern may match nothing"
    return first[0] if first[0] in _SPLITS else ""


def _read_saved(directory: str, split: str | None) -> Iterator[Record]:
    import datasets

    try:
        loaded = datasets.load_from_disk(directory)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{directory} is not a saved data set: {first_line(error)}") from None
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise UserError(
                f"data set {directory} has the splits {', '.join(loaded)}; give one as {directory}:SPLIT"
            )
        loaded = loaded[split]
    elif split is not None:
        raise UserError(f"data set {directory} has no splits; give {directory} alone")
    return _rows(directory if split is None else f"{directory}:{split}", loaded)


def _read_hub(name: str, split: str) -> Iterator[Record]:
    import datasets

    path, _, config = name.partition(":")
    if not config and path.count("/") == 2:
        path, _, config = path.rpartition("/")
    try:
        loaded = datasets.load_dataset(path, config or None, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"cannot load data set {name!r}, split {split!r}: {first_line(error)}") from None
    return _rows(f"{name}:{split}", loaded)


def _rows(name: str, rows: Any) -> Iterator[Record]:
    return ((f"{name}:{number}", dict(row)) for number, row in enumerate(rows, 1))


_SAVED = ("dataset_info.json", "dataset_dict.json", "state.json")
"""A saved data set has at least one of these files."""
