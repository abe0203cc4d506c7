"""Page of a plan: one file that any browser opens without a network, or its picture alone."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from realrl import __version__
from realrl.cli.page.memory import memory_cards, parts_used
from realrl.cli.page.sections import figures, models, terms_used, time_bars, verdict
from realrl.cli.page.tables import (
    alternatives_table,
    bound_percent,
    calls_table,
    moves_table,
    rivals,
    sizes_table,
)
from realrl.cli.page.text import batch, devices
from realrl.cli.page.timeline import draw_timeline
from realrl.cli.page.words import legend, notes, remarks
from realrl.config.files import write_whole

if TYPE_CHECKING:
    from realrl.planner.report.report import PlanReport


def write_page(report: "PlanReport", path: Path, title: str, *, source: str = "", command: str = "") -> None:
    """Write the HTML page of a plan.

    `source` is the origin of the times; `command` is the command line that made it. Neither is mentioned where it
    is empty.
    """
    page = _template("page.html.jinja").render(
        title=title,
        version=__version__,
        command=command,
        plan=report.chosen.plan.to_text(),
        fits=report.chosen.fits,
        verdict=verdict(report),
        models=models(report),
        devices=devices(report.scenario.spec),
        batch=batch(report.scenario),
        figures=figures(report),
        timeline=draw_timeline(report),
        legend=legend(report),
        time_bars=time_bars(report),
        terms=terms_used(report),
        memory=memory_cards(report),
        parts=parts_used(report),
        rivals=rivals(report),
        bound=bound_percent(report),
        sizes=sizes_table(report),
        objective={"time": "the fastest", "cost": "the cheapest"}[report.objective],
        calls=calls_table(report),
        remarks=remarks(report.chosen.plan),
        moves=moves_table(report),
        alternatives=alternatives_table(report),
        notes=notes(report, source),
    )
    write_whole(path, page)


def timeline_svg(report: "PlanReport", title: str) -> str:
    """Draw the picture of a step alone, as the text of a self-contained SVG file."""
    picture = _template("picture.svg.jinja")
    return picture.render(timeline=draw_timeline(report), legend=legend(report), title=title)


@cache
def _environment() -> Environment:
    loader = PackageLoader("realrl.cli", "page")
    return Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )


def _template(name: str) -> Template:
    return _environment().get_template(name)
