"""The published rows of `bench/published_rows.py`."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[3] / "bench"))
        yield importlib.import_module("published_rows")


@pytest.fixture(scope="module")
def compared(bench) -> list[tuple[Any, dict[str, Any]]]:
    return [(row, bench.compare(row)) for row in bench.read_rows()]


def test_decoding_is_predicted_well_and_every_larger_error_has_a_note(compared) -> None:
    """docs/notes/other-systems.md has the notes, and says how well each kind of row is predicted."""
    for row, one in compared:
        assert (abs(one["error"]) > 0.2) == (one["note"] is not None), row.name
        if row.of["work"] == "generate":
            limit = 0.11 if row.name.startswith("TensorRT-LLM 0.17") else 0.15
            assert abs(one["error"]) < limit, row.name
    assert sum(abs(one["error"]) <= 0.2 for _, one in compared) >= 14


def test_all_pairs_of_synchronous_and_asynchronous_rows_but_one_are_predicted_in_the_published_order(
    bench, compared
) -> None:
    rows = [row for row, _ in compared if "pair" in row.of]
    assert {row.of["system"].split()[0] for row in rows} == {"NeMo-RL", "verl", "AReaL"}
    found = bench.order([one for row, one in compared if "pair" in row.of])
    assert len(found) == len(rows) - len({row.of["pair"] for row in rows})
    wrong = [one["pair"] for one in found if (one["published"] > 1) != (one["predicted"] > 1)]
    # The next version of NeMo-RL is faster asynchronously, with the same asynchronous plan.
    assert wrong == ["NeMo-RL 0.4, 30B-A3B"]


def test_asynchronous_rows_generate_and_train_on_different_devices(bench) -> None:
    for row in bench.read_rows():
        if "ahead" in row.of:
            trains, generates = row.mesh("train_on"), row.mesh("generate_on")
            assert not trains.overlaps(generates), row.name
            assert trains.size + generates.size == row.spec.size, row.name


def test_every_row_names_its_source_and_setting(bench) -> None:
    for row in bench.read_rows():
        assert row.of["source"].startswith("https://"), row.name
        assert (
            row.of["settings"]
            and row.of["published"]
            and row.mesh("train_on").size == row.place(1).strategy.size
        )


def test_rows_of_fsdp_over_several_ranks_are_predicted_under_their_stage_of_zero(bench) -> None:
    for row in bench.read_rows():
        stage = row.place(1).strategy.zero
        assert (stage > 1) == ("FSDP" in row.of["settings"] and row.place(1).strategy.copies > 1), row.name
        assert (stage == 3) == (stage > 1 and "not resharded" not in row.of["settings"]), row.name


def test_served_requests_of_varied_lengths_end_with_few_rows(bench) -> None:
    row = next(row for row in bench.read_rows() if row.of.get("varied"))
    equal = bench.predict(bench.Row({**row.of, "varied": False}))
    assert bench.predict(row).value < equal.value


def test_stored_scores_of_attention_with_sinks_slow_a_row_down(bench) -> None:
    row = next(row for row in bench.read_rows() if row.of.get("fused_sinks"))
    stored = bench.predict(bench.Row({**row.of, "fused_sinks": False}))
    assert stored.value < 0.5 * bench.predict(row).value


def test_interleaved_stages_and_recomputation_are_what_the_row_says(bench) -> None:
    rows = [row for row in bench.read_rows() if "virtual_stages" in row.of]
    assert {row.vpp for row in rows} == {1, 4}  # the engine has no plan for some rows
    for row in rows:
        whole = bench.predict(bench.Row({**row.of, "virtual_stages": 1}))
        split = bench.predict(row)
        assert split.terms["bubble"] == pytest.approx(
            whole.terms["bubble"] / row.of["virtual_stages"], rel=0.01
        )
    seconds = [bench.predict(bench.Row({**row.of, "recompute": share})).seconds for share in (0.0, 0.5, 1.0)]
    assert seconds[1] == pytest.approx((seconds[0] + seconds[2]) / 2)


def test_lengths_have_the_published_mean(bench) -> None:
    for mean, longest in ((1060, 3964), (3206, 3986)):
        lengths = bench.sample_lengths(mean, longest)
        assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.02)
        assert max(lengths) <= longest
