"""Records are read from every kind of source, and each knows where it came from."""

import csv
import gzip
import io
import json
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from realrl.config.errors import UserError
from realrl.data import record_files
from realrl.data.records import read_records
from realrl.data.rejects import Rejects

RECORDS = [{"prompt": "a"}, {"prompt": "é"}, {"prompt": "c"}]


def read(source: object) -> list:
    return list(read_records(str(source), Rejects("fail")))


def test_json_lines_are_numbered_from_one_and_blank_ones_ignored(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"prompt": "a"}\r\n\n{"prompt": "b"}', encoding="utf-8")
    assert read(file) == [(f"{file}:1", {"prompt": "a"}), (f"{file}:3", {"prompt": "b"})]


def test_a_json_array_names_the_line_each_object_starts_on(tmp_path):
    file = tmp_path / "x.json"
    file.write_text('[\n  {"prompt":\n "a"},\n\n  {"prompt": "b"}, {"prompt": "c"}\n]\n', encoding="utf-8")
    assert [(origin, record["prompt"]) for origin, record in read(file)] == [
        (f"{file}:2", "a"),
        (f"{file}:5", "b"),
        (f"{file}:5", "c"),
    ]


def test_a_json_file_may_hold_lines(tmp_path):
    file = tmp_path / "x.json"
    file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS), encoding="utf-8")
    assert [record for _, record in read(file)] == RECORDS


def test_parquet_rows_are_numbered(tmp_path):
    file = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), file)
    assert read(file) == [(f"{file}:{i}", record) for i, record in enumerate(RECORDS, 1)]


def test_a_glob_reads_its_files_in_order(tmp_path):
    for i in (2, 0, 1):
        (tmp_path / f"part-{i}.jsonl").write_text(json.dumps({"i": i}), encoding="utf-8")
    assert [record["i"] for _, record in read(tmp_path / "part-*.jsonl")] == [0, 1, 2]


def as_csv(records: list[dict[str, str]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(records[0]))
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue().encode()


def as_lines(records: list[dict[str, str]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def write_stream(content: bytes, compression: str) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, compression) as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def as_parquet(records: list[dict[str, str]]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), sink)
    return sink.getvalue().to_pybytes()


TEXTS = [{"prompt": 'a, "b"', "answer": "é\nc"}, {"prompt": "[1]", "answer": " d\r\n"}]
WRITERS = {
    ".jsonl": as_lines,
    ".json": lambda records: json.dumps(records, indent=1).encode(),
    ".csv": as_csv,
    ".parquet": as_parquet,
}
PACKERS = {
    "": lambda content: content,
    ".gz": gzip.compress,
    ".zst": lambda content: write_stream(content, "zstd"),
}


@pytest.mark.parametrize("capital", [False, True])
@pytest.mark.parametrize(
    ("ending", "packed"),
    [(".parquet", ""), *((ending, packed) for ending in (".jsonl", ".json", ".csv") for packed in PACKERS)],
)
def test_records_survive_every_kind_of_file(tmp_path, ending, packed, capital):
    suffix = ending + packed
    file = tmp_path / f"x.v1{suffix.upper() if capital else suffix}"
    file.write_bytes(PACKERS[packed](WRITERS[ending](TEXTS)))
    assert [record for _, record in read(file)] == TEXTS


def test_rows_of_csv_are_named_by_the_line_they_begin_on(tmp_path):
    (tmp_path / "x.csv").write_text('prompt,answer\n"a\nb",c\n\nd,\n')
    first, second = read(tmp_path / "x.csv")
    assert first == (f"{tmp_path}/x.csv:2", {"prompt": "a\nb", "answer": "c"})
    assert second == (f"{tmp_path}/x.csv:5", {"prompt": "d"})


def write_parts(folder: Path, *names: str) -> None:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        packed = gzip.compress if name.endswith(".gz") else bytes
        (folder / name).write_bytes(packed(as_lines([{"i": str(number)}])))


def test_a_directory_stands_for_its_files(tmp_path):
    write_parts(tmp_path, "b.jsonl", "sub/a.jsonl", "a.jsonl.gz", ".cache/c.jsonl", "README.md")
    assert [record["i"] for _, record in read(tmp_path)] == ["2", "0", "1"]


def test_a_directory_of_splits_is_read_by_split(tmp_path):
    write_parts(tmp_path, "data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl")
    assert [record["i"] for _, record in read(f"{tmp_path}:test")] == ["1"]
    with pytest.raises(UserError, match=r"files of the splits test, train; give one as .*:SPLIT"):
        read(tmp_path)
    with pytest.raises(UserError, match="name begins with 'dev'; there are test and train"):
        read(f"{tmp_path}:dev")


def test_a_directory_of_several_kinds_of_files_is_a_user_error(tmp_path):
    write_parts(tmp_path, "a.jsonl", "info.json")
    with pytest.raises(UserError, match=r"end with \.json and \.jsonl; give those with records"):
        read(tmp_path)


def test_a_glob_may_name_files_of_several_kinds(tmp_path):
    write_parts(tmp_path, "a.jsonl", "b.jsonl.gz")
    assert [record["i"] for _, record in read(tmp_path / "*")] == ["0", "1"]
    (tmp_path / "c.txt").touch()
    with pytest.raises(UserError, match=r"c\.txt has an unsupported format"):
        read(tmp_path / "*")


def test_a_data_set_saved_on_disk_is_read(tmp_path):
    datasets.Dataset.from_list(RECORDS).save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved") == [(f"{tmp_path}/saved:{i}", r) for i, r in enumerate(RECORDS, 1)]


def test_a_split_of_a_saved_data_set_is_read(tmp_path):
    splits = {"train": datasets.Dataset.from_list(RECORDS), "test": datasets.Dataset.from_list(RECORDS[:1])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    assert read(f"{tmp_path}/saved:test") == [(f"{tmp_path}/saved:test:1", RECORDS[0])]
    with pytest.raises(UserError, match="has the splits train, test"):
        read(tmp_path / "saved")


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("org/name:train", ("org/name", None)),
        ("org/name:main:train", ("org/name", "main")),
        ("org/name/main:train", ("org/name", "main")),
        ("name:train", ("name", None)),
    ],
)
def test_the_hub_is_asked_for_name_configuration_and_split(monkeypatch, name, call):
    asked = []

    def load_dataset(path, config, *, split):
        asked.append((path, config, split))
        return RECORDS

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for split in ("", "[:10%]"):
        assert read(name + split)[1] == (f"{name}{split}:2", RECORDS[1])
    assert asked == [(*call, "train"), (*call, "train[:10%]")]


def test_a_data_set_missing_on_the_hub_is_a_user_error(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise datasets.exceptions.DatasetNotFoundError("does not exist on the Hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        UserError, match=r"cannot load data set 'org/x', split 'train': does not exist on the Hub$"
    ):
        read("org/x:train")


@pytest.mark.parametrize(
    "source",
    ["missing.jsonl", "missing-*.parquet", "missing", "README.txt", "x.jsonl:train", "*.csv.gz", "d/*"],
)
def test_a_missing_source_is_a_user_error(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").touch()
    with pytest.raises(UserError, match="does not exist"):
        read(source)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("x.jsonl", b'{"a": 1}\n{"a": \n', r"x\.jsonl:2: not valid JSON \(Expecting value in column"),
        ("x.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', r"x\.jsonl:2: not valid JSON"),
        ("x.jsonl", b"[1, 2]\n", r"x\.jsonl:1: not a JSON object but \[1, 2\]"),
        ("x.jsonl", b"[" * 100_000, r"x\.jsonl:1: not valid JSON"),
        ("x.jsonl", b'{"a": 1}\n{"a": 1, "b": 2, "a": 3}\n', r"x\.jsonl:2: key 'a' twice"),
        ("x.jsonl", b'{"a": [{"b": 1, "b": 1}]}\n', r"x\.jsonl:1: key 'b' twice"),
        ("x.json", b'[{"a": 1},\n{"a": 1, "a": 3}]', r"x\.json:2: key 'a' twice"),
        ("x.json", b'[{"a": 1},\n{"a": 2', r"x\.json:2: not valid JSON"),
        ("x.json", b'[{"a": 1},\n3]', r"x\.json:2: not a JSON object but 3"),
        ("x.json", b"[\xff]", r"cannot read data file .*x\.json"),
        ("x.jsonl.gz", b"nonsense", r"cannot read data file .*x\.jsonl\.gz: Not a gzipped file"),
        ("x.jsonl.gz", gzip.compress(b"{}" * 99, mtime=0)[:-9], r"cannot unpack data file .*x\.jsonl\.gz"),
        ("x.jsonl.zst", b"nonsense", r"cannot read data file .*x\.jsonl\.zst"),
        ("x.csv", b"a,b\n1,2,3\n", r"x\.csv:2: 3 cells, where the first line names 2 fields"),
        ("x.csv", b"a,b\n1,2\n1,\xff\n", r"x\.csv:.*: not valid CSV"),
        ("x.csv", b'a,b\n1,2\n1,"2\n', r"x\.csv:3: not valid CSV"),
        ("x.csv", b"a,a\n1,2\n", r"x\.csv:1: the first line must have a name for each field, no two alike"),
        ("x.parquet", b"nonsense", r"cannot read data file .*x\.parquet as Parquet"),
    ],
)
def test_content_that_cannot_be_read_is_named_by_file_and_line(tmp_path, name, content, complaint):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=complaint):
        read(tmp_path / name)


@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_records_with_a_key_twice_can_be_skipped(tmp_path, name):
    lines = ['{"a": 1}', '{"a": 2, "a": 3}', '{"a": 4}']
    text = "\n".join(lines) if name == "x.jsonl" else "[" + ",\n".join(lines) + "]"
    (tmp_path / name).write_text(text)
    rejects = Rejects("skip")
    assert [record["a"] for _, record in read_records(str(tmp_path / name), rejects)] == [1, 4]
    assert rejects.reasons == [f"{tmp_path / name}:2: key 'a' twice"]


def test_a_folder_that_is_no_data_set_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="is a directory without records"):
        read(tmp_path)


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".json"])
def test_small_files_that_unpack_to_huge_ones_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(record_files, "LARGEST_LINE", 1 << 20)
    monkeypatch.setattr(record_files, "LARGEST_ARRAY", 1 << 20)
    file = tmp_path / f"bomb{ending}.gz"
    file.write_bytes(gzip.compress(b"[" + bytes(2 << 20)))
    assert file.stat().st_size < 4096
    with pytest.raises(UserError, match=r"bomb.*: (a line of )?more than .* unpacked"):
        list(read_records(str(file), Rejects("skip")))
