"""`python -m realrl` and the `realrl` command."""

import os
import sys

from realrl.runtime.processes.environment import has_abandoned_threads, leave, under_launcher
from realrl.runtime.processes.signals import find_interruption, forget_signals, raise_signals
from realrl.runtime.supervision.orphans import SCRATCH_VARIABLE


def main() -> None:
    """Run the command line of this process and exit with its status."""
    try:
        status = _run()
        # Nothing is left to do that an interrupt could spoil.
        forget_signals()
    except BaseException:
        interrupted = find_interruption()
        if interrupted is None:
            raise
        status = interrupted.status
    # What a tracker still waits for must not keep this process.
    if under_launcher() or has_abandoned_threads():
        leave(status)
    sys.exit(status)


def _run() -> int:
    if SCRATCH_VARIABLE in os.environ:
        from realrl.runtime.processes.logs import divert_errors

        # The local launcher hears signals for its processes.
        divert_errors()
    else:
        raise_signals()
        from realrl.runtime.processes.logs import open_screen

        # A run continues even if the terminal, or the `tee` that it prints to, has gone.
        sys.stderr = sys.__stderr__ = open_screen(2, owned=False)  # type: ignore[misc]
    # Only now: loading modules takes long enough to be interrupted.
    from realrl.config.script_objects import load_objects

    load_objects()
    from realrl.cli.app import run_app

    return _flushed(run_app(sys.argv[1:]))


def _flushed(status: int) -> int:
    """The exit status of a command that ended with `status`, after the last of its output is written."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # Nor may Python flush at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        # Whoever reads has had enough, as in `realrl generate ... | head`, or it has been said why this failed.
        if status == 0 and not isinstance(error, BrokenPipeError):
            from realrl.config.files import reason_of

            print(f"realrl: standard output cannot be written: {reason_of(error)}", file=sys.stderr)
            return 1
    return status


if __name__ == "__main__":
    main()
