"""Table of the time and cost of plans on different numbers of nodes."""

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from realrl.cli.page.text import format_count, format_count_of, format_seconds, format_share
from realrl.planner.report.gap import format_gap
from realrl.planner.report.report import Objective, SizeReport


def make_size_table(sizes: Sequence[SizeReport], chosen: int, objective: Objective) -> RenderableType:
    """Make a row for each number of nodes; `chosen`: that of the plan that is shown.

    Speed-up is relative to the fewest nodes that anything fits on, efficiency what of it more nodes give.
    """
    priced = all(size.price is not None for size in sizes)
    head = ["", "nodes", "devices", "step", "tokens/s", "speed-up", "efficiency", "device-hours"]
    rows = Table(box=None, pad_edge=False, header_style="italic")
    for name in [*head, *(["price"] if priced else []), "gap"]:
        rows.add_column(name, justify="right")
    base = min((size for size in sizes if size.estimate), key=lambda size: size.nodes, default=None)
    for size in sizes:
        figures = _figures(size, base, priced=priced) if base and size.estimate else ["-"] * (6 + priced)
        mark = "→" if size.nodes == chosen else ""
        rows.add_row(mark, str(size.nodes), str(size.devices), *figures)
    note = "device-hours and price are of 1,000 steps" if priced else "device-hours are of 1,000 steps"
    reason = {"time": "fastest", "cost": "cheapest" if priced else "fewest device-hours"}[objective]
    refused = [
        Text(f"does not fit {format_count_of(size.nodes, 'node')}: {size.refused}")
        for size in sizes
        if size.refused
    ]
    return Group(rows, *refused, Text(f"→ {reason}, shown below; {note}", style="dim"))


def _figures(size: SizeReport, base: SizeReport, *, priced: bool) -> list[str]:
    assert size.estimate is not None, "only sizes with a plan have figures"
    faster = base.step_seconds / size.step_seconds
    price = size.price if priced and size.price is not None else math.nan
    return [
        format_seconds(size.step_seconds),
        format_count(size.estimate.tokens_per_second),
        f"{faster:.2f} ×",
        format_share(faster * base.devices / size.devices),
        f"{1000 * size.device_hours:,.4g}",
        *([f"{1000 * price:,.4g}"] if priced else []),
        format_gap(size.gap or 0.0),
    ]
