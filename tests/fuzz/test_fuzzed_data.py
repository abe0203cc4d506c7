"""Data files, damaged at random: read, skipped with a reason, or refused in one message."""

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.testing.records import make_up_records
from tests.conftest import DATA, FORMS, World
from tests.fuzz.commands import check_command, fuzz

ALGORITHMS = ("sft", "reward", "ranked_reward", "process_reward", "kto", "ppo")
FORM_OF_FILE = {name: form for form, name in DATA.items()}
RECORDS = {name: make_up_records(FORM_OF_FILE[FORMS.get(name, "ppo")])[:8] for name in ALGORITHMS}
ENDINGS = (
    ".jsonl",
    ".json",
    ".csv",
    ".parquet",
    ".jsonl.gz",
    ".json.gz",
    ".csv.gz",
    ".jsonl.zst",
    ".csv.zst",
)
FIELDS = sorted(
    {field for records in RECORDS.values() for field in records[0]} | {"messages", "role", "content"}
)

texts = st.text(max_size=40) | st.sampled_from(
    ["", " ", "a\0b", "\ud800", "\ufeff", "x" * 300, "</s>", "<s>", "{}"]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.just(10**80),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS) | texts, inner, max_size=4)
    ),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "", 3]), "content": values}
    ),
    max_size=4,
)


@st.composite
def damaged_records(draw: Callable[..., Any]) -> tuple[str, list[Any]]:
    """Records of an algorithm's form, some with other values, fields, or none."""
    algorithm = draw(st.sampled_from(ALGORITHMS))
    records: list[Any] = [dict(record) for record in RECORDS[algorithm]]
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(records) - 1))
        record = records[at]
        kind = draw(st.sampled_from(["value", "value", "messages", "drop", "add", "replace", "other"]))
        if kind == "replace" or not isinstance(record, dict) or not record:
            records[at] = draw(values)
        elif kind in ("value", "messages"):
            record[draw(st.sampled_from(sorted(record)))] = draw(values if kind == "value" else messages)
        elif kind == "drop":
            del record[draw(st.sampled_from(sorted(record)))]
        elif kind == "add":
            record[draw(st.sampled_from(FIELDS) | texts)] = draw(values)
        else:
            records[at] = dict(RECORDS[draw(st.sampled_from(ALGORITHMS))][0])
    return algorithm, records


def write(records: list[Any], ending: str) -> bytes:
    """Write records as a file with this ending."""
    kind, _, packed = ending[1:].partition(".")
    if kind == "jsonl":
        content = "".join(json.dumps(record) + "\n" for record in records).encode()
    elif kind == "json":
        content = json.dumps(records).encode()
    else:
        # Tables hold texts here: what has no column is left out.
        rows = [record for record in records if isinstance(record, dict)]
        names = sorted({name for row in rows for name in row if name.isprintable()})
        cells = [{name: json.dumps(row.get(name)) for name in names} for row in rows]
        if kind == "csv":
            text = io.StringIO()
            writer = csv.DictWriter(text, names)
            writer.writeheader()
            writer.writerows(cells)
            content = text.getvalue().encode()
        else:
            table = pyarrow.BufferOutputStream()
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(cells), table)
            content = table.getvalue().to_pybytes()
    if packed == "gz":
        return gzip.compress(content, 1, mtime=0)
    return content if not packed else bytes(pyarrow.compress(content, "zstd", asbytes=True))


PIECES = (
    b"\n",
    b"[",
    b"]",
    b"{",
    b"}",
    b'"',
    b"\\",
    b",",
    b"\0",
    b"\xff\xfe",
    b"PAR1",
    b"\x1f\x8b",
    b"\xef\xbb\xbf",
)
PIECES += (
    b"[" * 100_000,
    b"1" * 5000,
    b'{"a":' * 5000,
    b"NaN",
    b"-Infinity",
    b"\r",
    b"\xed\xa0\x80",
    b'{"prompt": 1',
)


def damage(draw: Callable[..., Any], content: bytes) -> bytes:
    """Damage a file's bytes up to three times."""
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(content)))
        kind = draw(st.sampled_from(["flip", "cut", "piece", "drop", "repeat", "zeros", "head"]))
        if kind == "flip" and at < len(content):
            content = content[:at] + bytes([content[at] ^ draw(st.integers(1, 255))]) + content[at + 1 :]
        elif kind == "cut":
            content = content[:at]
        elif kind == "drop":
            content = content[:at] + content[at + draw(st.integers(1, 50)) :]
        elif kind == "repeat":
            content = content[:at] + content[max(0, at - draw(st.integers(1, 300))) :]
        elif kind == "zeros":
            content = content[:at] + bytes(draw(st.integers(1, 100))) + content[at:]
        elif kind == "head":
            content = draw(st.binary(max_size=12)) + content
        else:
            content = content[:at] + draw(st.sampled_from(PIECES)) + content[at:]
    return content


@st.composite
def damaged_files(draw: Callable[..., Any]) -> tuple[str, str, bytes]:
    """Algorithm, ending of a file and its bytes."""
    algorithm, records = draw(damaged_records())
    ending = draw(st.sampled_from(ENDINGS))
    content = damage(draw, write(records, ending))
    # A name may also promise another kind than there is.
    return algorithm, draw(st.sampled_from([ending, ending, ending, *ENDINGS])), content


@pytest.fixture(scope="module")
def recipes(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Algorithm -> recipe."""
    found = {}
    for name in ALGORITHMS:
        found[name] = world.recipe(name, tmp_path_factory.mktemp(name), data__batch=1)
    return found


@fuzz(150)
@given(damaged_files(), st.sampled_from(["fail", "skip"]))
def test_damaged_data_files_are_read_or_refused(
    recipes: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damaged: tuple[str, str, bytes],
    on_error: str,
) -> None:
    algorithm, ending, content = damaged
    file = tmp_path / f"records{ending}"
    file.write_bytes(content)
    arguments = ["data", str(recipes[algorithm]), f"data.train={file}", f"data.on_error={on_error}"]
    check_command(arguments, capsys)
    file.unlink()


def test_undamaged_files_of_every_kind_are_read(
    recipes: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{"prompt": "a film", "answer": "is good"}] * 4
    for ending in ENDINGS:
        file = tmp_path / f"records{ending}"
        file.write_bytes(write(records, ending))
        assert check_command(["data", str(recipes["sft"]), f"data.train={file}"], capsys) == 0
