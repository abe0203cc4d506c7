"""`realrl watch`."""

from typing import Annotated

import typer


def watch(
    run_dir: Annotated[str, typer.Argument(help="Directory of a run that goes on or has ended.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any that is free.")] = 0,
    host: Annotated[
        str, typer.Option(help="Address to listen on; other machines reach all but those of loopback.")
    ] = "127.0.0.1",
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Serve a page that follows a run: curves, samples, the last step beside the predicted one, memory, ranks.

    It shows what is in the run's directory, changes nothing there, and goes on until Ctrl-C.
    """
    import webbrowser

    from realrl.cli.monitoring.run_page import RunPage
    from realrl.cli.monitoring.server import PageServer
    from realrl.cli.reporting.status import check_run
    from realrl.config.errors import UserError
    from realrl.config.files import reason_of

    page = RunPage(check_run(run_dir))
    try:
        server = PageServer(host, port, page.routes)
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: {reason_of(error)}") from None
    except UnicodeError:
        raise UserError(f"--host {host!r} is no name of a host") from None
    with server:
        typer.echo(f"{run_dir}: {server.url}")
        if not server.local:
            typer.echo(
                "note: what is sent is not encrypted; the token in the address is all that protects it"
            )
        if open_:
            webbrowser.open(server.url)
        server.serve_forever()
