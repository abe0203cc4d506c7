"""Table of the predicted and measured costs of a run."""

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from realrl.cli.page.text import format_seconds, format_span
from realrl.config.values import format_bytes
from realrl.planner.simulate.estimate import LEVEL

if TYPE_CHECKING:
    from realrl.planner.report.comparison import Comparison

_ENOUGH_STEPS = 20
"""Steps from which on their times are compared with the predicted ones: the first steps of a run warm up."""
_MEASURED = ("measured\nseconds", "measured\nmemory")
_COLUMNS = ("predicted\nseconds", _MEASURED[0], "ratio", "predicted\nmemory", _MEASURED[1])


def compares(comparison: "Comparison") -> bool:
    """Check whether there are predictions, and enough steps to compare with them."""
    return comparison.spec is not None and comparison.step.steps >= _ENOUGH_STEPS


def costs_table(comparison: "Comparison") -> Table:
    """Make the table of costs: predictions only where there are any, and enough steps to compare with them.

    A row for each call, below a function one more for waiting for it, and rows for reallocations and for the step.
    """
    predicted = compares(comparison)
    table = Table(box=box.SIMPLE)
    # The only column that may wrap: numbers are never cut.
    table.add_column("in a step", overflow="fold")
    for name in _COLUMNS if predicted else _MEASURED:
        table.add_column(name, justify="right", no_wrap=True)
    rows: list[tuple[str, float | None, float, int | None, int | None]] = []
    for of in comparison.calls:
        rows.append((of.call.name, of.predicted_seconds, of.seconds.median, of.predicted_bytes, of.bytes))
        if of.waited is not None:
            rows.append(("  wait", None, of.waited.median, None, None))
    moves = comparison.reallocations
    if moves:
        expected = sum(move.predicted_seconds or 0.0 for move in moves)
        rows.append(("reallocations", expected, sum(move.seconds.median for move in moves), None, None))
    last = len(rows) - 1
    rows.append(("whole step", comparison.predicted_step_seconds, comparison.step.median, None, None))
    for number, (name, before, after, bytes_before, bytes_after) in enumerate(rows):
        ratio = f"{after / before:.2f}" if before else ""
        cells = (_seconds(before), _seconds(after), ratio, _memory(bytes_before), _memory(bytes_after))
        table.add_row(name, *(cells if predicted else (cells[1], cells[4])), end_section=number == last)
    return table


def costs_note(comparison: "Comparison") -> str:
    """Explain the columns of the table."""
    steps = comparison.step.steps
    measured = f"medians of {steps} steps" if steps > 1 else "one step"
    if comparison.spec is None:
        unknown = "nothing was predicted, since the kind of the devices is not known"
        return f"{measured}; {unknown}{_wait_note(comparison)}{_resident_note(comparison)}"
    if not compares(comparison):
        few = "too few to compare with predictions"
        return f"{measured}, {few}{_wait_note(comparison)}{_resident_note(comparison)}"
    memory = "memory: tensors on the fullest device"
    span, seconds = comparison.predicted_interval, comparison.predicted_step_seconds
    if span is not None and seconds is not None:
        inside = "in" if comparison.step.median in span else "outside"
        within = f"{LEVEL:.0%}".replace("%", " %")
        measured += f", {inside} the predicted {format_seconds(seconds)} ({within}: {format_span(span)})"
    return (
        f"{measured}; ratio: measured over predicted; {memory}{_wait_note(comparison)}"
        f"{_resident_note(comparison)}"
    )


def _resident_note(comparison: "Comparison") -> str:
    resident, peak = comparison.resident_bytes, comparison.peak_resident_bytes
    if resident is None or peak is None:
        return ""
    return (
        f"; the largest process has {format_bytes(resident)} of host memory, libraries included, and had"
        f" {format_bytes(peak)}"
    )


def _wait_note(comparison: "Comparison") -> str:
    waits = any(of.waited is not None for of in comparison.calls)
    return "; wait: of ranks for the function" if waits else ""


def _seconds(value: float | None) -> str:
    """Format seconds with at least three significant digits, without an exponent, down to a millisecond."""
    return "" if value is None else f"{value:.{3 if value < 10 else 1 if value < 1000 else 0}f}"


def _memory(size: int | None) -> str:
    return "" if size is None else format_bytes(size)
