"""`python -m realrl` and the `realrl` command."""

import sys

from realrl.cli.app import run_app
from realrl.runtime.environment import leave, under_launcher


def main() -> None:
    """Run the command line of this process and exit with its status."""
    status = run_app(sys.argv[1:])
    if under_launcher():
        leave(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
