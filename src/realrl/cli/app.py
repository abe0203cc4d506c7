"""The `realrl` command. A command imports its heavy modules only after its arguments are parsed."""

import os
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from typing import Annotated

import typer

from realrl import __version__
from realrl.cli.check import check
from realrl.cli.config import config
from realrl.cli.data import data
from realrl.cli.doctor import doctor
from realrl.cli.eval import eval
from realrl.cli.export import export
from realrl.cli.generate import generate
from realrl.cli.launchers import launchers
from realrl.cli.models import print_models
from realrl.cli.monitoring.commands import status, watch
from realrl.cli.plan import plan
from realrl.cli.profile import profile
from realrl.cli.replay import replay
from realrl.cli.report import report
from realrl.cli.serve import serve
from realrl.cli.session import COMMAND, session_rank
from realrl.cli.show import show
from realrl.cli.tokenizer import tokenizer
from realrl.cli.train import train
from realrl.runtime.processes.environment import is_writer
from realrl.runtime.processes.signals import Interrupted, find_interruption
from realrl.runtime.processes.slurm import join_slurm_step
from realrl.runtime.supervision.orphans import SCRATCH_VARIABLE

app = typer.Typer(
    name="realrl",
    help="RLHF training that plans itself.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
COMMANDS: dict[str, Callable[..., None]] = {
    "train": train,
    "plan": plan,
    "profile": profile,
    "show": show,
    "data": data,
    "check": check,
    "replay": replay,
    "config": config,
    "eval": eval,
    "generate": generate,
    "serve": serve,
    "export": export,
    "tokenizer": tokenizer,
    "models": print_models,
    "report": report,
    "doctor": doctor,
    "status": status,
    "watch": watch,
}
for name, command in COMMANDS.items():
    app.command(name)(command)
app.command(COMMAND, hidden=True)(session_rank)
app.add_typer(launchers, name="launch")


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"realrl {__version__}")
        raise typer.Exit
    join_slurm_step()


def run_app(arguments: Sequence[str]) -> int:
    """Run a command line, print its failure if it fails, and return its exit status.

    The status is 2 for a mistake of the user, 1 for any other failure, and 130 or 143 after an interruption.
    """
    # Text from JSON may hold half a surrogate pair, which UTF-8 cannot encode.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    status, failure = 0, None
    try:
        # `obj` holds the arguments, because some commands run the same command line again in every rank.
        app(args=list(arguments), prog_name="realrl", obj=list(arguments))
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except Interrupted:
        status = 1
    except Exception as error:  # a user must never see a traceback
        failure = error
    # Ask whether a signal came, because a library may have replaced or swallowed the exception of the signal.
    interrupted = find_interruption()
    if interrupted is not None:
        # The local launcher reports an interruption of the ranks that it started.
        if interrupted.message and is_writer() and SCRATCH_VARIABLE not in os.environ:
            print(f"realrl: {interrupted.message}", file=sys.stderr)
        return interrupted.status
    if failure is not None:
        from realrl.runtime.supervision.failures import report_failure

        return report_failure(failure)
    return status
