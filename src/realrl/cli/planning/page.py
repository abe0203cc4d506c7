"""Page of a plan: one file that any browser opens without a network, or its picture alone."""

from pathlib import Path
from typing import TYPE_CHECKING

from realrl import __version__
from realrl.cli.page.memory import list_parts, make_memory_cards
from realrl.cli.page.sections import list_figures, list_models, list_terms, make_time_bars, write_verdict
from realrl.cli.page.tables import (
    list_rivals,
    make_alternatives_table,
    make_calls_table,
    make_moves_table,
    make_sizes_table,
    place_bound,
)
from realrl.cli.page.templating import find_template
from realrl.cli.page.text import format_batch, format_devices
from realrl.cli.page.timeline import draw_timeline
from realrl.cli.page.words import list_legend, list_remarks, write_notes
from realrl.cli.planning.failures import describe_failures
from realrl.cli.planning.node_counts_table import name_reason
from realrl.config.files import write_whole

if TYPE_CHECKING:
    from realrl.planner.report.report import PlanReport


def write_page(report: "PlanReport", path: Path, title: str, *, source: str = "", command: str = "") -> None:
    """Write the HTML page of a plan.

    `source` is the origin of the times; `command` is the command line that made it. Neither is mentioned where it
    is empty.
    """
    page = find_template("page.html.jinja").render(
        title=title,
        version=__version__,
        command=command,
        plan=report.chosen.plan.to_text(report.scenario.graph),
        fits=report.chosen.fits,
        verdict=write_verdict(report),
        models=list_models(report),
        devices=format_devices(report.scenario.spec),
        batch=format_batch(report.scenario),
        figures=list_figures(report),
        timeline=draw_timeline(report),
        legend=list_legend(report),
        time_bars=make_time_bars(report),
        terms=list_terms(report),
        memory=make_memory_cards(report),
        parts=list_parts(report),
        rivals=list_rivals(report),
        bound=place_bound(report),
        failures=describe_failures(report),
        sizes=make_sizes_table(report),
        objective=f"the {name_reason(report.objective, priced=all(s.price is not None for s in report.sizes))}",
        calls=make_calls_table(report),
        remarks=list_remarks(report.chosen.plan, report.scenario),
        moves=make_moves_table(report),
        alternatives=make_alternatives_table(report),
        notes=write_notes(report, source),
    )
    write_whole(path, page)


def draw_timeline_svg(report: "PlanReport", title: str) -> str:
    """Draw the picture of a step alone, as the text of a self-contained SVG file."""
    picture = find_template("picture.svg.jinja")
    return picture.render(timeline=draw_timeline(report), legend=list_legend(report), title=title)
