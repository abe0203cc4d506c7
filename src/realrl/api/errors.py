"""Errors of the Python API: one clear message, without the frames of this package above it."""

import signal
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from realrl.api.notebook import find_shell
from realrl.config.errors import RunError, UserCodeError, UserError
from realrl.runtime.processes.signals import Interrupted, forget_interruption
from realrl.runtime.supervision.failures import is_told_elsewhere

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
_PACKAGE = str(Path(__file__).parents[1])


def plain_errors(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let UserError and RunError leave a function as if the user's own line had raised them.

    Python and notebooks then print the user's frames and the message. Bugs keep their whole traceback. Ctrl-C
    becomes a KeyboardInterrupt that names the saved checkpoint, and SIGTERM ends the process.
    """

    @wraps(function)
    def call(*arguments: Parameters.args, **named: Parameters.kwargs) -> Result:
        try:
            return function(*arguments, **named)
        except (UserError, RunError) as error:
            raise error.with_traceback(None) from None
        except Interrupted as interrupted:
            forget_interruption()
            if interrupted.number != signal.SIGINT:
                raise SystemExit(interrupted.status) from None
            stopped = KeyboardInterrupt(interrupted.message)
            stopped.of_realrl = True  # type: ignore[attr-defined]
            raise stopped from None

    return call


def format_error(error: BaseException, frames: TracebackType | None) -> str:
    """Format an error with the frames of the user's code alone. A failed function of the user keeps its own
    trace."""
    theirs = [frame for frame in traceback.extract_tb(frames) if not frame.filename.startswith(_PACKAGE)]
    trace = (
        "".join(["Traceback (most recent call last):\n", *traceback.format_list(theirs)]) if theirs else ""
    )
    own = error.trace if isinstance(error, UserCodeError) else ""
    return f"{own}{trace}{_name(error)}: {error}\n"


def _name(error: BaseException) -> str:
    """Name the class of an error as users import it. A UserCodeError is a UserError for them."""
    if isinstance(error, KeyboardInterrupt):
        return "KeyboardInterrupt"
    return "realrl.UserError" if isinstance(error, UserError) else "realrl.RunError"


def install_hooks() -> None:
    """Have Python, and IPython if it runs, print these errors by `format_error`. A second call does nothing."""
    before = sys.excepthook
    if getattr(before, "of_realrl", False):
        return

    def hook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if isinstance(error, UserError | RunError) or getattr(error, "of_realrl", False):
            if not is_told_elsewhere(error):
                print(format_error(error, frames), end="", file=sys.stderr)
        else:
            before(kind, error, frames)

    hook.of_realrl = True  # type: ignore[attr-defined]
    sys.excepthook = hook
    shell = find_shell()
    if shell is not None:

        def show(
            shell: Any, kind: type[BaseException], error: BaseException, frames: TracebackType, **_: Any
        ) -> None:
            # The first frame is IPython's own.
            shown = UserError if issubclass(kind, UserError) else kind
            shell._showtraceback(shown, error, format_error(error, frames.tb_next).splitlines())

        shell.set_custom_exc((UserError, RunError), show)
