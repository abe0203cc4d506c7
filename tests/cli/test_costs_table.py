"""The table of predicted and measured costs at the end of a run."""

from io import StringIO

import pytest
from rich.console import Console

from realrl.cli.costs import costs_note, costs_table
from realrl.dataflow.call import Call, Kind
from realrl.planner.report.comparison import Comparison, MoveCosts, Seconds
from realrl.planner.simulate.estimate import Interval
from tests.planner.profiles.test_calibrate import SPEC, run


def text(comparison: Comparison, width: int = 80) -> str:
    console = Console(width=width, file=StringIO())
    with console.capture() as capture:
        console.print(costs_table(comparison))
    return capture.get()


def predicted(steps: int = 20) -> Comparison:
    costs = run({"actor.generate": 40.0, "actor.train": 2.5}, SPEC)
    calls = tuple(
        of.model_copy(update={"predicted_seconds": 20.0, "bytes": 3 << 30, "predicted_bytes": 2 << 30})
        for of in costs.calls
    )
    move = MoveCosts(instruction="x", seconds=Seconds.of([0.25]), predicted_seconds=0.5)
    changes = {"calls": calls, "predicted_step_seconds": 50.0, "reallocations": (move,)}
    changes["step"] = costs.step.model_copy(update={"steps": steps})
    return costs.model_copy(update=changes)


def test_the_costs_table_has_predicted_and_measured_seconds_and_their_ratio() -> None:
    rows = {line.split()[0]: line.split()[1:] for line in text(predicted()).splitlines() if line.split()}
    assert rows["actor.generate"] == ["20.0", "40.0", "2.00", "2.00", "GiB", "3.00", "GiB"]
    assert rows["actor.train"] == ["20.0", "2.500", "0.12", "2.00", "GiB", "3.00", "GiB"]
    assert rows["reallocations"] == ["0.500", "0.250", "0.50"]
    assert rows["whole"] == ["step", "50.0", "42.5", "0.85"]


@pytest.mark.parametrize(("high", "word"), [(60.0, "in"), (42.0, "outside")])
def test_the_note_says_whether_the_step_was_in_the_predicted_interval(high: float, word: str) -> None:
    costs = predicted().model_copy(update={"predicted_interval": Interval(38.0, high)})
    assert f"{word} the predicted 50.0 s (90 %: 38 to {high:.0f} s)" in costs_note(costs)
    assert "90 %" not in costs_note(predicted())


def test_a_short_run_is_not_compared_with_predictions() -> None:
    costs = predicted(steps=19).model_copy(update={"predicted_interval": Interval(1.0, 2.0)})
    found = text(costs)
    assert "predicted" not in found and "ratio" not in found and "40.0" in found
    assert costs_note(costs).startswith("medians of 19 steps, too few to compare with predictions")
    assert "outside" not in costs_note(costs) and "ratio" not in costs_note(costs)


def test_the_costs_table_without_a_prediction_shows_measured_seconds_only() -> None:
    unknown = run({"actor.generate": 40.0}, None)
    found = text(unknown)
    assert "predicted" not in found and "ratio" not in found and "40.0" in found
    assert "kind of the devices is not known" in costs_note(unknown)


@pytest.mark.parametrize("width", [72, 80, 200])
def test_the_costs_table_never_cuts_names_of_calls(width: int) -> None:
    assert "actor.generate" in text(predicted(), width)


@pytest.mark.parametrize("name", ["reward.function", "actor_of_a_long_name.inference"])
def test_the_costs_table_fits_80_columns_with_all_digits_and_units(name: str) -> None:
    costs = predicted()
    keys = ("sequences",)
    call = Call(name, None, Kind.FUNCTION, keys, ("score",), keys, function="rewards.py:f")
    waited = costs.calls[0].model_copy(
        update={
            "call": call,
            "waited": Seconds.of([1234.5]),
            "seconds": Seconds.of([99999.4]),
            "predicted_seconds": 12345.0,
            "bytes": 998 << 30,
            "predicted_bytes": 997 << 30,
        }
    )
    lines = text(costs.model_copy(update={"calls": (*costs.calls, waited)})).splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in "".join(lines)
    row = next(i for i, line in enumerate(lines) if name[:10] in line)
    assert lines[row].split()[1:] == ["12345", "99999", "8.10", "997", "GiB", "998", "GiB"]
    assert next(line for line in lines[row:] if "wait" in line).split() == ["wait", "1234"]
    assert "wait: of ranks for the function" in costs_note(costs.model_copy(update={"calls": (waited,)}))
