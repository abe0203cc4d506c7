"""`realrl doctor`."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from realrl.cli.recipe import Overrides, resolve_recipe

if TYPE_CHECKING:
    from realrl.runtime.doctor.machine import Finding


def doctor(
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="A recipe or the directory of a run; the check covers whether it fits this machine.",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NODESxDEVICES",
            help="Processes that should run here, such as 1x2; default: the recipe's.",
        ),
    ] = None,
    run_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Directory that a run would write to; default: the recipe's run_dir."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine, or all nodes under torchrun, for what would stop a run or slow it down. Takes seconds.

    It checks versions, GPUs, links, limits, disk, and whether the recipe fits. The exit status is 1 if there is a
    problem. See docs/doctor.md.
    """
    from realrl.recipe.load import load_experiment
    from realrl.runtime.doctor.examine import examine_locally, examine_together, find_launched, find_subject
    from realrl.runtime.processes.environment import is_writer, set_library_defaults

    set_library_defaults()
    experiment = None if recipe is None else load_experiment(*resolve_recipe(recipe, overrides or []))
    launched = find_launched(os.environ)
    subject = find_subject(experiment, cluster, run_dir, launched=launched)
    findings = examine_locally(subject) if launched is None else examine_together(subject)
    if is_writer() or launched is None:
        if as_json:
            typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
        else:
            _print_table(findings)
    raise typer.Exit(int(any(finding.status == "problem" for finding in findings)))


_COLOURS = {"ok": "green", "warning": "yellow", "problem": "bold red", "unknown": "magenta"}


def _print_table(findings: "Sequence[Finding]") -> None:
    from collections import Counter

    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    several = len({finding.node for finding in findings if finding.node}) > 1
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    for _ in range(2 + several):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        node = [Text(finding.node)] if several else []
        status = Text(finding.status, style=_COLOURS[finding.status])
        table.add_row(status, Text(finding.subject), *node, Text(finding.text))
    counts = Counter(finding.status for finding in findings)
    problems, warnings = (
        f"{counts[status]} {status}{'s' * (counts[status] != 1)}" for status in ("problem", "warning")
    )
    unknown = f", {counts['unknown']} not known" if counts["unknown"] else ""
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{problems}, {warnings}{unknown}")
