"""Sources of records in a recipe: one source, a list of sources, or a mixture with weights."""

import glob
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator

from realrl.config.errors import join
from realrl.config.explain import brief
from realrl.config.paths import local_path, make_absolute

ACCEPTED = "a source, a list of sources, or a mapping {SOURCE: WEIGHT}"
_ENTRY = ("source", "weight")
_NAMED = re.compile(r"(.+):([^:/\[\]]+(?:\[[^\]]*\])?)")
"""Matches `name:split`: path or name of a data set, and its split. A split may be a slice, such as
`train[:10%]`."""


@dataclass(frozen=True)
class RecordSource:
    """One source of records."""

    path: str
    """File, glob, directory, or name of a data set; see `data.records.read_records`."""
    weight: float = 1.0
    """Number of passes over the source in an epoch."""


def split_source(source: str) -> tuple[str, str]:
    """Split `name:split` into name and split. Returns two empty strings if there is no split."""
    named = _NAMED.fullmatch(source)
    return (named[1], named[2]) if named else ("", "")


def is_glob(source: str) -> bool:
    """Return whether a source is a pattern for names of files."""
    return not split_source(source)[0] and any(character in source for character in "*?[")


def make_source_absolute(source: str) -> str:
    """Make an existing path, a glob or `DIR:SPLIT` absolute. Names of data sets on the hub stay unchanged."""
    name, split = split_source(source)
    if name and not os.path.exists(local_path(source)):
        return f"{make_absolute(name)}:{split}"
    if not is_glob(source):
        return make_absolute(source)
    # The path of the working directory may itself contain pattern characters.
    return os.path.normpath(os.path.join(glob.escape(os.getcwd()), local_path(source)))


def list_sources(value: Any) -> tuple[RecordSource, ...]:
    """List the sources of a setting, which may be a text, a list or a mapping.

    Raises ValueError for anything else.
    """
    if isinstance(value, str):
        entries: Iterable[Any] = [value]
    elif isinstance(value, dict):
        entries = [{"source": source, "weight": weight} for source, weight in value.items()]
    elif isinstance(value, list | tuple):
        entries = value
    else:
        raise ValueError(f"{brief(value)} is not {ACCEPTED}")
    sources = tuple(_read_entry(entry) for entry in entries)
    if not sources:
        raise ValueError(f"{brief(value)} has no source; give {ACCEPTED}")
    paths = [source.path for source in sources]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise ValueError(f"{brief(twice)} is listed twice; give it once, with a weight")
    return sources


def name_sources(value: Any) -> str:
    """Return the paths of the sources as a list in words, for error messages."""
    return join([source.path for source in list_sources(value)])


def _read_entry(entry: Any) -> RecordSource:
    fields = {"source": entry} if isinstance(entry, str) else entry
    if not isinstance(fields, dict) or "source" not in fields or not set(fields) <= set(_ENTRY):
        raise ValueError(
            f"{brief(entry)} is no source; an entry of the list is text or {{source: TEXT, weight: NUMBER}}"
        )
    path, weight = fields["source"], fields.get("weight", 1.0)
    if not isinstance(path, str):
        raise ValueError(f"{brief(path)} is no source; in quotes it would be")
    if not path:
        raise ValueError("must not be empty")
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ValueError(f"the weight of {path} is {brief(weight)}; it must be a number above 0")
    if not math.isfinite(weight) or weight <= 0:
        raise ValueError(f"the weight of {path} is {brief(weight)}; it must be above 0, and finite")
    return RecordSource(path, float(weight))


def _check(value: Any) -> Any:
    """Check the sources and make their paths absolute. A text stays a text, a list a list, a mapping a mapping."""
    listed = list_sources(value)
    # Check again, because two different texts may name the same file.
    list_sources([make_source_absolute(source.path) for source in listed])
    if isinstance(value, str):
        return make_source_absolute(value)
    if isinstance(value, dict):
        return {make_source_absolute(source): weight for source, weight in value.items()}
    return [
        make_source_absolute(entry)
        if isinstance(entry, str)
        else {**entry, "source": make_source_absolute(entry["source"])}
        for entry in value
    ]


SourceList = Annotated[str | list[Any] | dict[str, Any], BeforeValidator(_check)]
"""Setting with one or more sources. `list_sources` reads it."""
