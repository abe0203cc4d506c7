"""The published rows of `bench/published_rows.py`, and what docs/benchmarks.md says of them."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILE = ROOT / "bench" / "published_rows.py"
RESULTS = ROOT / "bench" / "results" / "published_rows.json"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("published_rows", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results() -> list[dict]:
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def test_predictions_are_those_of_the_documents(bench, results) -> None:
    """A change of the cost model that moves a row needs a new table: the bench writes it."""
    rows = bench.read_rows()
    assert [row.name for row in rows] == [one["row"] for one in results]
    for row, one in zip(rows, results, strict=True):
        assert bench.predict(row).value == pytest.approx(one["predicted"], rel=0.02), row.name


def test_documents_have_the_table_and_the_reason_of_every_row_beyond_a_fifth(bench, results) -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for line in bench.render(results):
        assert line in text, line
    for one in results:
        assert (abs(one["error"]) > 0.2) == bool(one["reason"]), one["row"]


def test_every_row_names_its_source_and_setting(bench) -> None:
    for row in bench.read_rows():
        assert row.of["source"].startswith("https://"), row.name
        assert (
            row.of["settings"]
            and row.of["published"]
            and row.spec.size == row.of["dp"] * row.of["tp"] * row.of["pp"]
        )


def test_rows_of_fsdp_over_several_ranks_are_predicted_under_their_stage_of_zero(bench) -> None:
    for row in bench.read_rows():
        stage = row.place(1).strategy.zero
        assert (stage > 1) == ("FSDP" in row.of["settings"] and row.of["dp"] > 1), row.name
        assert (stage == 3) == (stage > 1 and "not resharded" not in row.of["settings"]), row.name


def test_served_requests_of_varied_lengths_end_with_few_rows(bench) -> None:
    row = next(row for row in bench.read_rows() if row.of.get("varied"))
    equal = bench.predict(bench.Row({**row.of, "varied": False}))
    assert bench.predict(row).value < equal.value


def test_interleaved_stages_and_recomputation_are_what_the_row_says(bench) -> None:
    row = next(row for row in bench.read_rows() if "virtual_stages" in row.of)
    whole = bench.predict(bench.Row({**row.of, "virtual_stages": 1}))
    split = bench.predict(row)
    assert split.terms["bubble"] == pytest.approx(whole.terms["bubble"] / row.of["virtual_stages"])
    seconds = [bench.predict(bench.Row({**row.of, "recompute": share})).seconds for share in (0.0, 0.5, 1.0)]
    assert seconds[1] == pytest.approx((seconds[0] + seconds[2]) / 2)


def test_lengths_have_the_published_mean(bench) -> None:
    for mean, longest in ((1060, 3964), (3206, 3986)):
        lengths = bench.sample_lengths(mean, longest)
        assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.02)
        assert max(lengths) <= longest
