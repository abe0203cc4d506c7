"""`python -m realrl` and the `realrl` command."""

import os
import sys

from realrl.runtime.environment import SCRATCH_VARIABLE, leave, under_launcher
from realrl.runtime.logs import divert_errors
from realrl.runtime.signals import raise_signals


def main() -> None:
    """Run the command line of this process and exit with its status."""
    if SCRATCH_VARIABLE in os.environ:
        # The local launcher hears signals for its processes.
        divert_errors()
    else:
        raise_signals()
    # Only now: loading modules takes long enough to be interrupted.
    from realrl.cli.app import run_app

    status = run_app(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads has had enough, as in `realrl generate ... | head`. Nor may Python flush at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if under_launcher():
        leave(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
