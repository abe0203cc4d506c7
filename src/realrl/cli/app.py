"""The `realrl` command. Command modules import what they run only once the arguments are understood."""

from collections.abc import Sequence
from typing import Annotated

import typer

from realrl import __version__
from realrl.cli.config import config
from realrl.cli.generate import generate
from realrl.cli.plan import plan
from realrl.cli.profile import profile
from realrl.cli.report import report
from realrl.cli.show import show
from realrl.cli.tokenizer import tokenizer
from realrl.cli.train import train
from realrl.config.errors import UserError

app = typer.Typer(
    name="realrl",
    help="RLHF training that plans itself.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (train, plan, profile, show, config, generate, tokenizer, report):
    app.command()(command)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"realrl {__version__}")
        raise typer.Exit


def run_app(arguments: Sequence[str]) -> int:
    """Run a command line and give its exit status: 2 for what the user has to mend, 130 when interrupted."""
    try:
        app(args=list(arguments), prog_name="realrl")
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except UserError as error:
        from realrl.runtime.launch import report_user_error

        report_user_error(error)
        return 2
    return 0
