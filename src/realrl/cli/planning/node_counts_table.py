"""Table of the time and cost of plans on different numbers of nodes."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from realrl.cli.page.text import format_count, format_seconds, format_share
from realrl.planner.report.report import Objective, SizeReport, format_gap


def make_size_table(sizes: Sequence[SizeReport], chosen: str, objective: Objective) -> RenderableType:
    """Make a row for each number of nodes; `chosen`: the cluster of the plan that is shown.

    Speed-up is relative to the fewest nodes that anything fits on, efficiency what of it more nodes give; both are
    left out where kinds of devices differ.
    """
    priced = all(size.price is not None for size in sizes)
    base = min((size for size in sizes if size.estimate), key=lambda size: size.nodes, default=None)
    shown = {
        "kind": len({size.kind for size in sizes}) > 1,
        "speed-up": len({size.kind for size in sizes}) == 1,
        "efficiency": len({size.kind for size in sizes}) == 1,
        "price": priced,
        "an hour": priced and objective in ("step", "budget"),
    }
    rows = Table(box=None, pad_edge=False, header_style="italic")
    columns = ["", "kind", "nodes", "devices", *_FIGURES]
    columns = [name for name in columns if shown.get(name, True)]
    for name in columns:
        rows.add_column(name, justify="right")
    for size in sizes:
        figures = _figures(size, base) if base and size.estimate else dict.fromkeys(_FIGURES, "-")
        cells = {
            "": "→" if size.cluster == chosen else "",
            "kind": size.kind,
            "nodes": str(size.nodes),
            "devices": str(size.devices),
            **figures,
            "an hour": f"{size.price_per_hour or 0.0:,.4g}",
        }
        rows.add_row(*(cells[name] for name in columns))
    note = "device-hours and price are of 1,000 steps" if priced else "device-hours are of 1,000 steps"
    reason = name_reason(objective, priced=priced)
    refused = [Text(f"no plan for {size.cluster}: {size.refused}") for size in sizes if size.refused]
    return Group(rows, *refused, Text(f"→ {reason}, shown below; {note}", style="dim"))


def name_reason(objective: Objective, *, priced: bool) -> str:
    """Say why a number of nodes was chosen."""
    return {
        "time": "fastest",
        "cost": "cheapest" if priced else "fewest device-hours",
        "step": "cheapest whose step is short enough"
        if priced
        else "fewest nodes whose step is short enough",
        "budget": "fastest within the budget",
    }[objective]


_FIGURES = ("step", "tokens/s", "speed-up", "efficiency", "device-hours", "price", "an hour", "gap")


def _figures(size: SizeReport, base: SizeReport) -> dict[str, str]:
    """Figures of a number of nodes by column, but for its own price."""
    assert size.estimate is not None, "only sizes with a plan have figures"
    faster = base.step_seconds / size.step_seconds
    return {
        "step": format_seconds(size.step_seconds),
        "tokens/s": format_count(size.estimate.tokens_per_second),
        "speed-up": f"{faster:.2f} ×",
        "efficiency": format_share(faster * base.devices / size.devices),
        "device-hours": f"{1000 * size.device_hours:,.4g}",
        "price": f"{1000 * (size.price or 0.0):,.4g}",
        "gap": format_gap(size.gap or 0.0),
    }
