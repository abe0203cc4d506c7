"""Table of the predicted and measured costs of a run."""

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from realrl.cli.monitoring.metrics import list_costs
from realrl.cli.page.text import format_measured, format_seconds, format_share, format_span
from realrl.config.values import format_bytes
from realrl.planner.simulate.estimate import LEVEL

if TYPE_CHECKING:
    from realrl.planner.report.comparison import Comparison

_ENOUGH_STEPS = 20
"""Minimum number of steps for a comparison with predictions, because the first steps of a run warm up."""
_PREDICTED = ("predicted\nseconds", "measured\nseconds", "ratio", "predicted\nmemory", "measured\nmemory")
_MEASURED = ("measured\nseconds", "measured\nmemory")


def compares(comparison: "Comparison") -> bool:
    """Check whether there are predictions, and enough steps for a comparison with them."""
    return comparison.spec is not None and comparison.step.steps >= _ENOUGH_STEPS


def costs_table(comparison: "Comparison") -> Table:
    """Make the table of costs, with predictions if `compares` allows it."""
    predicted = compares(comparison)
    table = Table(box=box.SIMPLE)
    # Only names may wrap, because a number must never be cut.
    table.add_column("in a step", overflow="fold")
    for name in _PREDICTED if predicted else _MEASURED:
        table.add_column(name, justify="right", no_wrap=True)

    costs = list_costs(comparison)
    for number, cost in enumerate(costs, 2):
        before, after = cost.predicted_seconds, cost.seconds
        seconds = ["" if value is None else format_measured(value) for value in (before, after)]
        memory = ["" if size is None else format_bytes(size) for size in (cost.predicted_bytes, cost.bytes)]
        cells = [*seconds, f"{after / before:.2f}" if before else "", *memory]
        # A line separates the whole step, which is last, from its parts.
        table.add_row(
            cost.name, *(cells if predicted else (cells[1], cells[4])), end_section=number == len(costs)
        )
    return table


def costs_note(comparison: "Comparison") -> str:
    """Explain the columns of the table."""
    steps = comparison.step.steps
    parts = [f"medians of {steps} steps" if steps > 1 else "one step"]
    if comparison.spec is None:
        parts.append("no predictions, because the kind of the devices is not known")
    elif not compares(comparison):
        parts[0] += ", too few to compare with predictions"
    else:
        span, seconds = comparison.predicted_interval, comparison.predicted_step_seconds
        if span is not None and seconds is not None:
            inside = "in" if comparison.step.median in span else "outside"
            within = f"{format_share(LEVEL)}: {format_span(span)}"
            parts[0] += f", {inside} the predicted {format_seconds(seconds)} ({within})"
        parts += ["ratio: measured over predicted", "memory: tensors on the fullest device"]
    if any(of.waited is not None for of in comparison.calls):
        parts.append("wait: of ranks for the function above")
    resident, peak = comparison.resident_bytes, comparison.peak_resident_bytes
    if resident is not None and peak is not None:
        parts.append(
            f"the largest process uses {format_bytes(resident)} of host memory, libraries included; its peak was"
            f" {format_bytes(peak)}"
        )
    return "; ".join(parts)
