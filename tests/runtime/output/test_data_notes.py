"""Notes on the records that a run has read."""

import json
from pathlib import Path

import pytest

from realrl.cli.app import run_app
from realrl.data.dataset import Dataset, SourceCount
from realrl.data.order import Order
from realrl.recipe.load import change_settings, parse_experiment
from realrl.recipe.training import TrainingConfig
from realrl.runtime.output.notes import list_data_notes, list_epoch_notes, list_model_notes
from tests.config.minimal import least
from tests.conftest import World, read_metrics, write_jsonl


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


def test_records_of_training_that_are_evaluated_on_are_noted():
    train, held_out = (Dataset({}, sources=[count(path, 1, 10) for path in paths]) for paths in ("ab", "bc"))
    assert list(list_data_notes({"train": train, "eval": held_out})) == [
        "data.eval: b is also in data.train, so evaluations do not show how a model does on new records"
    ]
    assert not list(list_data_notes({"train": None, "eval": held_out}))


@pytest.mark.parametrize(("rate", "noted"), [(1, True), (0.02, True), (0.01, False), (1e-5, False)])
def test_a_learning_rate_far_above_usual_ones_is_noted(rate: float, noted: bool) -> None:
    settings = change_settings(least("sft"), [("models.actor.optimizer.lr", rate)])
    notes = list(list_model_notes(parse_experiment(settings), 1, {}))
    assert [f"models.actor.optimizer.lr={rate:g} is far above usual rates" in note for note in notes] == [
        True
    ] * noted


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


def test_a_last_step_that_reaches_into_the_next_epoch_is_noted() -> None:
    def notes(size: int, epochs: float = 1.0, steps: int | None = None) -> list[str]:
        order = Order(size, 4, seed=1)
        training = TrainingConfig(epochs=epochs, steps=steps)
        return list(list_epoch_notes(training, order, steps or order.steps(epochs)))

    assert notes(10) == [
        "data.batch=4 does not divide the 10 records of training.epochs=1: the last of the 3 steps takes 2 records"
        " of the next epoch"
    ]
    assert "the 15 records of training.epochs=1.5" in notes(10, 1.5)[0]
    assert not notes(8) and not notes(10, 2.0) and not notes(10, steps=3)


def test_records_left_out_of_an_evaluation_are_among_its_metrics(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (world.root / "ppo.jsonl").read_text().splitlines()[:10]
    held_out = tmp_path / "eval.jsonl"
    held_out.write_text("\n".join([*lines, json.dumps({"prompt": "the film " * 600}), "{}"]) + "\n")
    recipe = world.recipe(
        "ppo", tmp_path, data__eval=str(held_out), data__on_error="skip", training={"epochs": 1.0}
    )
    assert run_app(["train", str(recipe)]) == 0
    said = capsys.readouterr().err
    assert "evaluation: " in said and "skipped_records 2  too_long_records 1" in said
    (metrics, *_) = read_metrics(tmp_path / "run", "eval")
    assert (metrics["skipped_records"], metrics["too_long_records"]) == (2, 1)
