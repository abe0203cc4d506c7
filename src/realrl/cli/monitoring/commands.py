"""`realrl status` and `realrl watch`."""

import json
import sys
import time
from typing import Annotated

import typer

RunDir = Annotated[str, typer.Argument(help="Directory of a run, which may have ended.")]
CLEAR = "\033[H\033[2J"
"""Escape codes that clear a terminal."""


def status(
    run_dir: RunDir,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    watch: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0.2, max=86_400, help="Print again after this time, until the run ends."
        ),
    ] = None,
) -> None:
    """Show the progress of a run: step, rates, predicted end, memory, last checkpoint, the work of each rank."""
    from realrl.cli.monitoring.status import check_run, format_status, read_status

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


def watch(
    run_dir: RunDir,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any free port.")] = 0,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Only this machine reaches a loopback address.")
    ] = "127.0.0.1",
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Serve a page that follows a run: curves, samples, the last step beside its prediction, memory, ranks.

    It only reads the run's directory, and serves the page until Ctrl-C.
    """
    import webbrowser

    from realrl.cli.monitoring.run_page import RunPage
    from realrl.cli.monitoring.server import PageServer
    from realrl.cli.monitoring.status import check_run
    from realrl.config.errors import UserError
    from realrl.config.files import reason_of

    page = RunPage(check_run(run_dir))
    try:
        server = PageServer(host, port, page.routes)
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: {reason_of(error)}") from None
    except UnicodeError:
        raise UserError(f"--host {host!r} is not a host name") from None
    with server:
        typer.echo(f"{run_dir}: {server.url}")
        if not server.local:
            typer.echo(
                "note: the connection is not encrypted; only the token in the address protects the page"
            )
        if open_:
            webbrowser.open(server.url)
        server.serve_forever()
