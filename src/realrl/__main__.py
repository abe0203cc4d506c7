"""`python -m realrl` and the `realrl` command."""

import os
import sys

from realrl.runtime.environment import SCRATCH_VARIABLE, leave, under_launcher
from realrl.runtime.signals import forget_signals, interruption, raise_signals


def main() -> None:
    """Run the command line of this process and exit with its status."""
    try:
        status = _run()
        # Nothing is left to do that an interrupt could spoil.
        forget_signals()
    except BaseException:
        interrupted = interruption()
        if interrupted is None:
            raise
        status = interrupted.status
    if under_launcher():
        leave(status)
    sys.exit(status)


def _run() -> int:
    if SCRATCH_VARIABLE in os.environ:
        from realrl.runtime.logs import divert_errors

        # The local launcher hears signals for its processes.
        divert_errors()
    else:
        raise_signals()
    # Only now: loading modules takes long enough to be interrupted.
    from realrl.cli.app import run_app

    return run_app(sys.argv[1:])


if __name__ == "__main__":
    main()
