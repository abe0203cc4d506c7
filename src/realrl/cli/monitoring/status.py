"""`realrl status`."""

import json
import sys
import time
from typing import Annotated

import typer

CLEAR = "\033[H\033[2J"
"""What makes a terminal show nothing but what follows."""


def status(
    run_dir: Annotated[str, typer.Argument(help="Directory of a run that goes on or has ended.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    watch: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0.2, max=86_400, help="Print again after so long, while it goes on."
        ),
    ] = None,
) -> None:
    """Tell how far a run is: step, rates, end by prediction, memory, last checkpoint, what each rank does now."""
    from realrl.cli.monitoring.status_text import format_status
    from realrl.cli.reporting.status import check_run, read_status

    path = check_run(run_dir)
    while True:
        found = read_status(path)
        text = json.dumps(found.to_json()) if as_json else format_status(found)
        if watch is not None and not as_json and sys.stdout.isatty():
            text = CLEAR + text
        typer.echo(text)
        if watch is None or found.state != "running":
            return
        time.sleep(watch)
