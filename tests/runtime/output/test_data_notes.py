"""Notes on the records that a run has read."""

from pathlib import Path

from realrl.cli.app import run_app
from realrl.data.dataset import Dataset, SourceCount
from realrl.runtime.output.notes import list_data_notes
from tests.conftest import World, write_jsonl


def count(path: str, weight: float, items: int, skipped: int = 0, too_long: int = 0) -> SourceCount:
    reasons = tuple(f"{path}:{line}: wrong" for line in range(1, skipped + 1))
    return SourceCount(
        path=path, weight=weight, items=items, skipped=skipped, too_long=too_long, reasons=reasons
    )


def test_what_is_drawn_and_what_is_left_out_is_noted():
    train = Dataset({}, sources=[count("a", 2, 10, 3, 1), count("b", 0.5, 5)], notes=["alike"])
    held_out = Dataset({}, sources=[count("c", 1, 4, 1)], notes=["alike"])
    assert list(list_data_notes({"train": train, "eval": held_out})) == [
        "data.train: skipped 3 records, 1 of them too long, first a:1: wrong",
        "data.eval: skipped 1 records, first c:1: wrong",
        "data.train: an epoch takes 20 of a (10 records, weight 2) and 2 of b (5 records, weight 0.5)",
        "alike",
    ]


def test_sources_without_weights_need_no_note():
    assert not list(list_data_notes({"train": Dataset({}, sources=[count("a", 1, 10)]), "eval": None}))


def test_a_run_trains_on_a_mixture_for_the_epochs_asked_for(world: World, tmp_path: Path, capsys) -> None:
    first = write_jsonl(tmp_path / "first.jsonl", [{"text": "the film is great"}] * 6)
    second = write_jsonl(tmp_path / "second.jsonl", [{"prompt": "the cast", "completion": " is dull"}] * 8)
    recipe = world.recipe(
        "sft",
        tmp_path,
        data__train={first: 2, second: 0.5},
        data__batch=8,
        training__steps=None,
        training__epochs=1.5,
    )
    assert run_app(["train", str(recipe)]) == 0
    printed = capsys.readouterr()
    assert "an epoch takes 12 of" in printed.out + printed.err
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert sum('"kind": "train"' in line for line in lines) == 3
